"""What the kernel says of a process, and whether it is the one that made the ring."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from pdtrace.inflight import Halt
from pdtrace.live.kernel_state import halt_of
from pdtrace.ring.identity import make_identity
from pdtrace.stages import Role

IDENTITY = make_identity(role=Role.DECODE, instance="decode-0", resource={})


def write_stat(proc: Path, state: str, *, started_s: float) -> None:
    """A process `started_s` seconds before now; its name is as awkward as a name may be."""
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = round((boot_s - started_s) * os.sysconf("SC_CLK_TCK"))
    fields = [state, *["0"] * 18, str(ticks), *["0"] * 20]
    folder = proc / str(IDENTITY.pid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{IDENTITY.pid} (a) T (b) {' '.join(fields)}\n")


@pytest.mark.parametrize(
    ("state", "halt"),
    [
        ("T", Halt.STOPPED),
        ("t", Halt.TRACED),
        ("D", Halt.IN_KERNEL),
        ("R", None),
        ("S", None),
        ("Z", None),  # its ring says that it is gone
    ],
)
def test_state_is_that_behind_the_name(tmp_path: Path, state: str, halt: Halt | None) -> None:
    write_stat(tmp_path, state, started_s=3600)
    assert halt_of(IDENTITY, proc=tmp_path) is halt


def test_process_that_got_the_pid_later_is_another(tmp_path: Path) -> None:
    anchor = msgspec.structs.replace(
        IDENTITY.anchor, monotonic_ns=time.monotonic_ns() - 1_000 * 10**9
    )
    identity = msgspec.structs.replace(IDENTITY, anchor=anchor)
    write_stat(tmp_path, "T", started_s=2_000)
    assert halt_of(identity, proc=tmp_path) is Halt.STOPPED
    write_stat(tmp_path, "T", started_s=500)
    assert halt_of(identity, proc=tmp_path) is None


@pytest.mark.parametrize("text", ["", "1 (a) T", "no parenthesis", "1 (a) T " + "x " * 30])
def test_what_is_no_process_says_nothing(tmp_path: Path, text: str) -> None:
    assert halt_of(IDENTITY, proc=tmp_path) is None
    folder = tmp_path / str(IDENTITY.pid)
    folder.mkdir()
    (folder / "stat").write_text(text)
    assert halt_of(IDENTITY, proc=tmp_path) is None
