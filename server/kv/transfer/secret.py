"""The secret that transfer processes of one server share, as a file in the run directory.

Owns the file: who may read it, and that two processes that start at once make one; what the secret
is used for is `tcp_auth`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from server.errors import StartError

NAME = "transfer.key"
SECRET_BYTES = 32


def shared_secret(run_path: Path) -> bytes:
    """The secret in `run_path`, made (mode 0600) if there is none.

    Raises StartError when it cannot be read or made, when others could read it, or when it is not
    what this makes.
    """
    path = run_path / NAME
    try:
        with contextlib.suppress(FileExistsError):
            if not path.exists():
                _make(path)
        return _read(path)
    except OSError as error:
        raise StartError(f"transfer secret {path}: {error.strerror}") from error


def _make(path: Path) -> None:
    """Raises FileExistsError when another process was faster: its file is whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StartError(f"transfer secret {path} is not a file: remove it, one is made anew")
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise StartError(
                f"transfer secret {path} can be read by others: remove it, one is made anew"
            )
        text = os.read(fd, 4 * SECRET_BYTES)
    finally:
        os.close(fd)
    try:
        secret = bytes.fromhex(text.decode())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise StartError(
            f"transfer secret {path} is not {2 * SECRET_BYTES} hexadecimal digits: remove it, one "
            "is made anew"
        )
    return secret
