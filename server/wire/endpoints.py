"""Where the inboxes of one server lie: Unix socket paths that fit, and are safe to bind, or ports.

Owns the choice of path and what may be removed from it; knows nothing of ZeroMQ.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from server.errors import StartError

IPC = "ipc://"
MAX_PATH_BYTES = 107  # sockaddr_un.sun_path has 108 bytes, one of them for the final zero
_FALLBACK_ROOT = Path("/tmp")  # noqa: S108  private directories below it, checked before use
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class EndpointDirectory:
    """Chooses ipc endpoints in `run_path/sock`, or in a short private directory under /tmp for
    those whose path would exceed the limit of Unix sockets. Directories are made with mode 0700.

    The short directory's name depends only on the run path and the user, so that a server started
    again on the same run directory finds what a killed one left behind.
    """

    def __init__(self, run_path: Path) -> None:
        self._run_path = run_path.absolute()
        self._made: set[Path] = set()

    def endpoint(self, name: str) -> str:
        """`ipc://…/<name>.sock`. Raises StartError when it cannot be made private."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"endpoint name {name!r} does not match {_NAME.pattern}")
        path = self._run_path / "sock" / f"{name}.sock"
        if not _fits(path):
            path = self._short_directory / path.name
        if path.parent not in self._made:
            _make_private(path.parent)
            self._made.add(path.parent)
        return f"{IPC}{path}"

    def close(self) -> None:
        """Remove the short directory, if one was made; `run_path/sock` stays with its run."""
        if self._short_directory in self._made:
            shutil.rmtree(self._short_directory, ignore_errors=True)
            self._made.discard(self._short_directory)

    @property
    def _short_directory(self) -> Path:
        digest = hashlib.sha256(os.fsencode(self._run_path)).hexdigest()[:16]
        return _FALLBACK_ROOT / f"pd-{os.getuid()}-{digest}"


class LoopbackPorts:
    """Chooses tcp endpoints on loopback, one for each name, so that a process that is started again
    has the address of the one before. Every user of the host can connect to them: for who has keys.

    free_port   a port that nobody listens on
    """

    def __init__(self, free_port: Callable[[], int]) -> None:
        self._free_port = free_port
        self._endpoints: dict[str, str] = {}

    def endpoint(self, name: str) -> str:
        """`tcp://127.0.0.1:<port>`."""
        if name not in self._endpoints:
            self._endpoints[name] = f"tcp://127.0.0.1:{self._free_port()}"
        return self._endpoints[name]


def _fits(path: Path) -> bool:
    try:
        return len(str(path).encode()) <= MAX_PATH_BYTES
    except UnicodeEncodeError:  # a file name that is no UTF-8 cannot stand in an endpoint
        return False


def _make_private(directory: Path) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise StartError(f"cannot make socket directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(f"{directory} is not a directory; remove it, sockets belong there")
    if found.st_uid != os.getuid():
        raise StartError(f"{directory} belongs to user {found.st_uid}, not to {os.getuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)


def clear_stale_socket(endpoint: str) -> None:
    """Make sure that `endpoint` may be bound; removes the socket file of a dead process.

    ZeroMQ unlinks whatever lies at an ipc path before it binds, so this check comes first. Raises
    StartError, with the file left alone, when it is not a socket or a process listens on it, and
    when the path is too long.
    """
    if not endpoint.startswith(IPC):
        return
    path = Path(endpoint.removeprefix(IPC))
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise StartError(
            f"socket path {path} has {num_bytes} bytes, Unix sockets allow {MAX_PATH_BYTES}: "
            "use a shorter run directory"
        )
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartError(f"cannot look at socket path {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise StartError(f"{path} exists and is not a socket; move it away, it is left untouched")
    if _is_listened_on(path):
        raise StartError(f"{path} is in use by a running process")
    path.unlink(missing_ok=True)


def socket_inode(endpoint: str) -> int | None:
    """Inode of the socket file of a bound ipc endpoint; None for other transports."""
    if not endpoint.startswith(IPC):
        return None
    try:
        return Path(endpoint.removeprefix(IPC)).lstat().st_ino
    except OSError:
        return None


def remove_socket(endpoint: str, inode: int | None) -> None:
    """Remove the socket file of `endpoint` if it is still the one bound as `inode`."""
    if inode is not None and socket_inode(endpoint) == inode:
        Path(endpoint.removeprefix(IPC)).unlink(missing_ok=True)


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        result = probe.connect_ex(str(path))
    # EAGAIN: somebody listens but does not accept, e.g. a stopped process
    return result in (0, errno.EAGAIN, errno.EINPROGRESS)
