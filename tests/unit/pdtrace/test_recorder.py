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
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.budget import Costs, Detail
from pdtrace.calibration import MAX_NS, MEMBERS, measure_costs
from pdtrace.errors import RecordError, RingClosedError, RingCreateError
from pdtrace.propagation import RequestContext
from pdtrace.recorder import (
    WAIT_REFRESH_NS,
    Recorder,
    RequestTrace,
    recording_costs,
    should_raise,
)
from pdtrace.ring import (
    ClockRecord,
    Counter,
    EndRecord,
    MarkRecord,
    OpenRecord,
    Record,
    RingCapacity,
    RingReader,
    StepRecord,
    Value,
    scan_rings,
)
from pdtrace.ring.identity import resource_from_env
from pdtrace.ring.layout import MAX_STEP_MEMBERS
from pdtrace.stages import Gauge, Mark, Outcome, Role, StepKind, WaitReason
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


def test_a_wait_is_recorded_again_after_a_mark_because_its_stage_may_come_twice():
    rings = MemoryRings(clock=FakeClock())
    trace = rings.recorders[Role.DECODE].begin(CONTEXT)
    for _ in range(3):
        trace.mark(Mark.PREEMPTED)
        for _ in range(2):
            trace.wait("decode.preempted", WaitReason.KV_PAGES, needed=3, free=1)
        trace.mark(Mark.RESUMED)
    assert len(waits(rings)) == 3


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


@pytest.mark.parametrize("at_ns", [1.5, "now", 2**63])
def test_a_mark_at_what_is_no_time_is_one_error_that_says_so(tmp_path: Path, at_ns: Any):
    with open_recorder(tmp_path) as recorder:
        trace = recorder.begin(CONTEXT)
        # A reason is text and by is none: whoever packs these packs them one by one.
        with pytest.raises(RecordError, match=r"ABORTED: at_ns takes whole nanoseconds .* got"):
            trace.abort(Outcome.FAILED, "kv_timeout", at_ns=at_ns)
        with pytest.raises(RecordError, match="PAGES_RESERVED: at_ns takes whole nanoseconds"):
            trace.mark(Mark.PAGES_RESERVED, 1, 2, at_ns=at_ns)
        assert recorder.errors == 2


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


def test_several_gauges_are_set_in_one_call(tmp_path: Path):
    with open_recorder(tmp_path, raise_errors=False) as recorder:
        assert recorder.path is not None
        recorder.gauges((Gauge.RUNNING, Gauge.WAITING), (5, 0))
        recorder.gauges((Gauge.WAITING, Gauge.LAST_PROGRESS_NS), (2, 2**62))
        with RingReader(recorder.path) as reader:
            gauges = reader.gauges()
        assert gauges[Gauge.RUNNING] == 5
        assert gauges[Gauge.WAITING] == 2
        assert gauges[Gauge.LAST_PROGRESS_NS] == 2**62
        for values in ((1,), (1, 2, 3), ("many", 1)):
            recorder.gauges((Gauge.RUNNING, Gauge.WAITING), values)  # pyright: ignore[reportArgumentType] the mistake under test
        assert recorder.errors == 3
    recorder.gauges((Gauge.RUNNING,), (1,))
    assert recorder.errors == 4
    Recorder.disabled().gauges((Gauge.RUNNING,), (1,))


def test_a_second_thread_is_refused_except_for_gauges(tmp_path: Path):
    with open_recorder(tmp_path, raise_errors=False) as recorder:
        trace = recorder.begin(CONTEXT)

        def other_thread() -> None:
            trace.mark(Mark.RESERVE_RECEIVED)
            recorder.gauge(Gauge.RUNNING, 5)

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(timeout=60)
        trace.mark(Mark.KV_NOTICED)
        assert recorder.errors == 1
        assert recorder.path is not None
        with RingReader(recorder.path) as reader:
            _, mark = reader.read()
            assert reader.gauges()[Gauge.RUNNING] == 5
        assert isinstance(mark, MarkRecord)
        assert mark.mark is Mark.KV_NOTICED


def test_the_thread_that_records_first_owns_the_recorder(tmp_path: Path):
    """A recorder may be opened in one thread and handed to the one that serves."""
    with open_recorder(tmp_path) as recorder:
        thread = threading.Thread(target=lambda: recorder.begin(CONTEXT).end())
        thread.start()
        thread.join(timeout=60)
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
    assert opened[stuck.key] == OpenRecord(key=stuck.key, t_ns=77, context=CONTEXT, repeated=True)
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
        assert (reader.torn, Gauge.RUNNING in reader.gauges()) == (0, False)
        assert reader.counters()[Counter.DROPPED] == 0
    (child_path,) = set(scan_rings(tmp_path)) - {recorder.path}
    with RingReader(child_path) as reader:
        assert reader.identity.instance == "decode-0"
        assert reader.identity.pid != os.getpid()
        assert [type(record) for record in reader.read()] == [OpenRecord, MarkRecord, EndRecord]
        assert reader.gauges()[Gauge.RUNNING] == 9
        assert reader.counters()[Counter.DROPPED] == 2  # before it had a ring, and after
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


# Steps


def test_a_step_names_its_members_and_has_a_number():
    rings = MemoryRings()
    recorder = rings.recorders[Role.DECODE]
    traces = [recorder.begin(CONTEXT) for _ in range(3)]
    kwargs = {"tokens": 3, "begin_ns": 100, "end_ns": 250}
    assert recorder.step(StepKind.DECODE, traces, **kwargs) == 1
    assert recorder.step(StepKind.PREFILL, traces[:1], **kwargs) == 2
    assert recorder.step(StepKind.DECODE, [], **kwargs) == 3
    steps = [one for one in rings.records(Role.DECODE) if isinstance(one, StepRecord)]
    keys = tuple(trace.key for trace in traces)
    assert [(one.number, one.kind, one.members, one.size) for one in steps] == [
        (1, StepKind.DECODE, keys, 3),
        (2, StepKind.PREFILL, keys[:1], 1),
        (3, StepKind.DECODE, (), 0),
    ]
    assert all((one.begin_ns, one.end_ns, one.tokens) == (100, 250, 3) for one in steps)


def test_members_that_ended_or_are_not_of_this_process_are_counted_but_not_named():
    rings = MemoryRings()
    recorder = rings.recorders[Role.DECODE]
    mine, ended = recorder.begin(CONTEXT), recorder.begin(CONTEXT)
    ended.end()
    foreign = rings.recorder(Role.DECODE, "decode-1").begin(CONTEXT)
    off = Recorder.disabled().begin(CONTEXT)
    recorder.step(StepKind.DECODE, [ended, foreign, mine, off], tokens=4, begin_ns=1, end_ns=2)
    step = rings.records(Role.DECODE)[-1]
    assert isinstance(step, StepRecord)
    assert (step.members, step.size) == ((mine.key,), 4)


def test_of_a_huge_step_the_first_members_are_named_and_all_counted():
    rings = MemoryRings()
    recorder = rings.recorders[Role.DECODE]
    traces = [recorder.begin(CONTEXT) for _ in range(MAX_STEP_MEMBERS + 50)]
    recorder.step(StepKind.DECODE, traces, tokens=306, begin_ns=1, end_ns=2)
    step = rings.records(Role.DECODE)[-1]
    assert isinstance(step, StepRecord)
    assert step.members == tuple(trace.key for trace in traces[:MAX_STEP_MEMBERS])
    assert step.size == MAX_STEP_MEMBERS + 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "training"},
        {"traces": None},
        {"traces": [None]},
        {"tokens": -1},
        {"tokens": "many"},
        {"begin_ns": 3},
        {"end_ns": 2.5},
        {"end_ns": 2**63},
    ],
)
def test_a_step_that_cannot_be_recorded_never_reaches_the_loop(
    wrong: dict[str, object], tmp_path: Path
):
    recorder = open_recorder(tmp_path, raise_errors=False)
    good: dict[str, object] = {
        "kind": StepKind.DECODE,
        "traces": [recorder.begin(CONTEXT)],
        "tokens": 1,
        "begin_ns": 1,
        "end_ns": 2,
    }
    number = recorder.step(**{**good, **wrong})  # pyright: ignore[reportArgumentType] wrong on purpose
    assert (number, recorder.errors) == (1, 1)
    assert recorder.step(**good) == 2  # pyright: ignore[reportArgumentType] it is the right one
    assert recorder.path is not None
    with RingReader(recorder.path) as reader:
        _, step = reader.read()
    assert isinstance(step, StepRecord)
    assert step.number == 2
    recorder.close()
    recorder.step(**good)  # pyright: ignore[reportArgumentType] it is the right one
    assert recorder.errors == 2


def test_a_step_of_half_a_block_is_recorded_while_more_is_in_flight_than_the_ring_can_hold():
    rings = MemoryRings(capacity=TINY)
    recorder = rings.recorders[Role.DECODE]
    traces = [recorder.begin(CONTEXT) for _ in range(500)]
    for number in range(1, 21):
        assert number == recorder.step(
            StepKind.DECODE, traces[-MAX_STEP_MEMBERS:], tokens=256, begin_ns=1, end_ns=2
        )
        last = rings.records(Role.DECODE)[-1]
        assert isinstance(last, StepRecord)
        assert (last.number, len(last.members)) == (number, MAX_STEP_MEMBERS)
    assert recorder.errors == 0


# Clocks of other hosts


def test_a_clock_sample_is_recorded_with_its_bound():
    clock = FakeClock(monotonic_ns=70)
    rings = MemoryRings(clock=clock)
    recorder = rings.recorders[Role.DECODE]
    recorder.clock_sample(peer="gateway-0", peer_clock_id="h/b", offset_ns=-(2**62), error_ns=9)
    recorder.clock_sample(
        peer="g" * 300, peer_clock_id="語/" + "b" * 400, offset_ns=0, error_ns=0, at_ns=-5
    )
    assert rings.records(Role.DECODE) == [
        ClockRecord(t_ns=70, peer="gateway-0", peer_clock_id="h/b", offset_ns=-(2**62), error_ns=9),
        ClockRecord(
            t_ns=-5,
            peer="g" * 255,
            peer_clock_id="語/" + "b" * 400,
            offset_ns=0,
            error_ns=0,
        ),
    ]
    assert rings.reader(Role.DECODE).counters()[Counter.TRUNCATED] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"error_ns": -1},
        {"offset_ns": 2**63},
        {"offset_ns": 0.5},
        {"peer": None},
        {"peer_clock_id": ""},
        {"peer_clock_id": "x" * 2000},  # half an id would be another clock's
        {"at_ns": "now"},
    ],
)
def test_a_clock_sample_that_cannot_be_is_refused(wrong: dict[str, object]):
    recorder = MemoryRings().recorders[Role.DECODE]
    sample = {"peer": "g", "peer_clock_id": "h/b", "offset_ns": 1, "error_ns": 1}
    with pytest.raises(RecordError, match="clock"):
        recorder.clock_sample(**{**sample, **wrong})  # pyright: ignore[reportArgumentType] wrong on purpose


def test_processes_of_one_host_have_one_clock_id(tmp_path: Path):
    with open_recorder(tmp_path) as one, open_recorder(tmp_path, role=Role.PREFILL) as other:
        assert one.path is not None
        with RingReader(one.path) as reader:
            identity = reader.identity
        assert one.clock_id == f"{identity.host_id}/{identity.boot_id}"
        assert one.clock_id == other.clock_id == identity.clock_id
    assert Recorder.disabled().clock_id == ""


# Several blockers


def test_a_wait_names_several_blockers_the_most_important_first():
    rings = MemoryRings()
    trace = rings.recorders[Role.DECODE].begin(CONTEXT)

    def wait(blocker: str | Sequence[str] | None) -> None:
        trace.wait("decode.reserve", WaitReason.KV_PAGES, needed=2, free=1, blocker=blocker)

    wait([])
    wait(["a"])
    wait(("a", "b"))
    several = ["a", "b"]
    wait(several)  # the same ids: nothing new
    several.append("c")
    wait(several)
    wait(["a", "b", "c", "d", "e", "f"])
    wait(["a", "b", "c", "d", "x"])  # the same as far as they are kept
    wait(deque("a"))
    assert [values[6:] for values in waits(rings)] == [
        (None, None),
        ("a", None),
        ("a", "a\x1fb"),
        ("a", "a\x1fb\x1fc"),
        ("a", "a\x1fb\x1fc\x1fd"),
        ("a", None),
    ]


def test_ids_that_do_not_fit_are_left_out_whole_and_counted():
    rings = MemoryRings()
    trace = rings.recorders[Role.DECODE].begin(CONTEXT)
    ids = ["語" * 40, "b" * 120, "c" * 100, "d"]  # 120, 120, 100 and 1 bytes of at most 255
    trace.wait("decode.reserve", WaitReason.KV_PAGES, blocker=ids)
    trace.wait("decode.reserve", WaitReason.KV_PAGES, blocker=["a" * 256, "b"])
    trace.wait("decode.reserve", WaitReason.KV_PAGES, blocker=["odd\x1fid", "\ud800"])
    assert [values[6:] for values in waits(rings)] == [
        (ids[0], f"{ids[0]}\x1f{ids[1]}"),
        ("a" * 255, None),
        ("odd\x1fid", "odd?id\x1f?"),
    ]
    # Two ids of the first, two of the second, whose first is also cut to 255 bytes.
    assert rings.reader(Role.DECODE).counters()[Counter.TRUNCATED] == 2 + 2 + 1


@pytest.mark.parametrize("wrong", [7, [1, 2], ["a", None], b"ab", object()])
def test_what_is_no_blocker_never_reaches_the_request(wrong: object, tmp_path: Path):
    with open_recorder(tmp_path, raise_errors=False) as recorder:
        trace = recorder.begin(CONTEXT)
        trace.wait("decode.reserve", WaitReason.KV_PAGES, blocker=wrong)  # pyright: ignore[reportArgumentType] wrong on purpose
        trace.mark(Mark.PAGES_RESERVED, 1, 2)
        assert recorder.errors == 1


# The budget

_COSTS = Costs(record=1000, byte=50, attributes=500, wait=3000, step=2000, member=20)


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdtrace.recorder.recording_costs", lambda: _COSTS)


class Busy:
    """A decode process that does the same every millisecond, on a clock of its own."""

    def __init__(self, budget: float | None = 0.02) -> None:
        self.clock = FakeClock()
        self.rings = MemoryRings(clock=self.clock, budget=budget)
        self.recorder = self.rings.recorders[Role.DECODE]
        self.trace = self.recorder.begin(CONTEXT)
        self.records: list[Record] = []
        self.turn = 0

    def run(self, milliseconds: int, *, marks: int = 0, waits: int = 0, steps: int = 0) -> None:
        for _ in range(milliseconds):
            self.turn += 1
            for number in range(marks):
                self.trace.mark(Mark.DECODE_RELEASED, number, self.turn)
            for number in range(waits):
                blocker = f"req-{self.turn}-{number}"
                self.trace.wait("decode.queue", WaitReason.SLOTS, blocker=blocker)
            for _ in range(steps):
                now_ns = self.clock.monotonic_ns()
                self.recorder.step(
                    StepKind.DECODE, [self.trace], tokens=1, begin_ns=now_ns, end_ns=now_ns
                )
            self.clock.advance(ms=1)
            self.records += self.rings.records(Role.DECODE)

    @property
    def detail(self) -> Detail:
        return Detail(self.reader.gauges()[Gauge.RECORDING_DETAIL])

    @property
    def reader(self) -> RingReader:
        return self.rings.reader(Role.DECODE)

    def recorded(self, what: type[Record] | Mark) -> int:
        return sum(
            isinstance(one, MarkRecord) and one.mark is what
            if isinstance(what, Mark)
            else isinstance(one, what)
            for one in self.records
        )


@pytest.mark.usefixtures("known_costs")
def test_within_its_budget_everything_is_recorded():
    busy = Busy()
    busy.run(5000, marks=2, waits=1, steps=1)  # 0.36 + 0.3 + 0.2 %
    assert busy.recorded(StepRecord) == busy.recorded(Mark.WAITING) == 5000
    assert busy.recorded(Mark.DECODE_RELEASED) == 10_000
    gauges, counters = busy.reader.gauges(), busy.reader.counters()
    assert gauges[Gauge.RECORDING_DETAIL] == 3
    assert 6000 < gauges[Gauge.RECORDING_SHARE_PPM] < 9000
    assert not any(counters[one] for one in Counter if one.name.startswith("SHED"))


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize(
    ("load", "detail"),
    [
        ({"marks": 5, "waits": 1, "steps": 10}, Detail.WAITS),
        ({"marks": 5, "waits": 10, "steps": 1}, Detail.MARKS),
        ({"marks": 12, "waits": 1, "steps": 1}, Detail.ESSENTIAL),
    ],
)
def test_beyond_it_detail_is_left_out_and_counted(
    load: dict[str, int], detail: Detail, caplog: pytest.LogCaptureFixture
):
    busy = Busy()
    busy.run(3000, **load)
    gauges, counters = busy.reader.gauges(), busy.reader.counters()
    assert gauges[Gauge.RECORDING_DETAIL] == detail
    assert gauges[Gauge.RECORDING_SHARE_PPM] < 20_000
    steps, waits = busy.recorded(StepRecord), busy.recorded(Mark.WAITING)
    assert counters[Counter.SHED_STEPS] == 3000 * load["steps"] - steps > 0
    assert counters[Counter.SHED_WAITS] == 3000 * load["waits"] - waits
    # No mark is ever left out.
    released = [
        one
        for one in busy.records
        if isinstance(one, MarkRecord) and one.mark is Mark.DECODE_RELEASED
    ]
    assert len(released) == 3000 * load["marks"]
    bare = sum(one.values == (None, None) for one in released)
    assert counters[Counter.SHED_ATTRIBUTES] == bare
    assert (bare > 0) is (detail is Detail.ESSENTIAL)
    assert (counters[Counter.SHED_WAITS] > 0) is (detail < Detail.WAITS)
    assert len(caplog.records) == 1  # said once
    assert "takes more than its budget of 0.02 of a core" in caplog.text
    assert busy.reader.missed == 0


@pytest.mark.usefixtures("known_costs")
def test_what_a_trace_cannot_do_without_is_recorded_at_the_lowest_level():
    busy = Busy()
    busy.run(1000, marks=50)
    assert busy.detail is Detail.ESSENTIAL
    assert isinstance(busy.records[-1], MarkRecord)
    assert busy.records[-1].values == (None, None)
    busy.trace.mark(Mark.DECODE_FINISHED, 17, "stop", 0)
    busy.trace.abort(Outcome.FAILED, "kv_timeout", by="decode-0")
    finished, aborted = busy.rings.records(Role.DECODE)
    assert isinstance(finished, MarkRecord)
    assert isinstance(aborted, MarkRecord)
    assert finished.values == (17, "stop", 0)
    assert aborted.values == ("failed", "kv_timeout", "decode-0")
    with pytest.raises(RecordError, match="does not record TOKENIZED"):
        busy.trace.mark(Mark.TOKENIZED, "m")


@pytest.mark.usefixtures("known_costs")
def test_detail_comes_back_when_the_load_has_gone_without_a_block_to_fill():
    busy = Busy()
    busy.run(1000, marks=50, steps=1, waits=1)
    assert busy.detail is Detail.ESSENTIAL
    steps = busy.recorder.step(StepKind.DECODE, [], tokens=0, begin_ns=0, end_ns=0)
    assert steps == 1001  # a step that is left out has its number
    waiting = busy.recorder.begin(CONTEXT)
    waiting.wait("decode.queue", WaitReason.SLOTS, needed=1, free=0)
    busy.records.clear()
    for _ in range(10):
        busy.clock.advance(s=1)
        busy.recorder.begin(CONTEXT).end()
        waiting.wait("decode.queue", WaitReason.SLOTS, needed=1, free=0)
    assert busy.detail is Detail.FULL
    busy.run(1, marks=1, steps=1)
    assert busy.recorded(StepRecord) == 1
    step = next(one for one in busy.records if isinstance(one, StepRecord))
    assert step.number == 1002
    # The wait that was left out is said once there is room: nothing about it has changed.
    assert busy.recorded(Mark.WAITING) == 1
    assert isinstance(busy.records[-2], MarkRecord)
    assert busy.records[-2].values == (0, busy.turn)


@pytest.mark.usefixtures("known_costs")
def test_a_forked_child_begins_with_all_detail_whatever_its_parent_had():
    busy = Busy()
    busy.run(1000, marks=50)
    assert busy.detail is Detail.ESSENTIAL
    busy.recorder.leave_to_parent()  # what happens in a child
    trace = busy.recorder.begin(CONTEXT)
    assert busy.detail is Detail.FULL
    trace.mark(Mark.DECODE_RELEASED, 1, 2)
    busy.recorder.step(StepKind.DECODE, [trace], tokens=1, begin_ns=1, end_ns=2)
    _, released, step = busy.rings.records(Role.DECODE)
    assert isinstance(released, MarkRecord)
    assert released.values == (1, 2)
    assert isinstance(step, StepRecord)
    assert (step.number, step.members) == (1, (trace.key,))


@pytest.mark.usefixtures("known_costs")
def test_without_a_guard_nothing_is_left_out():
    busy = Busy(budget=None)
    busy.run(1000, marks=50, steps=1)
    assert busy.recorded(StepRecord) == 1000
    assert Gauge.RECORDING_DETAIL not in busy.reader.gauges()


def test_the_budget_is_read_when_the_recorder_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PDTRACE_BUDGET", "2 percent")
    with pytest.raises(RingCreateError, match="PDTRACE_BUDGET takes a share of one core") as got:
        open_recorder(tmp_path)
    assert "'2 percent'" in str(got.value)
    assert scan_rings(tmp_path) == []
    monkeypatch.setenv("PDTRACE_BUDGET", "off")
    with open_recorder(tmp_path) as recorder, RingReader(recorder.path or "") as reader:
        assert Gauge.RECORDING_DETAIL not in reader.gauges()
    monkeypatch.setenv("PDTRACE_BUDGET", "0.5")
    with open_recorder(tmp_path) as recorder, RingReader(recorder.path or "") as reader:
        assert reader.gauges() == {Gauge.RECORDING_DETAIL: 3, Gauge.RECORDING_SHARE_PPM: 0}
    monkeypatch.delenv("PDTRACE_BUDGET")
    with pytest.raises(RingCreateError, match="budget takes a share"):
        open_recorder(tmp_path, budget=3)


def test_costs_are_measured_once_in_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    recording_costs.cache_clear()
    costs = recording_costs()
    assert recording_costs() is costs
    assert costs.record > 0
    assert costs.wait > costs.record
    assert costs.step > 0
    assert min(costs.byte, costs.attributes, costs.member) >= 0
    # However slow the machine: one round, then the deadline.
    rings = MemoryRings(capacity=RingCapacity(blocks=64))
    traces = [rings.recorders[Role.DECODE].begin(CONTEXT) for _ in range(MEMBERS)]
    times = iter(range(0, 10**12, MAX_NS))
    monkeypatch.setattr("pdtrace.calibration.time.thread_time_ns", lambda: next(times))
    before = len(rings.records(Role.DECODE))
    assert before == MEMBERS
    measure_costs(rings.recorders[Role.DECODE], traces)
    one_round = len(rings.records(Role.DECODE))
    assert 0 < one_round < 500


# Forks again: what is lost is counted


def test_what_a_child_drops_without_a_ring_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    recorder = open_recorder(tmp_path)
    parents = recorder.begin(CONTEXT)

    def child() -> None:
        caplog.clear()
        for _ in range(5):
            parents.mark(Mark.KV_NOTICED)
        assert recorder.dropped == 5
        assert len(caplog.records) == 1
        assert "decode-0: a forked child recorded on a request" in caplog.text
        os._exit(0)  # the ring never comes

    assert in_child(child) == 0
    assert recorder.dropped == 0
    assert scan_rings(tmp_path) == [recorder.path]
    recorder.close()


def test_a_childs_drops_before_its_ring_are_in_the_ring(tmp_path: Path):
    recorder = open_recorder(tmp_path)
    parents = recorder.begin(CONTEXT)

    def child() -> None:
        for _ in range(3):
            parents.mark(Mark.KV_NOTICED)
        first = recorder.step(StepKind.DECODE, [parents], tokens=1, begin_ns=1, end_ns=2)
        assert first == 1  # of this ring, whatever the parent did
        parents.mark(Mark.KV_NOTICED)
        assert read_counter(recorder, Counter.DROPPED) == recorder.dropped == 4
        assert recorder.path is not None
        with RingReader(recorder.path) as reader:
            (step,) = reader.read()
        assert isinstance(step, StepRecord)
        assert (step.members, step.size) == ((), 1)
        recorder.close()

    recorder.step(StepKind.DECODE, [parents], tokens=1, begin_ns=1, end_ns=2)
    assert in_child(child) == 0
    recorder.close()


def test_role_may_be_a_name_and_an_unknown_one_is_said(tmp_path: Path) -> None:
    name: Role = "decode"  # pyright: ignore[reportAssignmentType] as a caller without types
    with Recorder.open(tmp_path, role=name, instance="d", capacity=SMALL_RING) as recorder:
        assert recorder.path is not None
        with RingReader(recorder.path) as reader:
            assert reader.identity.role is Role.DECODE
    wrong: Role = "decoder"  # pyright: ignore[reportAssignmentType] as above
    with pytest.raises(RingCreateError, match=r"role is 'decoder', expected one of gateway, pre"):
        Recorder.open(tmp_path, role=wrong, instance="d", capacity=SMALL_RING)
