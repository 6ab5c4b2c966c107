"""The embedded sink: OTLP JSON lines in `spans-000001.jsonl`, …, rotated, bounded in number.

Owns the files of one directory, which one sink at a time may write. Knows nothing of what a line
holds. A full disk costs the lines that did not fit, counted and reported once; it never raises. Who
follows the files (`pdtrace.export.spill`) keeps positions, and hears of a file before it is
deleted.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from pdtrace.errors import PdtraceError

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_FILES = 16
"""By default at most 1 GiB: the oldest file goes when a further one would exceed `MAX_FILES`."""

LOCK_NAME = ".writer.lock"

_NAME = re.compile(r"spans-(\d{6,})\.jsonl")
_READ_BYTES = 1 << 20
_LOCK_TRIES, _LOCK_PAUSE_S = 5, 0.02
_log = logging.getLogger(__name__)


class SinkError(PdtraceError):
    """The directory cannot be written, or another sink writes to it."""

    code: ClassVar[str] = "sink_unusable"


class SinkPosition(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A place between two lines: bytes of file `number`. Later places are greater."""

    number: Annotated[int, msgspec.Meta(ge=0)] = 1
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class FileSink:
    """Appends lines to the newest file of `directory`, made when missing (mode 0700).

    Each write() is on its way to the operating system when it returns, whole lines only. A line
    that a crash cut off is removed by the next sink before it appends. A file that somebody else
    deletes or changes is left alone, and a further one begun.

    files_deleted   oldest files removed to keep within `max_files`
    lines_lost      lines that could not be written
    before_delete   told the number of a file that is about to be removed, or was by somebody else

    Raises SinkError.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        assert max_file_bytes > 0
        assert max_files > 0
        self.directory = Path(directory)
        self.lines_lost = 0
        self.files_deleted = 0
        self.before_delete: Callable[[int], None] | None = None
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._failing = False
        self._fd: int | None = None
        self._size = 0
        self._lock_fd = -1
        try:
            locked = self.holds_lock()
            for _ in range(_LOCK_TRIES):
                if locked:
                    break
                time.sleep(_LOCK_PAUSE_S)  # who looks whether somebody writes holds it for a moment
                locked = self.holds_lock()
        except OSError as error:
            raise SinkError(
                f"cannot write traces to {self.directory}: {error.strerror}. "
                "Give a directory that this user may write to"
            ) from error
        if not locked:
            raise SinkError(
                f"another agent writes traces to {self.directory}: stop it, "
                "or use another directory"
            )
        files = span_files(self.directory)
        self._number = file_number(files[-1]) if files else 1
        try:
            self._open()
            self._cut_partial_line()
        except OSError as error:
            os.close(self._lock_fd)
            raise SinkError(f"cannot write {self._path(self._number)}: {error.strerror}") from error

    @property
    def position(self) -> SinkPosition:
        return SinkPosition(number=self._number, offset=self._size)

    def write(self, lines: Sequence[bytes]) -> list[SinkPosition | None]:
        """Appends `lines`, each ending in a newline; the position behind each, None if lost."""
        ends: list[SinkPosition | None] = []
        pending: list[bytes] = []
        end = self._size
        for line in lines:
            if end + len(line) > self._max_file_bytes and end > 0:
                ends += self._append(pending)
                pending = []
                self._rotate()
                end = 0
            pending.append(line)
            end += len(line)
        ends += self._append(pending)
        return ends

    def close(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def holds_lock(self) -> bool:
        """Whether the directory, made again if somebody has deleted it, is this sink's alone.

        Raises OSError when that cannot be known.
        """
        if self._lock_fd >= 0:
            try:
                here = (self.directory / LOCK_NAME).stat()
            except FileNotFoundError:
                pass
            else:
                return os.path.samestat(here, os.fstat(self._lock_fd))
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = fd
        return True

    def _append(self, lines: Sequence[bytes]) -> list[SinkPosition | None]:
        if not lines:
            return []
        try:
            self._begin_anew_if_changed()
            if self._fd is None:
                if not self.holds_lock():
                    raise OSError(errno.EBUSY, "another agent writes there")
                self._open()
            assert self._fd is not None
            data = memoryview(b"".join(lines))
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._give_up(lines, error)
            return [None] * len(lines)
        ends: list[SinkPosition | None] = []
        for line in lines:
            self._size += len(line)
            ends.append(self.position)
        if self._failing:
            self._failing = False
            _log.warning("traces are written to %s again", self.directory)
        return ends

    def _give_up(self, lines: Sequence[bytes], error: OSError) -> None:
        self.lines_lost += len(lines)
        if self._fd is not None:
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                pass  # a reader skips the half line; the next sink removes it
        if not self._failing:
            self._failing = True
            _log.error(
                "cannot write traces to %s: %s. Lines are lost and counted until it can be written",
                self.directory,
                error.strerror,
            )

    def _begin_anew_if_changed(self) -> None:
        """Go on in a further file when somebody has deleted or changed this one: what is written to
        it would be lost, or positions in it wrong."""
        if self._fd is None:
            return
        stat = os.fstat(self._fd)
        if stat.st_nlink and stat.st_size == self._size:
            return
        _log.warning(
            "%s was %s by somebody else: traces go on in a further file",
            self._path(self._number),
            "changed" if stat.st_nlink else "deleted",
        )
        if not stat.st_nlink and self.before_delete is not None:
            self.before_delete(self._number)
        self._rotate()

    def _rotate(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._number += 1
        self._size = 0
        for path in span_files(self.directory):
            number = file_number(path)
            if number > self._number - self._max_files:
                continue
            if self.before_delete is not None:
                self.before_delete(number)
            try:
                path.unlink()
            except OSError:
                continue  # tried again at the next rotation
            if not self.files_deleted:
                _log.warning(
                    "%s holds %d files of traces: the oldest are deleted as further ones begin",
                    self.directory,
                    self._max_files,
                )
            self.files_deleted += 1

    def _open(self) -> None:
        self._fd = os.open(
            self._path(self._number),
            os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )
        self._size = os.fstat(self._fd).st_size

    def _cut_partial_line(self) -> None:
        """A crash may have cut the last line: its spans count as not written."""
        assert self._fd is not None
        end = self._size
        while end > 0:
            begin = max(end - _READ_BYTES, 0)
            newline = os.pread(self._fd, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < self._size:
            os.ftruncate(self._fd, end)
            self._size = end

    def _path(self, number: int) -> Path:
        return self.directory / f"spans-{number:06d}.jsonl"


def has_writer(directory: str | Path) -> bool:
    """Whether a sink writes to a directory now."""
    try:
        fd = os.open(Path(directory) / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def span_files(directory: str | Path) -> list[Path]:
    """The files of a sink, oldest first; empty when there is no such directory."""
    files = [path for path in Path(directory).glob("spans-*.jsonl") if _NAME.fullmatch(path.name)]
    return sorted(files, key=file_number)


def file_number(path: Path) -> int:
    """The number in a sink file's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def lines_since(directory: str | Path, position: SinkPosition | None = None) -> Iterator[bytes]:
    """Whole lines written after `position`, oldest first; a cut last line is left out."""
    start = position or SinkPosition()
    for path in span_files(directory):
        number = file_number(path)
        if number < start.number:
            continue
        with path.open("rb") as file:
            if number == start.number:
                file.seek(start.offset)
            for line in file:
                if line.endswith(b"\n"):
                    yield line
