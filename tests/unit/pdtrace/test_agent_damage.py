"""Rings, files and states that somebody damages, deletes, replaces or brings too many of, or too
much at once."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdtrace import semconv as a
from pdtrace.agent.command import STATE_NAME, Agent, AgentConfig, AgentError, AgentSummary
from pdtrace.export.delivery import TRACES_NAME
from pdtrace.export.sink import lines_since
from pdtrace.otlp.json_lines import decode_line
from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder, RequestTrace
from pdtrace.ring import RingCapacity, scan_rings
from pdtrace.ring.losses import read_losses
from pdtrace.spans import Span
from pdtrace.stages import Mark, Mode, Outcome, Role
from pdtrace.testing import open_recorders, record_request

WITHIN_S = 60.0
TINY = RingCapacity(blocks=4, block_bytes=4096)
QUICK = AgentConfig(poll_s=0.01, idle_poll_s=0.02, grace_s=0.2, flush_s=0.5, state_s=0.0)


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def agent_of(run: Path, config: AgentConfig = QUICK) -> Agent:
    return Agent(run / "rings", out=run, config=config)


def drained(run: Path, config: AgentConfig = QUICK) -> AgentSummary:
    agent = agent_of(run, config)
    agent.poll()
    wait_for(lambda: (agent.poll(), agent.is_drained)[1])
    return agent.close()


def record(run: Path, *request_ids: str) -> None:
    """Five processes that record whole requests and end."""
    recorders = open_recorders(run / "rings", capacity=TINY)
    for request_id in request_ids:
        record_request(recorders, request_id=request_id)
    for recorder in recorders.values():
        recorder.close()


def record_alone(run: Path, instance: str, request_id: str) -> Path:
    """A gateway that records one request and ends; its ring."""
    with Recorder.open(
        run / "rings", role=Role.GATEWAY, instance=instance, capacity=TINY
    ) as gateway:
        trace = gateway.begin(RequestContext.create(request_id=request_id))
        trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
        trace.mark(Mark.COMPLETED, Outcome.COMPLETED)
        trace.end()
        assert gateway.path is not None
        return gateway.path


def written(run: Path) -> dict[str, list[Span]]:
    """Spans by request id; each request is there once."""
    found = [decode_line(line) for line in lines_since(run / TRACES_NAME)]
    times = Counter(str(spans[0].attributes[a.REQUEST_ID.key]) for spans in found)
    assert not [request for request, count in times.items() if count > 1]
    return {str(spans[0].attributes[a.REQUEST_ID.key]): spans for spans in found}


# -- rings -----------------------------------------------------------------------------------


def test_ring_that_takes_the_name_of_one_that_is_read_is_read_before_it_is_deleted(
    tmp_path: Path,
) -> None:
    first = record_alone(tmp_path, "gateway-0", "one")
    agent = agent_of(tmp_path, AgentConfig(poll_s=0.01, grace_s=0.1, state_s=0.0, keep_rings=0))

    reads = 0
    tails = agent._tails  # pyright: ignore[reportPrivateUsage]
    drain = tails._drain  # pyright: ignore[reportPrivateUsage]

    def drain_and_replace(*arguments: object, **options: object) -> bool:
        nonlocal reads
        reads += 1
        if reads == 1:  # the agent has the first one open
            first.unlink()
            assert record_alone(tmp_path, "gateway-0", "two") == first
        return drain(*arguments, **options)  # pyright: ignore[reportArgumentType]

    tails._drain = drain_and_replace  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    wait_for(lambda: (agent.poll(), not scan_rings(tmp_path / "rings"))[1])
    summary = agent.close()
    assert (summary.rings, summary.requests) == (2, 2)
    assert set(written(tmp_path)) == {"one", "two"}


@contextmanager
def open_files(limit: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_rings_than_files_may_be_open_are_read_one_after_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [record_alone(tmp_path, f"gateway-{i}", f"r-{i}").name for i in range(120)]
    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with open_files(2 * used + 60):
        agent = agent_of(tmp_path)
        agent.poll()
        waiting = [name for name in names if name in " ".join(agent.look().problems)]
        assert 0 < len(waiting) < 120
        wait_for(lambda: (agent.poll(), agent.is_drained)[1])
        summary = agent.close()
    assert (summary.requests, summary.errors) == (120, 0)
    assert len(written(tmp_path)) == 120
    assert caplog.text.count("Too many open files") == 1
    assert not read_losses(tmp_path).sentences()


def test_what_is_no_file_neither_holds_the_agent_up_nor_is_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path, "one")
    rings = tmp_path / "rings"
    os.mkfifo(rings / "fifo.ring")
    (rings / "folder.ring").mkdir()
    (rings / "device.ring").symlink_to("/dev/zero")
    (rings / "loop.ring").symlink_to("loop.ring")
    (rings / "nothing.ring").symlink_to("there-is-nothing")
    agent = agent_of(tmp_path)
    wait_for(lambda: (agent.poll(), agent.is_drained)[1])
    for _ in range(3):
        agent.poll()
    assert agent.close().errors == 4
    assert set(written(tmp_path)) == {"one"}
    for name in ("fifo", "folder", "device", "loop"):
        assert caplog.text.count(f"{name}.ring") == 1
    assert "nothing.ring" not in caplog.text


def test_requests_whose_records_were_overwritten_or_torn_in_one_read_say_so_and_no_others(
    tmp_path: Path,
) -> None:
    gateway = Recorder.open(
        tmp_path / "rings", role=Role.GATEWAY, instance="gateway-0", capacity=TINY, budget=None
    )

    def begin(request_id: str) -> RequestTrace:
        trace = gateway.begin(RequestContext.create(request_id=request_id))
        trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
        return trace

    def end(trace: RequestTrace) -> None:
        trace.mark(Mark.COMPLETED, Outcome.COMPLETED)
        trace.end()

    agent = agent_of(tmp_path)
    agent.poll()
    [tail] = agent._tails._tails.values()  # pyright: ignore[reportPrivateUsage]
    parse = tail.reader._parse  # pyright: ignore[reportPrivateUsage]
    end(begin("before"))
    across = begin("across")
    for _ in range(150):
        across.mark(Mark.ADMITTED)

    def parse_and_lap(*arguments: Any) -> None:
        """The writer laps the reader, which has read one block, and damages one record."""
        tail.reader._parse = parse  # pyright: ignore[reportPrivateUsage]
        parse(*arguments)
        within = begin("within")
        for _ in range(600):
            across.mark(Mark.ADMITTED)
        for trace in (across, within):
            end(trace)
        end(begin("between"))
        damaged = begin("damaged")
        ring = damaged.ring
        assert ring is not None
        at = ring._pos  # pyright: ignore[reportPrivateUsage]
        damaged.mark(Mark.ADMITTED)
        ring._buffer[at + 20] ^= 0xFF  # pyright: ignore[reportPrivateUsage]
        end(damaged)
        end(begin("after"))
        gateway.close()

    tail.reader._parse = parse_and_lap  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    wait_for(lambda: (agent.poll(), agent.is_drained)[1])
    summary = agent.close()
    assert (summary.missed > 0, summary.torn) == (True, 1)
    found = {
        name: re.findall(r"lost \d+ records", str(spans[0].attributes.get(a.INCOMPLETE.key)))
        for name, spans in written(tmp_path).items()
    }
    overwritten = [f"lost {summary.missed} records"]
    assert found == {
        "before": [],
        "across": overwritten,
        "within": overwritten,
        "between": [],
        "damaged": ["lost 1 records"],
        "after": [],
    }


def record_many(run: Path, count: int) -> None:
    """Requests through a gateway and a worker, whose rings hold more than is read at once."""
    rings, capacity = run / "rings", RingCapacity(blocks=128)
    with (
        Recorder.open(
            rings, role=Role.GATEWAY, instance="gateway-0", capacity=capacity, budget=None
        ) as gateway,
        Recorder.open(
            rings, role=Role.WORKER, instance="worker-0", capacity=capacity, budget=None
        ) as worker,
    ):
        for number in range(count):
            context = RequestContext.create(request_id=f"r-{number}", mode=Mode.COLOCATED)
            request, leg = gateway.begin(context), worker.begin(context)
            request.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
            request.mark(Mark.TOKENIZED, "model", 12, 16, False, Mode.COLOCATED)
            request.mark(Mark.ADMITTED)
            request.mark(Mark.ROUTED, "worker-0", "worker-0")
            request.mark(Mark.DISPATCHED)
            leg.mark(Mark.PREFILL_RECEIVED)
            leg.mark(Mark.RESERVE_RECEIVED)
            leg.mark(Mark.PREFILL_STARTED)
            leg.mark(Mark.PREFILL_FINISHED)
            leg.mark(Mark.FIRST_TOKEN_COMMITTED)
            leg.mark(Mark.DECODE_FINISHED, 16)
            leg.end()
            request.mark(Mark.COMPLETED, Outcome.COMPLETED, None, None, 200, 16)
            request.end()


def test_request_is_not_given_up_as_without_gateway_while_that_is_still_read(
    tmp_path: Path,
) -> None:
    record_many(tmp_path, 5_000)
    summary = drained(tmp_path, AgentConfig(poll_s=0.01, grace_s=0.0, state_s=0.0))
    assert (summary.requests, summary.incomplete, summary.late) == (5_000, 0, 0)
    assert len(written(tmp_path)) == 5_000


def test_agent_looks_up_in_a_backlog_and_another_goes_on_anywhere_in_it(tmp_path: Path) -> None:
    count = 3_000
    record_many(tmp_path, count)
    done, rounds = 0, 0
    while done < count:
        agent = agent_of(tmp_path)
        for _ in range(3 + rounds):
            before = agent.summary()
            agent.poll(enough=lambda: True)
            after = agent.summary()
            assert after.records - before.records < 40_000  # one read of each of two rings
            assert after.requests - before.requests <= 128
        rounds += 1
        assert rounds < 100
        done += agent.close().requests
    assert rounds > 5
    found = written(tmp_path)
    assert len(found) == count
    assert not [spans for spans in found.values() if a.INCOMPLETE.key in spans[0].attributes]


def test_agent_that_is_slower_than_the_writers_leaves_the_records_in_the_rings(
    tmp_path: Path,
) -> None:
    record_many(tmp_path, 3_000)
    agent = agent_of(tmp_path)
    tracker = agent._tracker  # pyright: ignore[reportPrivateUsage]
    wait_for(lambda: (agent.poll(enough=lambda: True), tracker.num_done > 0)[1])
    open_then = tracker.num_open
    while tracker.num_done:
        records = agent.summary().records
        agent.poll(enough=lambda: True)
        assert agent.summary().records == records
    assert tracker.num_open < open_then
    agent.close()
    drained(tmp_path)
    assert len(written(tmp_path)) == 3_000


def test_agent_that_is_told_to_stop_in_a_backlog_leaves_the_rest_to_the_next(
    tmp_path: Path,
) -> None:
    record_many(tmp_path, 3_000)
    stop = threading.Event()
    stop.set()
    agent = agent_of(tmp_path, AgentConfig(grace_s=0.2, flush_s=0.05))
    agent.run(stop)
    first = agent.close()
    second = drained(tmp_path)
    assert first.requests + second.requests == 3_000
    assert first.incomplete + second.incomplete == 0
    assert len(written(tmp_path)) == 3_000


# -- files of traces -------------------------------------------------------------------------


def _delete(traces: Path) -> None:
    (traces / "spans-000001.jsonl").unlink()


def _empty(traces: Path) -> None:
    (traces / "spans-000001.jsonl").write_bytes(b"")


def _cut(traces: Path) -> None:
    os.truncate(traces / "spans-000001.jsonl", 100)


def _scribble(traces: Path) -> None:
    with (traces / "spans-000001.jsonl").open("ab") as file:
        file.write(b"half a line")


@pytest.mark.parametrize(
    "spoil", [_delete, _empty, _cut, _scribble, shutil.rmtree], ids=lambda f: f.__name__
)
def test_files_that_somebody_spoils_cost_what_was_in_them_and_nothing_more(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    agent = agent_of(tmp_path)

    def deliver(request_id: str) -> None:
        record(tmp_path, request_id)
        agent.poll()
        wait_for(lambda: (agent.poll(), agent.is_drained)[1])

    deliver("one")
    spoil(tmp_path / TRACES_NAME)
    deliver("two")
    deliver("three")
    summary = agent.close()
    assert (summary.requests, summary.lines_lost) == (3, 0)
    lines = lines_since(tmp_path / TRACES_NAME)
    whole = [decode_line(line) for line in lines if line.startswith(b"{")]
    found = [str(spans[0].attributes[a.REQUEST_ID.key]) for spans in whole]
    assert found == (["one", "two", "three"] if spoil is _scribble else ["two", "three"])
    assert "by somebody else" in caplog.text
    # The next agent goes on behind them, and repeats nothing.
    record(tmp_path, "four")
    assert drained(tmp_path).requests == 1


def test_agent_whose_directory_was_deleted_and_is_anothers_now_ends_and_leaves_it_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    record(run, "one")
    former = agent_of(run)
    former.poll()
    shutil.rmtree(run)
    record(run, "two")
    agent = agent_of(run)
    with pytest.raises(AgentError, match="is another agent's now"):
        wait_for(lambda: (former.poll(), False)[1])
    wait_for(lambda: (agent.poll(), agent.is_drained)[1])
    agent.close()
    state = (run / STATE_NAME).read_bytes()
    former.close()
    assert (run / STATE_NAME).read_bytes() == state
    assert set(written(run)) == {"two"}


def test_agent_whose_directory_was_deleted_makes_it_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    record(run, "one")
    agent = agent_of(run)
    agent.poll()
    shutil.rmtree(run)
    record(run, "two")
    wait_for(lambda: (agent.poll(), agent.is_drained)[1])
    agent.close()
    assert set(written(run)) >= {"two"}
    assert drained(run).requests == 0


# -- the state -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        {"version": 99},
        {"version": 99, "rings": 5},
        {"sink": {"number": 1, "offset": -5}},
        {"sink": {"number": 7, "offset": 0}},
        {"rings": {"*": {"position": {"block": 10**6}}}},
        {"rings": {"*": {"position": {"block": -1}}}},
        {"rings": {"*": {"position": {"offset": 7}}}},
    ],
    ids=json.dumps,
)
def test_state_that_cannot_be_costs_nothing_and_is_said(
    tmp_path: Path, spoil: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    recorders = open_recorders(tmp_path / "rings")
    record_request(recorders, request_id="one")
    agent = agent_of(tmp_path)
    wait_for(lambda: (agent.poll(), "one" in written(tmp_path))[1])
    agent.close()
    record_request(recorders, request_id="two")
    for recorder in recorders.values():
        recorder.close()
    path = tmp_path / STATE_NAME
    state = json.loads(path.read_bytes())
    for name, value in spoil.items():
        if isinstance(value, dict) and "*" in value:
            for ring in state[name].values():
                ring["position"].update(value["*"]["position"])
        else:
            state[name] = value
    path.write_text(json.dumps(state))
    drained(tmp_path)
    assert set(written(tmp_path)) == {"one", "two"}
    assert not read_losses(tmp_path).sentences()
    if "sink" not in spoil or spoil["sink"]["offset"] < 0:
        assert "read from" in caplog.text
