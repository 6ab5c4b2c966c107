"""Kill -9 of each process under load: every mark that was written before is in the spans.

The process is replaced and serves again, and its successor's marks are told apart from its own. The
rings are the reference: what they hold after the server is gone is what was written.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from pdtrace import semconv as a
from pdtrace.analysis.sources import read_source
from pdtrace.ring import MarkRecord, OpenRecord, RingReader, scan_rings
from pdtrace.spans import Span, Trace
from pdtrace.stages import CHAINS, ROOT_SPAN, Mark, Mode, Outcome
from tests.support.completions import Ask, ask
from tests.support.server import ROOT, RunningServer, is_running, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

SLOW_FAKE = "fake:step_ms=5,token_us=20"
NUM_CLIENTS = 8
ANSWERED_BEFORE = 12
COLOCATED = ("--mode", "colocated")
EARLY = ("--first-token", "prefill")
TCP = ("--transfer", "tcp")


@dataclass(frozen=True)
class Kill:
    """Who is killed while one request is held in a stage, and the mark that shows it there.

    open_here   whether the victim has requests open: then their stages close as lost by its name
    """

    victim: str
    stage: str
    shown_by: Mark
    options: tuple[str, ...] = ()
    mode: Mode = Mode.PD
    open_here: bool = True

    def __str__(self) -> str:
        return "-".join((self.victim, *(option.strip("-") for option in self.options[1:])))


KILLS = (
    Kill("gateway-0", "gateway.dispatch", Mark.ROUTED),
    Kill("prefill-0", "prefill.compute", Mark.PREFILL_STARTED),
    Kill("transfer-0", "transfer", Mark.COPY_QUEUED),
    Kill("decode-0", "decode.queue", Mark.KV_NOTICED),
    Kill("agent", "decode.queue", Mark.KV_NOTICED, open_here=False),
    Kill("worker-0", "decode.first", Mark.PREFILL_FINISHED, COLOCATED, Mode.COLOCATED),
    Kill("prefill-0", "prefill.compute", Mark.PREFILL_STARTED, EARLY, Mode.PD_EARLY),
    Kill("decode-0", "decode.queue", Mark.KV_NOTICED, EARLY, Mode.PD_EARLY),
    Kill("transfer-0", "transfer", Mark.COPY_QUEUED, TCP),
    # It receives for decode's host, and has nothing of its own to tell.
    Kill("transfer-1", "transfer", Mark.COPY_QUEUED, TCP, open_here=False),
)
HELD_MS = 15_000
HELD = "held"


@dataclass
class Load:
    """Clients that ask until told to stop; failures are expected, silence is not."""

    server: RunningServer
    answered: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(n,)) for n in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            if not self.ask_once(f"load-{number}-{count}", {}):
                time.sleep(0.2)  # refused at once, most likely

    def ask_once(self, request_id: str, faults: dict[str, int]) -> bool:
        """Whether the whole answer came."""
        wanted = Ask(
            prompt="z" * 40, max_tokens=60, stream=True, request_id=request_id, faults=faults
        )
        try:
            answer = ask(self.server, wanted)
        except httpx.HTTPError:
            done = False  # the gateway is gone
        else:
            done = answer.status == 200 and answer.finish_reason is not None
        (self.answered if done else self.failed).append(request_id)
        return done

    def until_answered(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.answered) < count:
            assert time.monotonic() < deadline, f"{len(self.answered)} answered: {self.failed}"
            time.sleep(0.02)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"


def wait_for_mark(run_dir: Path, request_id: str, mark: Mark) -> None:
    """Until a ring holds `mark` of a request."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in scan_rings(run_dir / "rings"):
            with RingReader(path) as reader:
                records = reader.read(limit=10**9)
            keys = {
                r.key
                for r in records
                if isinstance(r, OpenRecord) and r.context.request_id == request_id
            }
            if any(isinstance(r, MarkRecord) and r.mark is mark and r.key in keys for r in records):
                return
        time.sleep(0.05)
    raise AssertionError(f"{request_id} did not come to {mark.name}")


@dataclass(frozen=True)
class Aftermath:
    """What is left of a run in which `victim` was killed."""

    kill: Kill
    run_dir: Path
    traces: dict[str, Trace]
    load: Load
    pid: int
    successor: int

    @property
    def victim(self) -> str:
        return self.kill.victim

    def spans(self) -> Iterator[Span]:
        for trace in self.traces.values():
            yield from trace.spans


@pytest.fixture(scope="module", params=KILLS, ids=str)
def aftermath(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Aftermath:
    kill: Kill = request.param
    victim = kill.victim
    run_dir = tmp_path_factory.mktemp(victim) / "run"
    with running_server(run_dir, "--allow-faults", *kill.options, model=SLOW_FAKE) as server:
        load = Load(server)
        held = threading.Thread(target=load.ask_once, args=(HELD, {kill.stage: HELD_MS}))
        try:
            load.until_answered(ANSWERED_BEFORE)
            held.start()
            wait_for_mark(run_dir, HELD, kill.shown_by)
            pid = server.send_signal(victim, signal.SIGKILL)
            successor = server.wait_for_successor(victim, pid)
            load.until_answered(len(load.answered) + 2 * ANSWERED_BEFORE)
        finally:
            load.stop()
            held.join(60)
        assert server.stop() == 0
        assert not is_running(pid)
        assert not is_running(successor)
    traces = {trace.trace_id: trace for trace in read_source(run_dir).traces}
    return Aftermath(kill, run_dir, traces, load, pid, successor)


def test_every_request_in_the_rings_has_its_spans_once(aftermath: Aftermath) -> None:
    begun: set[str] = set()
    for path in scan_rings(aftermath.run_dir / "rings"):
        with RingReader(path) as reader:
            for record in reader.read(limit=10**9, final=True):
                if isinstance(record, OpenRecord):
                    begun.add(record.context.root_span_id)
    roots = Counter(
        span.span_id for span in aftermath.spans() if span.attributes.get(a.SPAN.key) == ROOT_SPAN
    )
    assert begun
    assert set(roots) == begun
    recording = read_source(aftermath.run_dir)
    assert (recording.problems.duplicates, recording.problems.conflicts) == (0, 0)


def test_every_mark_written_is_in_a_span(aftermath: Aftermath) -> None:
    instants: dict[str, set[object]] = {}
    for span in aftermath.spans():
        known = instants.setdefault(span.trace_id, set())
        known.update((span.attributes[a.BEGIN_NS.key], span.attributes[a.END_NS.key]))
    ends = {stage.end for stage in CHAINS[aftermath.kill.mode] if stage.end is not Mark.COMPLETED}
    written = 0
    missing: list[str] = []
    for path in scan_rings(aftermath.run_dir / "rings"):
        with RingReader(path) as reader:
            records = reader.read(limit=10**9, final=True)
            assert (reader.missed, reader.torn) == (0, 0)
        traces = {r.key: r.context.trace_id for r in records if isinstance(r, OpenRecord)}
        for record in records:
            if isinstance(record, MarkRecord) and record.mark in ends:
                written += 1
                if record.t_ns not in instants.get(traces[record.key], set()):
                    missing.append(f"{record.mark.name} of {traces[record.key]} at {record.t_ns}")
    assert written > 10 * ANSWERED_BEFORE
    assert not missing


def test_open_stages_of_the_dead_close_as_lost_with_its_name(aftermath: Aftermath) -> None:
    lost = [
        span
        for span in aftermath.spans()
        if span.attributes.get(a.OUTCOME.key) == Outcome.LOST
        and span.attributes.get(a.SPAN.key) is None
    ]
    if aftermath.victim == "agent":
        assert not lost
        return
    by = {str(span.attributes[a.OUTCOME_BY.key]) for span in lost}
    assert by == ({aftermath.victim} if aftermath.kill.open_here else set())
    assert all(span.attributes[a.OUTCOME_REASON.key] == "process_lost" for span in lost)
    # Its successor has the same name: what is lost is the dead one's.
    assert {span.resource.attributes["process.pid"] for span in lost} <= {aftermath.pid}


def test_answered_requests_are_whole(aftermath: Aftermath) -> None:
    by_id = {
        str(span.attributes[a.REQUEST_ID.key]): span
        for span in aftermath.spans()
        if span.attributes.get(a.SPAN.key) == ROOT_SPAN
    }
    assert len(aftermath.load.answered) >= ANSWERED_BEFORE
    last_words: list[str] = []
    for request_id in aftermath.load.answered:
        root = by_id[request_id]
        assert a.INCOMPLETE.key not in root.attributes, root.attributes[a.INCOMPLETE.key]
        if root.attributes[a.OUTCOME.key] != Outcome.COMPLETED:
            last_words.append(request_id)
            told = [root.attributes.get(attr.key) for attr in (a.OUTCOME_BY, a.OUTCOME_STAGE)]
            assert told == ["gateway-0", "gateway.finish"], request_id
    # A gateway that is killed may have written the end of an answer, and not yet that it is over.
    assert len(last_words) <= (NUM_CLIENTS if aftermath.victim == "gateway-0" else 0)


def test_check_names_the_process_that_vanished(aftermath: Aftermath) -> None:
    command = [sys.executable, "-m", "pdtrace", "check", "--from", str(aftermath.run_dir)]
    finished = subprocess.run(
        [*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    report = json.loads(finished.stdout)
    if aftermath.victim == "agent":
        assert finished.returncode == 0, finished.stdout
        return
    assert finished.returncode == 1
    (vanished,) = next(rule["examples"] for rule in report["rules"] if rule["name"] == "processes")
    assert vanished.startswith(f"{aftermath.victim} (pid {aftermath.pid}) was killed")
    assert f"(pid {aftermath.successor})" not in finished.stdout
    assert "Traceback" not in finished.stderr
