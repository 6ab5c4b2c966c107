"""The run directory of one server: who may use it, what lies where, what is removed when.

Owns locking, layout and clean-up; starts no process. Layout (folders 0700, for the user alone):

    lock          held (flock) by the launcher for as long as the server runs
    server.json   endpoints, pids and settings of the server that runs or ran here
    agent.json    where the agent answers; agent-state.json, export-cursors.json: how far it got
    config/       one JSON per process: what it is started with, the API key included; removed at
                  stop
    rings/        one ring file per process          ─┐ the recording:
    traces/       OTLP JSON lines written by the agent ├ kept when the server stops,
    logs/         one log per process                ─┘ never overwritten unasked
    sock/         sockets of the control plane; removed at stop
    kv/           KV pools, when shared memory has no room; removed at stop

KV pools normally lie in a folder of their own on shared memory. A launcher that is killed cannot
remove it, so each such folder is locked by its owner and the next start removes the unlocked ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from server.config import is_utf8
from server.errors import StartError
from server.wire.endpoints import EndpointDirectory

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the kernel's shared memory, not a temporary folder
LATEST = "latest"
_RECORDING = ("rings", "traces", "logs")
_OF_PROCESSES = ("config", "sock", "kv")
_FOLDERS = (*_RECORDING, *_OF_PROCESSES)
_FILES = ("server.json", "agent.json", "agent-state.json", "export-cursors.json")
_MAKING = "pdtrace-new-"
_MAKING_S = 60.0
"""Nobody takes so long to lock and name a pool folder: who made an older one was killed."""
_POOL_MARGIN_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class RunDir:
    """A locked run directory. Use as a context manager: leaving it releases and cleans up.

    path       absolute
    pools      folder of KV pools; set by `place_pools`
    """

    path: Path
    _lock_fd: int
    _endpoints: EndpointDirectory
    pools: Path | None = None
    _pool_lock_fd: int | None = None
    _temporary: list[Path] = field(default_factory=list[Path])

    @classmethod
    def acquire(cls, path: Path, *, fresh: bool = False) -> Self:
        """Create and lock `path`.

        Raises StartError when another server runs there, when it holds a recording and `fresh`
        is false, or when it cannot be used. `fresh` removes what a server left there, and only
        that.
        """
        path = path.expanduser().absolute()
        if not is_utf8(str(path)):  # the working directory's name is part of it
            raise StartError(
                f"run directory {path} is not valid UTF-8: choose another with --run-dir"
            )
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(
                f"run directory {path} cannot be used ({error.strerror}): "
                "choose another with --run-dir"
            ) from error
        try:
            _lock(lock_fd, path)
            leftovers = [name for name in _RECORDING if _holds_something(path / name)]
            if leftovers and not fresh:
                raise StartError(
                    f"run directory {path} holds a recording ({', '.join(leftovers)}): "
                    "choose another with --run-dir, or replace it with --fresh"
                )
            _remove_own(path)
            for name in _FOLDERS:
                (path / name).mkdir(mode=0o700, exist_ok=True)
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(path=path, _lock_fd=lock_fd, _endpoints=EndpointDirectory(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def rings(self) -> Path:
        return self.path / "rings"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def state_file(self) -> Path:
        return self.path / "server.json"

    def log(self, instance: str) -> Path:
        return self.path / "logs" / f"{instance}.log"

    def config(self, instance: str) -> Path:
        return self.path / "config" / f"{instance}.json"

    def endpoint(self, instance: str) -> str:
        """ZeroMQ endpoint of a process on this host."""
        return self._endpoints.endpoint(instance)

    def place_pools(self, num_bytes: int, *, shared_memory: Path = SHARED_MEMORY) -> Path:
        """Choose where `num_bytes` of KV pools go: shared memory if it has room, else the run
        directory. Raises StartError when neither has.
        """
        remove_stale_pools(shared_memory)
        needed = num_bytes + _POOL_MARGIN_BYTES
        if _free_bytes(shared_memory) >= needed:
            # Named like a pool folder only once locked, or another start might take it for stale.
            made = Path(tempfile.mkdtemp(prefix=_MAKING, dir=shared_memory))
            self._pool_lock_fd = os.open(
                made / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._pool_lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = made.rename(shared_memory / made.name.replace(_MAKING, _pool_prefix()))
            self._temporary.append(folder)
        elif _free_bytes(self.path) >= needed:
            folder = self.path / "kv"
        else:
            raise StartError(
                f"KV pools need {needed / 2**20:.0f} MiB, but {shared_memory} has "
                f"{_free_bytes(shared_memory) / 2**20:.0f} and {self.path} "
                f"{_free_bytes(self.path) / 2**20:.0f} MiB free: lower --prefill-pages and "
                "--decode-pages"
            )
        self.pools = folder
        return folder

    def release(self) -> None:
        """Remove sockets, pools and what processes were told; keep the recording, unlock.
        Idempotent."""
        if self._lock_fd < 0:
            return
        self._endpoints.close()
        for folder in (*self._temporary, *(self.path / name for name in _OF_PROCESSES)):
            shutil.rmtree(folder, ignore_errors=True)
        if self._pool_lock_fd is not None:
            os.close(self._pool_lock_fd)
        os.close(self._lock_fd)
        self._lock_fd = -1


def write_private(path: Path, data: bytes) -> None:
    """Write a file that is the user's alone. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def timestamped(parent: Path, prefix: str = "") -> Path:
    """An unused path below `parent` named by the local time, such as `run/20250131-235959`."""
    name = prefix + time.strftime("%Y%m%d-%H%M%S")
    path = parent / name
    suffix = 2
    while path.exists():
        path = parent / f"{name}-{suffix}"
        suffix += 1
    return path


def point_latest(path: Path) -> None:
    """Let `latest`, beside the run directory `path`, name it; a `latest` that is no link stays."""
    link = path.parent / LATEST
    temporary = path.parent / f".{LATEST}.{os.getpid()}"
    if link.exists() and not link.is_symlink():
        return
    with contextlib.suppress(OSError):  # a convenience: a read-only parent is no error
        temporary.symlink_to(path.name)
        temporary.replace(link)


def remove_stale_pools(shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove pool folders of this user whose server is gone; return what was removed."""
    removed = _remove_half_made(shared_memory)
    for folder in shared_memory.glob(f"{_pool_prefix()}*"):
        with contextlib.suppress(OSError):  # it went away, or it is being made this moment
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            fd = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                removed.append(folder)
            finally:
                os.close(fd)
    return removed


def _remove_half_made(shared_memory: Path) -> list[Path]:
    """Remove what starts that were killed left behind before it had the name of a pool folder."""
    removed: list[Path] = []
    for folder in shared_memory.glob(f"{_MAKING}*"):
        with contextlib.suppress(OSError):  # it went away
            status = folder.lstat()
            mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if mine and time.time() - status.st_mtime > _MAKING_S:
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def _pool_prefix() -> str:
    return f"pdtrace-kv-{os.getuid()}-"


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        raise StartError(
            f"run directory {path} is in use by another server (pid {holder}): "
            "choose another with --run-dir"
        ) from error


def _holds_something(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _remove_own(path: Path) -> None:
    for name in _FOLDERS:
        entry = path / name
        if entry.is_symlink() or entry.is_file():
            raise StartError(f"{entry} is not a folder: choose another --run-dir")
        if name == "sock":
            _refuse_foreign_files(entry)
        shutil.rmtree(entry, ignore_errors=True)
    for name in _FILES:
        (path / name).unlink(missing_ok=True)


def _refuse_foreign_files(sockets: Path) -> None:
    """What a killed server left there are sockets; anything else is somebody's."""
    for entry in sorted(sockets.glob("*")):
        if not entry.is_socket():
            raise StartError(
                f"{entry} exists and is not a socket; move it away, it is left untouched"
            )


def _free_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
