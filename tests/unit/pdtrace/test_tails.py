"""Looking at the rings often costs little, and overlooks nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pdtrace.agent import tails
from pdtrace.agent.tails import RingTails
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.export.sink import SinkPosition
from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder
from pdtrace.ring import RingReader
from pdtrace.ring.layout import BLOCK_HEADER, HEADER_BYTES, RECORD_HEADER
from pdtrace.stages import Role, StepKind
from pdtrace.testing import open_recorders, record_request

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[Mapping[Role, Recorder]]:
    opened = open_recorders(tmp_path)
    yield opened
    for recorder in opened.values():
        recorder.close()


@pytest.fixture
def ring_tails(tmp_path: Path) -> Iterator[RingTails]:
    found = RingTails(tmp_path, RequestTracker())
    yield found
    found.close()


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has not changed is not looked at again."""
    monkeypatch.setattr(tails, "_SETTLED_S", 0.0)
    monkeypatch.setattr(tails, "_THOROUGH_S", 3600.0)


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folder, once for each time that it is listed."""
    listed: list[Path] = []
    scan = tails.scan_rings

    def counting(directory: Path) -> list[Path]:
        listed.append(directory)
        return scan(directory)

    monkeypatch.setattr(tails, "scan_rings", counting)
    return listed


def read(ring_tails: RingTails) -> int:
    """Records that a round gives."""
    before = ring_tails.counts.records
    assert ring_tails.read(1, SinkPosition())
    return ring_tails.counts.records - before


@pytest.mark.usefixtures("unhurried")
def test_folder_is_listed_again_only_when_it_has_changed(
    tmp_path: Path, recorders: Mapping[Role, Recorder], ring_tails: RingTails, lists: list[Path]
) -> None:
    read(ring_tails)
    lists.clear()
    for number in range(5):
        record_request(recorders, request_id=f"req-{number}")
        assert read(ring_tails) > 0
    assert lists == []
    with Recorder.open(tmp_path, role=Role.DECODE, instance="decode-9") as late:
        late.step(StepKind.DECODE, [], tokens=1, begin_ns=1, end_ns=2)
        assert read(ring_tails) == 1
        assert len(lists) == 1
    read(ring_tails)
    assert not any(name.startswith("decode-9") for name in ring_tails.live)
    assert ring_tails.num_finished == 1
    assert len(ring_tails.states(SinkPosition())[0]) == len(Role) + 1
    lists.clear()
    next(tmp_path.glob("decode-9*")).unlink()
    read(ring_tails)
    assert ring_tails.states(SinkPosition())[0].keys() == set(ring_tails.live)
    assert len(lists) == 1


def test_ring_that_comes_within_a_tick_of_the_file_systems_clock_is_found_at_once(
    tmp_path: Path, recorders: Mapping[Role, Recorder], ring_tails: RingTails
) -> None:
    read(ring_tails)
    before = tmp_path.stat()
    with Recorder.open(tmp_path, role=Role.DECODE, instance="decode-9") as late:
        late.begin(RequestContext.create())
        os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert tmp_path.stat().st_mtime_ns == before.st_mtime_ns
        assert read(ring_tails) == 1


def test_folder_whose_time_never_changes_is_listed_all_the_same(
    tmp_path: Path,
    recorders: Mapping[Role, Recorder],
    ring_tails: RingTails,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tails, "_SETTLED_S", 0.0)
    read(ring_tails)
    before = tmp_path.stat()
    with Recorder.open(tmp_path, role=Role.DECODE, instance="decode-9") as late:
        late.begin(RequestContext.create())
        os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
        monkeypatch.setattr(tails, "_THOROUGH_S", 0.0)  # that time is over
        assert read(ring_tails) == 1


@pytest.mark.usefixtures("unhurried")
def test_rings_that_give_nothing_new_are_not_read(
    recorders: Mapping[Role, Recorder], ring_tails: RingTails, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_request(recorders)
    read(ring_tails)
    names: list[str] = []
    usual = RingReader.read

    def counting(reader: RingReader, **more: bool) -> object:
        names.append(reader.identity.instance)
        return usual(reader, **more)

    monkeypatch.setattr(RingReader, "read", counting)
    for _ in range(3):
        assert read(ring_tails) == 0
    assert ring_tails.at_end
    assert names == []
    recorders[Role.DECODE].begin(RequestContext.create())
    assert read(ring_tails) == 1
    assert set(names) == {recorders[Role.DECODE].instance}


DIE = """
    import os, signal, sys
    from pdtrace.propagation import RequestContext
    from pdtrace.recorder import Recorder
    from pdtrace.stages import Mark, Role
    recorder = Recorder.open(sys.argv[1], role=Role.DECODE, instance="dies")
    trace = recorder.begin(RequestContext.create())
    for line in sys.stdin:
        trace.mark(Mark.RESERVE_RECEIVED)
        print("marked", flush=True)
    """


@pytest.mark.usefixtures("unhurried")
def test_writer_that_is_killed_is_found_out_as_soon_as_its_ring_gives_nothing(
    tmp_path: Path, ring_tails: RingTails
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DIE), str(tmp_path)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            for _ in range(4):
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "marked\n"
                assert read(ring_tails) > 0
                assert ring_tails.num_live == 1
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "marked\n"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert read(ring_tails) == 1
    read(ring_tails)
    assert ring_tails.num_live == 0
    assert ring_tails.num_finished == 1


@pytest.mark.usefixtures("unhurried")
def test_dead_writer_whose_last_record_cannot_be_read_is_found_out(
    tmp_path: Path, ring_tails: RingTails
) -> None:
    """Its ring seems to hold more, and never gives it."""
    recorder = Recorder.open(tmp_path, role=Role.DECODE, instance="dies")
    recorder.begin(RequestContext.create())
    assert read(ring_tails) == 1
    assert recorder.path
    with RingReader(recorder.path) as reader:
        reader.read()
        position = reader.position()
    assert position.offset > BLOCK_HEADER.size
    recorder.path.chmod(0o600)
    with recorder.path.open("r+b") as file:
        file.seek(HEADER_BYTES + position.offset)
        file.write(RECORD_HEADER.pack(40 | 1 << 16, 0xBAD))
    for _ in range(3):
        assert read(ring_tails) == 0
    assert ring_tails.num_live == 1
    recorder.leave_to_parent()  # as its death does: the lock is let go of, and nothing said
    for _ in range(2):
        ring_tails.read(1, SinkPosition())
    assert ring_tails.num_live == 0
    assert ring_tails.counts.torn <= 1
