"""Agents that are killed, stopped and started again, beside processes that record and die."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pdtrace import semconv as a
from pdtrace.agent import loop
from pdtrace.agent.command import STATE_NAME, Agent, AgentConfig, AgentSummary
from pdtrace.export.delivery import TRACES_NAME
from pdtrace.export.sink import lines_since
from pdtrace.otlp.json_lines import SpanHead, decode_line
from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder
from pdtrace.ring import FORMAT_VERSION, RingCapacity, scan_rings
from pdtrace.ring.losses import WriterEnd, read_losses
from pdtrace.spans import Span
from pdtrace.stages import CHAINS, Mark, Mode, Outcome, Role, WaitReason
from pdtrace.testing import open_recorders, record_request

ROOT = Path(__file__).resolve().parents[3]
WITHIN_S = 60.0
QUICK = AgentConfig(poll_s=0.01, idle_poll_s=0.02, grace_s=0.2, flush_s=0.5, state_s=0.0)
TINY = RingCapacity(blocks=4, block_bytes=4096)


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def recorders(tmp_path: Path) -> Iterator[Mapping[Role, Recorder]]:
    opened = open_recorders(tmp_path / "rings")
    yield opened
    close(opened)


def close(recorders: Mapping[Role, Recorder]) -> None:
    for recorder in recorders.values():
        recorder.close()


def agent_of(tmp_path: Path, config: AgentConfig = QUICK) -> Agent:
    return Agent(tmp_path / "rings", out=tmp_path, config=config)


def once(tmp_path: Path, config: AgentConfig = QUICK) -> AgentSummary:
    """An agent that looks once and is gone."""
    agent = agent_of(tmp_path, config)
    agent.poll()
    return agent.close()


def drained(tmp_path: Path, config: AgentConfig = QUICK) -> AgentSummary:
    agent = agent_of(tmp_path, config)
    agent.poll()
    wait_for(lambda: (agent.poll(), agent.is_drained)[1])
    return agent.close()


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def written(tmp_path: Path) -> dict[str, list[Span]]:
    """Spans by request id; each request is there once."""
    found = [decode_line(line) for line in lines_since(tmp_path / TRACES_NAME)]
    times = Counter(str(spans[0].attributes[a.REQUEST_ID.key]) for spans in found)
    assert not [request for request, count in times.items() if count > 1]
    return {str(spans[0].attributes[a.REQUEST_ID.key]): spans for spans in found}


def start_agent(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "pdtrace.agent", "--rings", str(tmp_path / "rings")),
            *("--out", str(tmp_path), "--json", *more),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


RECORD = """
    import sys, time
    from pdtrace.ring import RingCapacity
    from pdtrace.testing import open_recorders, record_request
    recorders = open_recorders(sys.argv[1], capacity=RingCapacity())
    for number in range(int(sys.argv[2])):
        record_request(recorders, request_id=f"r-{number}")
        time.sleep(0.001)
    for recorder in recorders.values():
        recorder.close()
    """


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_agent_ended_at_random_moments_delivers_thousands_of_requests_once_each(
    tmp_path: Path, number: signal.Signals
) -> None:
    count = 2_000
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RECORD), str(tmp_path / "rings"), str(count)],
        cwd=ROOT,
    )
    try:
        while writer.poll() is None:
            agent = start_agent(tmp_path)
            # From before it has read anything to some while after.
            before = (tmp_path / STATE_NAME).stat().st_mtime_ns if begun(tmp_path) else 0
            if moments.random() < 0.8:
                wait_for(
                    lambda before=before: (
                        writer.poll() is not None
                        or (
                            begun(tmp_path) and (tmp_path / STATE_NAME).stat().st_mtime_ns != before
                        )
                    )
                )
            time.sleep(moments.uniform(0, 0.4))
            agent.send_signal(number)
            agent.communicate(timeout=WITHIN_S)
        assert writer.returncode == 0
    finally:
        writer.kill()
        writer.wait()
    last = start_agent(tmp_path, "--until-closed")
    out, err = last.communicate(timeout=WITHIN_S)
    assert last.returncode == 0, err
    assert json.loads(out)["missed"] == 0
    found = written(tmp_path)
    assert set(found) == {f"r-{n}" for n in range(count)}
    whole = {stage.name for stage in CHAINS[Mode.PD]}
    for spans in found.values():
        assert a.INCOMPLETE.key not in spans[0].attributes
        assert whole <= {span.name for span in spans}


def begun(tmp_path: Path) -> bool:
    return (tmp_path / STATE_NAME).exists()


def test_agent_that_stood_still_has_counted_what_was_overwritten_and_the_rest_is_whole(
    tmp_path: Path,
) -> None:
    recorders = open_recorders(
        tmp_path / "rings", capacity=RingCapacity(blocks=8, block_bytes=8192)
    )
    agent = start_agent(tmp_path)
    try:
        record_request(recorders, request_id="before")
        wait_for(lambda: begun(tmp_path) and len(written(tmp_path)) == 1)
        agent.send_signal(signal.SIGSTOP)
        for number in range(1_000):
            record_request(recorders, request_id=f"r-{number}")
        agent.send_signal(signal.SIGCONT)
        wait_for(lambda: "r-999" in written(tmp_path))
        record_request(recorders, request_id="after")
        close(recorders)
        agent.send_signal(signal.SIGTERM)
        out, err = agent.communicate(timeout=WITHIN_S)
    finally:
        agent.kill()
        agent.communicate()
    assert agent.returncode == 0, err
    assert json.loads(out)["missed"] > 0
    found = written(tmp_path)
    assert {"before", "after", "r-999"} <= set(found)
    assert set(found) < {"before", "after", *(f"r-{n}" for n in range(1_000))}
    whole = {stage.name for stage in CHAINS[Mode.PD]}
    lacking = [spans for spans in found.values() if not whole <= {span.name for span in spans}]
    # Where the gateway's part is overwritten there is no root to say it: that tells enough.
    roots = [spans[0] for spans in lacking if a.SPAN.key in spans[0].attributes]
    assert [root for root in roots if a.INCOMPLETE.key not in root.attributes] == []
    losses = read_losses(tmp_path)
    assert sum(ring.missed for ring in losses.rings.values()) == json.loads(out)["missed"]


def test_marks_of_a_worker_that_died_survive_the_agent_while_the_request_goes_on(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    context = RequestContext.create(request_id="outlives", mode=Mode.PD)
    gateway = recorders[Role.GATEWAY].begin(context)
    gateway.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    gateway.mark(Mark.TOKENIZED, "m", 4, 4, True, Mode.PD)
    gateway.mark(Mark.ADMITTED, 1)
    gateway.mark(Mark.ROUTED, None, "decode-0", "round_robin", 1, "")
    gateway.mark(Mark.DISPATCHED)
    decode = recorders[Role.DECODE].begin(context)
    decode.mark(Mark.RESERVE_RECEIVED)
    decode.mark(Mark.PAGES_RESERVED, 4, 9)
    once(tmp_path)
    recorders[Role.DECODE].close()  # with the request open in it
    for _ in range(3):  # the first of them takes leave of the ring
        once(tmp_path)
    assert written(tmp_path) == {}
    gateway.mark(Mark.COMPLETED, Outcome.FAILED, "worker_lost", "decode-0", 502)
    gateway.end()
    wait_for(lambda: (once(tmp_path), len(written(tmp_path)))[1] == 1)
    [spans] = written(tmp_path).values()
    names = {span.name for span in spans}
    assert {"hop.dispatch", "decode.reserve"} <= names
    once(tmp_path)
    assert len(written(tmp_path)) == 1
    [ring] = [r for r in read_losses(tmp_path).rings.values() if r.instance == "decode-0"]
    assert (ring.ended, ring.open_requests, ring.open_ids) == (WriterEnd.CLOSED, 1, ("outlives",))


def test_losses_add_up_over_agents_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    recorders = open_recorders(tmp_path / "rings", capacity=TINY)
    trace = recorders[Role.GATEWAY].begin(RequestContext.create(request_id="long"))
    trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    once(tmp_path)

    def overwrite() -> None:
        for number in range(1_000):
            trace.wait("gateway.queue", WaitReason.CONCURRENCY, blocker=f"req-{number}")

    def missed() -> int:
        (ring,) = (r for r in read_losses(tmp_path).rings.values() if r.role == "gateway")
        return ring.missed

    overwrite()
    first = once(tmp_path).missed
    assert first == missed() > 0
    # The request is in flight: each agent begins again where it appeared.
    assert once(tmp_path).missed == 0
    assert missed() == first
    overwrite()
    second = once(tmp_path).missed
    assert second > 0
    assert missed() == first + second
    trace.mark(Mark.COMPLETED, Outcome.COMPLETED, None, None, 200)
    trace.end()
    close(recorders)
    assert drained(tmp_path).missed == 0
    assert missed() == first + second
    [spans] = written(tmp_path).values()
    assert a.INCOMPLETE.key in spans[0].attributes


def test_record_damaged_behind_what_is_read_again_is_counted_once(tmp_path: Path) -> None:
    """While a request is in flight, each agent reads from where it began."""
    recorders = open_recorders(tmp_path / "rings", roles=[Role.GATEWAY])
    trace = recorders[Role.GATEWAY].begin(RequestContext.create(request_id="long"))
    ring = trace.ring
    assert ring is not None
    trace.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    totals: list[int] = []
    for _ in range(2):
        once(tmp_path)
        at = ring._pos  # pyright: ignore[reportPrivateUsage]
        trace.mark(Mark.ADMITTED)
        ring._buffer[at + 20] ^= 0xFF  # pyright: ignore[reportPrivateUsage]
        trace.mark(Mark.ADMITTED)
        for _ in range(2):
            once(tmp_path)
            [losses] = read_losses(tmp_path).rings.values()
            totals.append(losses.torn)
    assert totals == [1, 1, 2, 2]


def test_requests_delivered_right_before_a_kill_are_counted_once(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    for number in range(3):
        record_request(recorders, request_id=f"early-{number}")
    once(tmp_path)
    before = (tmp_path / STATE_NAME).read_bytes()
    for number in range(4):
        record_request(recorders, request_id=f"late-{number}")
    once(tmp_path)
    (tmp_path / STATE_NAME).write_bytes(before)  # as if it had been killed before it wrote that
    for _ in range(2):
        once(tmp_path)
        assert (len(written(tmp_path)), read_losses(tmp_path).requests) == (7, 7)


def test_writers_end_and_unreadable_rings_stand_in_the_book(tmp_path: Path) -> None:
    recorders = open_recorders(tmp_path / "rings", roles=(Role.GATEWAY, Role.DECODE))
    record_request_until_reserve(recorders)
    close(recorders)
    path = next(p for p in scan_rings(tmp_path / "rings") if p.name.startswith("decode-0"))
    data = bytearray(path.read_bytes())
    data[8:12] = (FORMAT_VERSION + 8).to_bytes(4, "little")
    (path.parent / "newer.ring").write_bytes(data)
    drained(tmp_path)
    losses = read_losses(tmp_path)
    by_name = {name.partition("-")[0]: ring for name, ring in losses.rings.items()}
    assert by_name["gateway"].ended is WriterEnd.CLOSED
    assert by_name["decode"].open_ids == ("open",)
    assert f"ring format {FORMAT_VERSION + 8}" in str(by_name["newer.ring"].unreadable)
    assert any("newer.ring" in sentence for sentence in losses.sentences())


def record_request_until_reserve(recorders: Mapping[Role, Recorder]) -> None:
    context = RequestContext.create(request_id="open", mode=Mode.PD)
    recorders[Role.GATEWAY].begin(context).mark(Mark.RECEIVED)
    recorders[Role.DECODE].begin(context).mark(Mark.RESERVE_RECEIVED)


def rings_of(tmp_path: Path, generations: int) -> list[str]:
    for number in range(generations):
        recorders = open_recorders(tmp_path / "rings", roles=(Role.GATEWAY, Role.WORKER))
        record_request(recorders, request_id=f"r-{number}", mode=Mode.COLOCATED)
        close(recorders)
    return [path.name for path in scan_rings(tmp_path / "rings")]


def test_finished_rings_are_deleted_once_delivered_but_the_newest(tmp_path: Path) -> None:
    names = rings_of(tmp_path, 6)
    made = {name: (tmp_path / "rings" / name).stat().st_mtime_ns for name in names}
    agent = agent_of(tmp_path, AgentConfig(poll_s=0.01, state_s=0.0, keep_rings=5))
    agent.poll()
    wait_for(lambda: (agent.poll(), agent.is_drained)[1])
    wait_for(lambda: (agent.poll(), len(scan_rings(tmp_path / "rings")))[1] == 5)
    agent.poll()
    assert agent.close().rings_deleted == 7
    left = [path.name for path in scan_rings(tmp_path / "rings")]
    assert set(left) == set(sorted(names, key=lambda name: made[name])[-5:])
    assert len(written(tmp_path)) == 6
    # Neither what is gone nor what is left is read again, and the totals know them all.
    again = drained(tmp_path)
    assert (again.requests, len(written(tmp_path))) == (0, 6)
    assert len(read_losses(tmp_path).rings) == 12


def test_ring_with_a_request_in_flight_and_ring_that_cannot_be_read_are_kept(
    tmp_path: Path, recorders: Mapping[Role, Recorder]
) -> None:
    record_request_until_reserve(recorders)
    recorders[Role.DECODE].close()
    recorders[Role.TRANSFER].close()
    (tmp_path / "rings" / "broken.ring").write_bytes(b"not a ring")
    agent = agent_of(tmp_path, AgentConfig(poll_s=0.01, state_s=0.0, keep_rings=0))
    agent.poll()

    def names() -> set[str]:
        return {path.name.partition("-")[0] for path in scan_rings(tmp_path / "rings")}

    wait_for(lambda: (agent.poll(), "transfer" not in names())[1])
    for _ in range(3):
        agent.poll()
    assert names() == {"gateway", "prefill", "decode", "worker", "broken.ring"}
    agent.close()


def test_many_rings_are_kept_by_default(tmp_path: Path) -> None:
    rings_of(tmp_path, 10)
    drained(tmp_path)
    once(tmp_path)
    once(tmp_path)
    assert len(scan_rings(tmp_path / "rings")) == 16


@pytest.mark.parametrize("forgets_its_state", [False, True])
def test_agent_that_is_stopped_while_it_recalls_what_is_delivered_delivers_nothing_twice(
    tmp_path: Path, recorders: Mapping[Role, Recorder], forgets_its_state: bool
) -> None:
    """A request in flight for long makes a restarted agent look at all that was finished since."""
    held = recorders[Role.GATEWAY].begin(RequestContext.create(request_id="held"))
    held.mark(Mark.RECEIVED)
    for number in range(300):
        record_request(recorders, request_id=f"req-{number}")
    once(tmp_path)
    before = (tmp_path / STATE_NAME).read_bytes()
    if forgets_its_state:  # positions that are none: all rings are read from their begins
        state = json.loads(before)
        for ring in state["rings"].values():
            ring["position"]["offset"] = 4
        before = json.dumps(state).encode()
        (tmp_path / STATE_NAME).write_bytes(before)
    agent = agent_of(tmp_path)
    for _ in range(3):
        assert agent.poll(enough=lambda: True) == 0
    assert not agent.is_drained
    assert agent.health()[0]
    agent.close()
    assert (tmp_path / STATE_NAME).read_bytes() == before
    record_request(recorders, request_id="last")
    agent = agent_of(tmp_path)
    wait_for(lambda: (agent.poll(enough=lambda: True), "last" in written(tmp_path))[1])
    agent.close()
    assert written(tmp_path).keys() == {"last", *(f"req-{number}" for number in range(300))}
    held.end()


def test_agent_that_recalls_much_answers_and_stops_when_told(
    tmp_path: Path, recorders: Mapping[Role, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = recorders[Role.GATEWAY].begin(RequestContext.create(request_id="held"))
    for number in range(300):
        record_request(recorders, request_id=f"req-{number}")
    once(tmp_path)
    stop = threading.Event()
    slow = loop.decode_heads

    def decode(line: bytes) -> list[SpanHead]:
        stop.set()  # it comes while the agent recalls
        return slow(line)

    monkeypatch.setattr(loop, "decode_heads", decode)
    agent = agent_of(tmp_path, AgentConfig(state_s=0.0, flush_s=0.01))
    assert not stop.is_set()  # who made it can be answered before it begins
    assert agent.look().requests == ()
    agent.run(stop)
    agent.close()
    monkeypatch.undo()
    once(tmp_path)
    assert written(tmp_path).keys() == {f"req-{number}" for number in range(300)}
    held.end()
