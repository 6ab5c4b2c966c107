"""Entry of every child process: `python -m server.process CONFIG.json --parent PID`.

Owns what all roles share: dying with the launcher, logging, and turning an error at start into one
line and exit code 2. The work is the role's `run(config)`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from server.config import ProcessConfig
from server.engine.errors import ModelError
from server.errors import StartError
from server.log_fields import OneLine

AGENT = "agent"
ROLE_MODULES: Mapping[str, str] = {
    "gateway": "server.gateway.worker",
    "prefill": "server.prefill.worker",
    "decode": "server.decode.worker",
    "worker": "server.colocated.worker",
    "transfer": "server.kv.transfer.worker",
    AGENT: "server.agent",
}
EXIT_START_ERROR = 2
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def die_with_parent(parent: int, signal_number: int) -> None:
    """Ask the kernel for `signal_number` when the launcher dies; exit if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        logger.warning("prctl: %s; this process may outlive the launcher", ctypes.get_errno())
    if os.getppid() != parent:
        sys.exit(EXIT_START_ERROR)


def load_config(path: Path) -> ProcessConfig:
    """Read what the launcher wrote. Raises StartError when it is no ProcessConfig."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise StartError(f"{path}: {error}") from error


def run(config: ProcessConfig) -> None:
    """Run `config.role` until it is told to stop. Raises StartError for an unknown role."""
    module = ROLE_MODULES.get(config.role)
    if module is None:
        raise StartError(f"role is {config.role!r}, expected one of {', '.join(ROLE_MODULES)}")
    importlib.import_module(module).run(config)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 after a clean stop, 2 when the process cannot start, 1 for a crash."""
    parser = argparse.ArgumentParser(prog="python -m server.process", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--parent", type=int, help="pid of the launcher: die when it dies")
    options = parser.parse_args(arguments)
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[log])
    try:
        config = load_config(options.config)
        if options.parent is not None:
            # The agent gets the chance to export what the rings hold; it bounds that itself.
            die_with_parent(
                options.parent, signal.SIGTERM if config.role == AGENT else signal.SIGKILL
            )
        run(config)
    except (StartError, ModelError) as error:
        _say(f"error: {error}")
        return EXIT_START_ERROR
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _say(f"error: {error}: no room for the KV pool or the recording")
        return EXIT_START_ERROR
    return 0


def _say(words: str) -> None:
    with contextlib.suppress(OSError):  # the log is on the disk that is full
        print(words, file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End the process at once.

    All that had to be closed is closed. Taking the interpreter with torch in it apart takes
    seconds of processor time, on a busy machine longer than the launcher waits before it kills.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
