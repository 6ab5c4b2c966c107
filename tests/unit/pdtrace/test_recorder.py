"""What an instrumented program sees: marks, waits, the guard, forks, and a recorder that is off."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.errors import RecordError, RingClosedError, RingCreateError
from pdtrace.propagation import RequestContext
from pdtrace.recorder import (
    WAIT_REFRESH_NS,
    Recorder,
    RequestTrace,
    should_raise,
)
from pdtrace.ring import (
    Counter,
    EndRecord,
    MarkRecord,
    OpenRecord,
    RingCapacity,
    RingReader,
    Value,
    scan_rings,
)
from pdtrace.ring.identity import resource_from_env
from pdtrace.stages import Gauge, Mark, Outcome, Role, WaitReason
from pdtrace.testing import SMALL_RING, FakeClock, MemoryRings

TINY = RingCapacity(blocks=4, block_bytes=4096)
CONTEXT = RequestContext.create(request_id="req-ü")


def open_recorder(
    directory: Path, *, role: Role = Role.DECODE, raise_errors: bool = True, **options: object
) -> Recorder:
    return Recorder.open(
        directory,
        role=role,
        instance=f"{role.value}-0",
        capacity=SMALL_RING,
        raise_errors=raise_errors,
        **options,  # pyright: ignore[reportArgumentType] test passes options through
    )


def read_counter(recorder: Recorder, counter: Counter) -> int:
    assert recorder.path is not None
    with RingReader(recorder.path) as reader:
        return reader.counters()[counter]


def waits(rings: MemoryRings) -> list[tuple[Value, ...]]:
    return [
        record.values
        for record in rings.records(Role.DECODE)
        if isinstance(record, MarkRecord) and record.mark is Mark.WAITING
    ]


# A request from begin to end


def test_a_request_is_recorded_from_begin_to_end(tmp_path: Path):
    clock = FakeClock(monotonic_ns=1000)
    with open_recorder(tmp_path, clock=clock) as recorder:
        assert recorder.path is not None
        trace = recorder.begin(CONTEXT)
        clock.advance(ns=5)
        trace.mark(Mark.RESERVE_RECEIVED)
        trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=12, free=3, blocker="req-7")
        trace.mark(Mark.PAGES_RESERVED, 12, at_ns=2000)
        trace.abort(Outcome.CANCELLED, "client_disconnected", by="client")
        clock.advance(ns=5)
        trace.end()
        reader = RingReader(recorder.path)
        key = trace.key
        assert reader.read() == [
            OpenRecord(key=key, t_ns=1000, context=CONTEXT),
            MarkRecord(mark=Mark.RESERVE_RECEIVED, key=key, attempt=1, t_ns=1005),
            MarkRecord(
                mark=Mark.WAITING,
                key=key,
                attempt=1,
                t_ns=1005,
                values=("decode.reserve", "kv_pages", 12, 3, None, None, "req-7", None),
            ),
            MarkRecord(mark=Mark.PAGES_RESERVED, key=key, attempt=1, t_ns=2000, values=(12, None)),
            MarkRecord(
                mark=Mark.ABORTED,
                key=key,
                attempt=1,
                t_ns=1005,
                values=("cancelled", "client_disconnected", "client"),
            ),
            EndRecord(key=key, t_ns=1010),
        ]
        assert not reader.closed
    assert reader.closed
    assert not reader.writer_alive()
    assert (reader.torn, reader.missed, recorder.errors) == (0, 0, 0)
    reader.close()


def test_attempts_have_keys_of_their_own_and_carry_their_number():
    rings = MemoryRings()
    recorder = rings.recorders[Role.PREFILL]
    with recorder.begin(CONTEXT) as first:
        first.mark(Mark.PREFILL_RECEIVED)
    with recorder.begin(CONTEXT.next_attempt()) as second:
        second.mark(Mark.PREFILL_RECEIVED)
    records = rings.records(Role.PREFILL)
    assert [type(record) for record in records] == [OpenRecord, MarkRecord, EndRecord] * 2
    marks = [record for record in records if isinstance(record, MarkRecord)]
    assert [mark.attempt for mark in marks] == [1, 2]
    assert first.key != second.key


def test_the_ring_says_who_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=ns,k%20=a%2Cb,shared=env")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    clock = FakeClock(monotonic_ns=10, wall_ns=20)
    resource = {"shared": "code", "gpu.count": 8, "service.version": "1.2"}
    with open_recorder(tmp_path, clock=clock, resource=resource) as recorder:
        assert recorder.path is not None
        with RingReader(recorder.path) as reader:
            identity = reader.identity
    assert recorder.path.name == f"decode-0-{os.getpid()}.ring"
    assert (identity.role, identity.instance, identity.pid) == (
        Role.DECODE,
        "decode-0",
        os.getpid(),
    )
    assert (identity.anchor.monotonic_ns, identity.anchor.wall_ns) == (10, 20)
    assert identity.service_name == "pd-decode"
    assert identity.service_namespace == "ns"
    assert identity.service_version == "1.2"
    assert identity.resource == {"k%20": "a,b", "shared": "code", "gpu.count": 8}
    assert identity.host_id
    assert identity.host_name
    assert identity.boot_id


def test_the_users_service_name_wins_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with open_recorder(tmp_path) as recorder:
        assert recorder.path is not None
        with RingReader(recorder.path) as reader:
            assert reader.identity.service_name == "mine"


@given(text=st.text())
def test_any_resource_variable_is_read_without_error(text: str):
    attributes = resource_from_env({"OTEL_RESOURCE_ATTRIBUTES": text})
    assert all(key and isinstance(value, str) for key, value in attributes.items())


# Waits


def test_a_wait_is_recorded_when_its_cause_changes():
    clock = FakeClock()
    rings = MemoryRings(clock=clock)
    trace = rings.recorders[Role.DECODE].begin(CONTEXT)
    for _ in range(3):
        trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=2, free=1)
    trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=2, free=1, blocker="req-1")
    trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=2, free=1, blocker="req-2")
    trace.wait("decode.reserve", WaitReason.HEAD_OF_LINE, position=1)
    trace.wait("decode.queue", WaitReason.HEAD_OF_LINE, position=1)
    assert [(values[0], values[1], values[6]) for values in waits(rings)] == [
        ("decode.reserve", "kv_pages", None),
        ("decode.reserve", "kv_pages", "req-1"),
        ("decode.reserve", "kv_pages", "req-2"),
        ("decode.reserve", "head_of_line", None),
        ("decode.queue", "head_of_line", None),
    ]


def test_a_wait_whose_numbers_alone_change_is_recorded_now_and_then():
    clock = FakeClock()
    rings = MemoryRings(clock=clock)
    trace = rings.recorders[Role.DECODE].begin(CONTEXT)
    for free in range(100):
        trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=500, free=free)
        clock.advance(ns=WAIT_REFRESH_NS // 10)
    recorded = waits(rings)
    assert [values[3] for values in recorded] == list(range(0, 100, 10))


# The guard


def test_errors_are_counted_and_logged_once_while_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    recorder = open_recorder(tmp_path, role=Role.PREFILL, raise_errors=False)
    trace = recorder.begin(CONTEXT)
    with caplog.at_level(logging.WARNING, logger="pdtrace"):
        trace.mark(Mark.RECEIVED)  # of the gateway
        trace.mark(Mark.DECODE_FINISHED, 1, "stop", 0)  # of decode
        trace.mark(Mark.CHUNK_STARTED, "one", 2)
        trace.mark(12345)  # pyright: ignore[reportArgumentType] the mistake under test
        trace.mark(None)  # pyright: ignore[reportArgumentType] the mistake under test
        trace.wait("prefill.queue", WaitReason.SLOTS, needed=object())  # pyright: ignore[reportArgumentType] the mistake under test
        recorder.gauge(Gauge.RUNNING, "many")  # pyright: ignore[reportArgumentType] the mistake under test
        recorder.gauge(99, 1)  # pyright: ignore[reportArgumentType] the mistake under test
        trace.mark(Mark.PREFILL_RECEIVED)
    kinds = [record.getMessage().split("further ")[1].split()[0] for record in caplog.records]
    assert len(kinds) == len(set(kinds))  # one line for each kind of error
    assert "bad_record" in kinds
    assert "a prefill process does not record RECEIVED; gateway does" in caplog.text
    assert recorder.errors == 8
    assert read_counter(recorder, Counter.ERRORS) == 8
    assert recorder.path is not None
    with RingReader(recorder.path) as reader:
        marks = [record for record in reader.read() if isinstance(record, MarkRecord)]
    assert [(mark.mark, mark.values) for mark in marks] == [
        (Mark.CHUNK_STARTED, (None, 2)),
        (Mark.WAITING, ("prefill.queue", "slots", *(None,) * 6)),
        (Mark.PREFILL_RECEIVED, ()),
    ]
    recorder.close()


def test_a_broken_clock_never_reaches_the_request(caplog: pytest.LogCaptureFixture):
    class BrokenClock(FakeClock):
        broken = False

        def monotonic_ns(self) -> int:
            if self.broken:
                raise OSError("no clock")
            return super().monotonic_ns()

    clock = BrokenClock()
    rings = MemoryRings(clock=clock)
    make_ring = rings.recorder(Role.DECODE)._make_ring  # pyright: ignore[reportPrivateUsage]
    recorder = Recorder(Role.DECODE, "decode-0", make_ring, clock=clock, raise_errors=False)
    clock.broken = True
    with recorder.begin(CONTEXT) as trace:
        trace.mark(Mark.RESERVE_RECEIVED)
        trace.wait("decode.reserve", WaitReason.KV_PAGES)
    assert recorder.errors == 4
    assert len(caplog.records) == 1
    # What does not need the clock is still recorded.
    (opened,) = rings.records(Role.DECODE)
    assert isinstance(opened, OpenRecord)


@pytest.mark.parametrize(
    ("variable", "argument", "expected"),
    [
        (None, None, False),
        ("", None, False),
        ("0", None, False),
        ("1", None, True),
        ("1", False, False),
        (None, True, True),
    ],
)
def test_errors_raise_when_asked_for(
    variable: str | None,
    argument: bool | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("PDTRACE_RAISE", raising=False)
    if variable is not None:
        monkeypatch.setenv("PDTRACE_RAISE", variable)
    assert should_raise(argument) is expected


def test_a_raising_recorder_raises_at_the_faulty_call(tmp_path: Path):
    with open_recorder(tmp_path) as recorder:
        trace = recorder.begin(CONTEXT)
        with pytest.raises(RecordError, match="does not record TOKENIZED; gateway does"):
            trace.mark(Mark.TOKENIZED)
        with pytest.raises(RecordError, match=r"pd\.kv\.pages takes int"):
            trace.mark(Mark.PAGES_RESERVED, "many")
        with pytest.raises(RecordError, match="takes 2 values, got 3"):
            trace.mark(Mark.PAGES_RESERVED, 1, 2, 3)


def test_cut_strings_are_counted(tmp_path: Path):
    with open_recorder(tmp_path) as recorder:
        trace = recorder.begin(RequestContext.create(request_id="語" * 100))
        trace.abort(Outcome.FAILED, "r" * 300, by="decode-0")
        assert read_counter(recorder, Counter.TRUNCATED) == 2
        assert recorder.path is not None
        with RingReader(recorder.path) as reader:
            opened, aborted = reader.read()
    assert isinstance(opened, OpenRecord)
    assert opened.context.request_id == "語" * 85
    assert isinstance(aborted, MarkRecord)
    assert aborted.values == ("failed", "r" * 255, "decode-0")


def test_a_second_thread_is_refused_except_for_gauges(tmp_path: Path):
    with open_recorder(tmp_path, raise_errors=False) as recorder:
        trace = recorder.begin(CONTEXT)

        def other_thread() -> None:
            trace.mark(Mark.RESERVE_RECEIVED)
            recorder.gauge(Gauge.RUNNING, 5)

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(timeout=10)
        trace.mark(Mark.KV_NOTICED)
        assert recorder.errors == 1
        assert recorder.path is not None
        with RingReader(recorder.path) as reader:
            _, mark = reader.read()
            assert reader.gauges() == {Gauge.RUNNING: 5}
        assert isinstance(mark, MarkRecord)
        assert mark.mark is Mark.KV_NOTICED


def test_the_thread_that_records_first_owns_the_recorder(tmp_path: Path):
    """A recorder may be opened in one thread and handed to the one that serves."""
    with open_recorder(tmp_path) as recorder:
        thread = threading.Thread(target=lambda: recorder.begin(CONTEXT).end())
        thread.start()
        thread.join(timeout=10)
        assert recorder.errors == 0
        assert recorder.path is not None
        with RingReader(recorder.path) as reader:
            assert len(reader.read()) == 2


def test_nothing_is_recorded_after_end_or_close(tmp_path: Path):
    recorder = open_recorder(tmp_path)
    trace = recorder.begin(CONTEXT)
    other = recorder.begin(CONTEXT)
    trace.end()
    trace.end()
    with pytest.raises(RecordError, match="record before end"):
        trace.mark(Mark.KV_NOTICED)
    recorder.close()
    recorder.close()
    with pytest.raises(RingClosedError, match="decode-0 is closed"):
        other.mark(Mark.KV_NOTICED)
    with pytest.raises(RingClosedError):
        recorder.begin(CONTEXT)
    with pytest.raises(RingClosedError):
        recorder.gauge(Gauge.RUNNING, 1)
    other.end()
    assert recorder.path is not None
    with RingReader(recorder.path) as reader:
        assert len(reader.read()) == 3
        assert reader.counters()[Counter.WRITTEN] == 3


def test_a_ring_that_cannot_be_made_fails_at_open(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RingCreateError, match="cannot create a ring of"):
        open_recorder(blocked)


# Long requests


def test_the_identity_of_a_request_in_flight_outlives_the_laps_of_the_ring():
    rings = MemoryRings(clock=FakeClock(monotonic_ns=77), capacity=TINY)
    recorder = rings.recorders[Role.DECODE]
    stuck = recorder.begin(CONTEXT)
    ended = recorder.begin(CONTEXT.next_attempt())
    ended.end()
    busy = recorder.begin(RequestContext.create(request_id="busy"))
    for number in range(5000):
        busy.mark(Mark.PAGES_RESERVED, number, 0)
        if number % 100 == 0:
            rings.recorder(Role.DECODE).gauge(Gauge.RUNNING, number)
    late = rings.records(Role.DECODE)
    opened = {record.key: record for record in late if isinstance(record, OpenRecord)}
    assert opened.keys() == {stuck.key, busy.key}
    assert opened[stuck.key] == OpenRecord(key=stuck.key, t_ns=77, context=CONTEXT)
    # An OPEN record is repeated about once a lap: it takes little of the ring.
    assert sum(isinstance(record, OpenRecord) for record in late) < len(late) // 20


def test_more_requests_in_flight_than_the_ring_can_hold_leave_room_for_marks():
    rings = MemoryRings(capacity=TINY)
    recorder = rings.recorders[Role.DECODE]
    traces = [recorder.begin(CONTEXT) for _ in range(500)]
    for trace in traces:
        trace.mark(Mark.RESERVE_RECEIVED)
    for trace in traces:
        trace.end()
    records = rings.records(Role.DECODE)
    ends = [record for record in records if isinstance(record, EndRecord)]
    assert ends[-1].key == traces[-1].key
    reader = rings.reader(Role.DECODE)
    assert reader.torn == 0
    assert reader.missed + len(records) > 1500


# Off


def test_a_disabled_recorder_has_the_interface_and_does_nothing(tmp_path: Path):
    before = list(tmp_path.iterdir())
    recorder = Recorder.disabled()
    assert not recorder.enabled
    trace = recorder.begin(CONTEXT)
    assert trace.context is CONTEXT
    with trace:
        trace.mark(Mark.RECEIVED, "anything", object(), at_ns=1)  # pyright: ignore[reportArgumentType] nothing is checked
        trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=1, free=0, at_ns=2)
        trace.abort(Outcome.FAILED, "x", by="y", at_ns=3)
        trace.end(at_ns=4)
    with recorder:
        recorder.gauge(Gauge.RUNNING, 1)
    recorder.close()
    recorder.begin(CONTEXT).end()
    assert recorder.errors == 0
    assert recorder.path is None
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", [Recorder, RequestTrace])
def test_the_disabled_twin_takes_every_call_of_the_real_one(kind: type):
    disabled: object = Recorder.disabled()
    if kind is RequestTrace:
        disabled = Recorder.disabled().begin(CONTEXT)
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in {"detach", "write_open", "finish", "leave_to_parent"}:
            continue
        twin = getattr(type(disabled), name)
        for parameter in inspect.signature(method).parameters.values():
            accepted = inspect.signature(twin).parameters
            takes_any = any(one.kind is one.VAR_KEYWORD for one in accepted.values())
            assert takes_any or parameter.name in accepted, f"{name}({parameter.name})"


# Forks


def in_child(work: object) -> int:
    """Exit code of a forked child that runs `work`: 0 when it returned."""
    assert callable(work)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            logging.exception("in the child")
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_records_into_a_ring_of_its_own(tmp_path: Path):
    recorder = open_recorder(tmp_path)
    parents = recorder.begin(CONTEXT)
    parents.mark(Mark.RESERVE_RECEIVED)
    childs = RequestContext.create(request_id="child")

    def child() -> None:
        assert recorder.path is None
        parents.mark(Mark.KV_NOTICED)  # the parent's request: dropped
        trace = recorder.begin(childs)
        trace.mark(Mark.RESERVE_RECEIVED)
        parents.mark(Mark.KV_NOTICED)  # dropped, and counted in the child's ring
        parents.end()
        trace.end()
        recorder.gauge(Gauge.RUNNING, 9)
        recorder.close()

    assert in_child(child) == 0
    parents.mark(Mark.PAGES_RESERVED, 1, 2)
    parents.end()
    recorder.close()

    assert recorder.path is not None
    with RingReader(recorder.path) as reader:
        marks = [record for record in reader.read() if isinstance(record, MarkRecord)]
        assert [mark.mark for mark in marks] == [Mark.RESERVE_RECEIVED, Mark.PAGES_RESERVED]
        assert (reader.torn, reader.gauges()) == (0, {})
        assert reader.counters()[Counter.DROPPED] == 0
    (child_path,) = set(scan_rings(tmp_path)) - {recorder.path}
    with RingReader(child_path) as reader:
        assert reader.identity.instance == "decode-0"
        assert reader.identity.pid != os.getpid()
        assert [type(record) for record in reader.read()] == [OpenRecord, MarkRecord, EndRecord]
        assert reader.gauges() == {Gauge.RUNNING: 9}
        assert reader.counters()[Counter.DROPPED] == 1
        assert reader.closed


def test_a_child_that_records_nothing_leaves_no_file(tmp_path: Path):
    recorder = open_recorder(tmp_path)
    assert in_child(recorder.close) == 0
    assert in_child(lambda: None) == 0
    assert scan_rings(tmp_path) == [recorder.path]
    assert recorder.path is not None
    with RingReader(recorder.path) as reader:
        assert reader.writer_alive()
        assert not reader.closed
    recorder.close()


def test_a_child_without_room_for_a_ring_serves_on(tmp_path: Path):
    directory = tmp_path / "rings"
    recorder = open_recorder(directory, raise_errors=False)

    def child() -> None:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        directory.write_text("in the way")
        with recorder.begin(CONTEXT) as trace:
            trace.mark(Mark.RESERVE_RECEIVED)
        recorder.gauge(Gauge.RUNNING, 1)
        assert recorder.errors >= 2

    assert in_child(child) == 0
    recorder.close()


def test_the_death_of_a_parent_shows_while_its_forked_child_lives(tmp_path: Path):
    code = f"""
        import os, sys
        sys.path.insert(0, {str(Path.cwd())!r})
        from pdtrace import Recorder, RequestContext, Role
        recorder = Recorder.open({str(tmp_path)!r}, role=Role.DECODE, instance="d")
        recorder.begin(RequestContext.create())
        forked, ready = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(ready, b".")
            sys.stdin.read()
            os._exit(0)
        os.read(forked, 1)
        print(recorder.path, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        with RingReader(parent.stdout.readline().strip()) as reader:
            assert reader.writer_alive()
            os.kill(parent.pid, signal.SIGKILL)
            os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
            assert not reader.writer_alive()
            assert len(reader.read(final=True)) == 1
        # The child ends when the pipe to its stdin closes, on leaving the block.
