"""Derived model files kept between runs: where they lie and how they are written.

Owns `$XDG_CACHE_HOME/pdtrace`; knows nothing of what the files contain. Everything in it can be
deleted at any time and is rebuilt.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

logger = logging.getLogger(__name__)


class DiskCache:
    """Files by name under one folder. Safe for several processes that write the same name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def default(cls) -> DiskCache:
        """The user's cache: `$XDG_CACHE_HOME/pdtrace`, or `~/.cache/pdtrace`."""
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return cls(Path(base) / "pdtrace")

    def path(self, name: str) -> Path:
        return self.root / name

    def read(self, name: str) -> bytes | None:
        """The content of `name`, or None when it is absent or unreadable."""
        try:
            return self.path(name).read_bytes()
        except OSError:
            return None

    def discard(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self.path(name).unlink()

    def try_write(self, name: str, write: Callable[[Path], object]) -> Path | None:
        """Let `write` fill a temporary file, then rename it to `name` in one step.

        Returns the final path, or None when the folder cannot be written (a full or read-only
        disk costs speed at the next start, never the start itself).
        """
        temporary: Path | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            fd, raw = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=self.root)
            os.close(fd)
            temporary = Path(raw)
            write(temporary)
            temporary.replace(self.path(name))
        except OSError as error:
            logger.warning("cache folder %s is not writable: %s", self.root, error)
            return None
        else:
            return self.path(name)
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self, name: str) -> Generator[None]:
        """Hold `name` against other processes, so that one builds what all wait for.

        The lock ends with its holder, also when that is killed. Without a writable folder there
        is nothing to share, and nothing is held.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = self.path(f"{name}.lock").open("w")
        except OSError:
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def try_write_bytes(self, name: str, data: bytes) -> Path | None:
        return self.try_write(name, lambda path: path.write_bytes(data))
