"""Processes that outlive who started them: each is known by its pid and its time of start, so that
no other process that got the pid later is taken for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

_POLL_S = 0.05
_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat behind the name: the state, and ticks since the boot at the start."""

_started_here: dict[int, subprocess.Popen[bytes]] = {}
"""Children of this process, which has to take note of their end."""


class Identity(msgspec.Struct, frozen=True):
    """Of one process of this boot."""

    pid: int
    started_ticks: int


def start(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path, log: Path
) -> Identity:
    """Start a program in a session of its own, its output appended to `log`. Raises OSError."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started_here[process.pid] = process
    # Until it is waited for, an ended child keeps its pid: this identity is never another's.
    ticks = _started_ticks(process.pid)
    return Identity(process.pid, -1 if ticks is None else ticks)


def is_running(process: Identity) -> bool:
    """Whether it is there and has not ended."""
    return _started_ticks(process.pid) == process.started_ticks


def stop(processes: Sequence[Identity], *, timeout_s: float) -> list[Identity]:
    """SIGTERM to all, SIGKILL to those that are left after `timeout_s`; these are returned."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    left = list(processes)
    while (left := [one for one in left if is_running(one)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in left:
        _signal(process, signal.SIGKILL)
    return left


def _signal(process: Identity, number: int) -> None:
    """To this process alone: a handle is taken first, then it is asked whose it is."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_running(process):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def _started_ticks(pid: int) -> int | None:
    """None if there is no such process, or if it has ended and nobody has noticed."""
    _reap(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] in {b"Z", b"X"} else int(fields[_STARTED])


def _reap(pid: int) -> None:
    """A child of this process that ended is let go."""
    process = _started_here.get(pid)
    if process is not None and process.poll() is not None:
        del _started_here[pid]
