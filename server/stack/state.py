"""What runs, written down: `stack.json` in the folder of the stack.

Owns the file and who may use it. The folder holds besides: jaeger.yaml, prometheus.yml,
alertmanager.yml (copies of `collector/`), generated/, rules/, targets/, logs/, prometheus/,
alertmanager/.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from server.errors import StartError
from server.stack.detached import Identity, is_running

FOLDER_NAME = "stack"
"""Within the folder of run directories."""
STATE_NAME = "stack.json"
_LOCK_NAME = ".lock"


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """One program that was started."""

    name: str
    process: Identity
    url: str
    log: str


class StackState(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that was started.

    otlp         what OTEL_EXPORTER_OTLP_ENDPOINT is to say
    environment  what else servers that join are told by theirs
    """

    programs: tuple[Running, ...]
    otlp: str
    boot_id: str
    started_at: float
    environment: dict[str, str] = {}
    version: int = 1

    def url(self, name: str) -> str:
        return next(program.url for program in self.programs if program.name == name)

    @property
    def running(self) -> tuple[Running, ...]:
        """Those that still are."""
        if self.boot_id != boot_id():
            return ()
        return tuple(program for program in self.programs if is_running(program.process))

    @property
    def is_up(self) -> bool:
        return len(self.running) == len(self.programs)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_state(folder: Path) -> StackState | None:
    """None if nothing was started there, or it was stopped. Raises StartError for a file that is
    none of ours."""
    try:
        return msgspec.json.decode((folder / STATE_NAME).read_bytes(), type=StackState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(f"{folder / STATE_NAME} cannot be read: {reason}") from error


def write_state(folder: Path, state: StackState) -> None:
    temporary = folder / f".{STATE_NAME}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    temporary.replace(folder / STATE_NAME)


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """One at a time starts or stops a stack. Raises StartError when another does, or where a file
    of the stack cannot be made or written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_written(error, folder) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise StartError(f"another command starts or stops the stack in {folder}") from error
    try:
        yield
    except OSError as error:
        raise _not_written(error, folder) from error
    finally:
        os.close(handle)


def _not_written(error: OSError, folder: Path) -> StartError:
    return StartError(f"{error.filename or folder}: {error.strerror or error}")
