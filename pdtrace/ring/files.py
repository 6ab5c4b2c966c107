"""Ring files on disk: making one, finding them, telling whether the writer lives.

The writer holds an exclusive flock on its ring for as long as it lives; the kernel drops it however
the process ends, so a reader learns of `kill -9` without pids. The lock sits on a descriptor of its
own, which a forked child closes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import time
from itertools import count
from pathlib import Path

from pdtrace.errors import RingCreateError
from pdtrace.ring.layout import DIRECTORY_MODE, FILE_MODE, SUFFIX, RingCapacity, RingIdentity
from pdtrace.ring.writer import RingWriter

_UNSAFE = re.compile(r"^\.+|[^A-Za-z0-9._-]+")  # no hidden files, no folders
_MAX_NAME_CHARS = 100
_DRAFT = f"{SUFFIX}.draft"
_MADV_POPULATE_WRITE = 23  # of Linux; not in the mmap module


def scan_rings(directory: str | Path) -> list[Path]:
    """Ring files of a directory, sorted by name; empty when there is no such directory."""
    directory = Path(directory)
    names = [name for name in _names(directory) if name.endswith(SUFFIX) and name[0] != "."]
    return [directory / name for name in sorted(names)]


def create_ring(
    directory: str | Path, identity: RingIdentity, capacity: RingCapacity
) -> tuple[RingWriter, Path]:
    """Make `<directory>/<instance>-<pid>.ring` (mode 0400), all of its disk space taken.

    The directory is made (mode 0700) when missing. An existing file is never written over: a
    further ring of the same name gets `-2`, `-3`, … The file appears complete and locked.

    Raises RingCreateError, with what to do, when disk or permissions do not allow it.
    """
    directory = Path(directory)
    stem = f"{_UNSAFE.sub('_', identity.instance)[:_MAX_NAME_CHARS]}-{identity.pid}"
    try:
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        for attempt in count(1):
            name = stem if attempt == 1 else f"{stem}-{attempt}"
            path = directory / f"{name}{SUFFIX}"
            draft = directory / f".{name}{_DRAFT}"
            # The draft's exclusive creation reserves the final name until it is taken.
            try:
                fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            except FileExistsError:
                continue
            if path.exists():
                os.close(fd)
                draft.unlink()
                continue
            try:
                return _fill(fd, draft, path, identity, capacity), path
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
    except OSError as error:
        raise RingCreateError(
            f"cannot create a ring of {capacity.file_bytes} bytes in {directory}: "
            f"{error.strerror}. Give a directory that this user may write to and that has room, "
            "or a smaller capacity, or record nothing (Recorder.disabled())"
        ) from error
    raise AssertionError("count() does not end")


def remove_drafts(directory: str | Path, *, older_than_s: float) -> list[Path]:
    """Remove what writers left behind that died while they made their rings; which files.

    Never raises: what cannot be removed stays.
    """
    removed: list[Path] = []
    for name in _names(directory):
        if not name.startswith(".") or not name.endswith(_DRAFT):
            continue
        draft = Path(directory) / name
        try:
            fd = os.open(draft, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if time.time() - os.fstat(fd).st_mtime < older_than_s or is_locked(fd):
                    continue
                draft.unlink()
            finally:
                os.close(fd)
        except OSError:
            continue
        removed.append(draft)
    return removed


def _names(directory: str | Path) -> list[str]:
    """What a directory holds; nothing if there is no such directory that this user may list."""
    try:
        return os.listdir(directory)  # noqa: PTH208 -- an agent looks often, and paths take time
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _fill(
    fd: int, draft: Path, path: Path, identity: RingIdentity, capacity: RingCapacity
) -> RingWriter:
    # Without its blocks on disk, a disk that fills up later would kill the writer with SIGBUS.
    os.posix_fallocate(fd, 0, capacity.file_bytes)
    lock = _WriterLock(draft)
    try:
        buffer = mmap.mmap(fd, capacity.file_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        _touch(buffer)
        writer = RingWriter(buffer, identity, capacity, release_storage=lock.release)
        draft.rename(path)
    except BaseException:
        lock.release()
        raise
    return writer


def _touch(buffer: mmap.mmap) -> None:
    """Let the kernel make every page writable, which MAP_POPULATE does not do for a file on disk:
    else the first record in each page waits for it."""
    try:
        buffer.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.EFAULT:  # a store there would be a SIGBUS
            raise
        # Linux before 5.14 does not know it: records wait, then.


class _WriterLock:
    """The writer's flock, held until released, collected or the process's end."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


def is_locked(fd: int) -> bool:
    """Whether the writer of the ring open at `fd` is alive and has not closed it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
