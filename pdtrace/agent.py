"""The agent: one process per host that turns rings into spans, files and OTLP.

Owns the loop (read, track, assemble, judge, write, export), the state that lets a restarted agent
go on where the last one stopped, and the command. Rings are `pdtrace.tails`', requests in flight
`pdtrace.tracker`'s, spans `pdtrace.assembly`'s; where they go is `pdtrace.delivery`'s. An agent may
lag or die without disturbing serving.

    python -m pdtrace.agent --rings DIR [--out DIR] [--until-closed] [--json]

With `--out`, spans go to `<out>/traces/spans-*.jsonl` and the state to `<out>/agent-state.json`.
Whether spans are exported is decided by the OTEL_* variables (`pdtrace.export`).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdtrace import semconv as a
from pdtrace.assembly import assemble
from pdtrace.collected import CollectedRequest
from pdtrace.delivery import Delivery
from pdtrace.errors import PdtraceError
from pdtrace.export import ExportPlan, plan_from_env
from pdtrace.judging import RollingJudge
from pdtrace.otlp import decode_line
from pdtrace.sink import MAX_FILE_BYTES, MAX_FILES, SinkPosition
from pdtrace.spans import AttrValue, Span
from pdtrace.stages import ROOT_SPAN
from pdtrace.stopping import Stop, StopFlag, stop_on_signals
from pdtrace.tails import RingState, RingTails
from pdtrace.tracker import DEFAULT_GRACE_NS, DEFAULT_MAX_OPEN, RequestTracker

STATE_NAME = "agent-state.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How an agent works. Times in seconds.

    poll_s         between looks at the rings; grows to `idle_poll_s` while nothing happens
    grace_s        how long an ended request waits for legs that have not finished
    flush_s        how long exporting may take at exit
    state_s        between writes of the state file
    max_open       requests in flight; the oldest are given up beyond it
    """

    poll_s: float = 0.05
    idle_poll_s: float = 0.5
    grace_s: float = DEFAULT_GRACE_NS / 1e9
    flush_s: float = 2.0
    state_s: float = 1.0
    max_open: int = DEFAULT_MAX_OPEN
    max_file_bytes: int = MAX_FILE_BYTES
    max_files: int = MAX_FILES


Judge = Callable[[Sequence[Span]], Mapping[str, AttrValue]]
"""Spans of one request → attributes for its root."""


@dataclass(slots=True, kw_only=True)
class AgentSummary:
    """Totals of one agent's life.

    incomplete  requests whose root says `pd.incomplete`
    missed      records overwritten before they were read
    late        marks of requests that were finished already
    unnamed     marks whose request is not known
    evicted     requests finished early because too many were open
    errors      faults that cost a request's spans or verdict, and unreadable rings
    lines_lost  requests that could not be written to the files
    open        requests in flight at the end; the next agent with the same `out` goes on
    """

    rings: int = 0
    records: int = 0
    requests: int = 0
    incomplete: int = 0
    spans: int = 0
    missed: int = 0
    torn: int = 0
    late: int = 0
    unnamed: int = 0
    evicted: int = 0
    errors: int = 0
    lines_lost: int = 0
    open: int = 0
    export: Mapping[str, int] = field(default_factory=dict[str, int])

    def line(self) -> str:
        """One line for the log."""
        export = "".join(f", {count} {name}" for name, count in self.export.items())
        return (
            f"{self.requests} requests ({self.incomplete} incomplete, {self.open} still open), "
            f"{self.spans} spans of {self.rings} rings; {self.records} records, {self.missed} "
            f"missed, {self.torn} torn, {self.late} late, {self.unnamed} without request; "
            f"{self.lines_lost} lines lost, {self.errors} errors{export}"
        )


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted agent needs. Requests finished since `sink` stand in the sink's files."""

    version: int = 1
    rings: dict[str, RingState] = {}
    sink: SinkPosition = SinkPosition()


class Agent:
    """Tails the rings of one directory. Not thread-safe: one thread polls.

    out       run directory for `traces/` and the state; None: spans are only exported, and a
              restarted agent exports again what the rings still hold
    export    exporters for finished requests; None: files only
    judge     attributes for the root; None: no verdicts

    Raises SinkError when `out` cannot be written or has an agent already.
    """

    def __init__(
        self,
        rings: str | Path,
        *,
        out: str | Path | None = None,
        export: ExportPlan | None = None,
        judge: Judge | None = None,
        config: AgentConfig | None = None,
    ) -> None:
        self.config = AgentConfig() if config is None else config
        self._judge = judge
        self._summary = AgentSummary()
        self._said: set[str] = set()
        self._state = _State()
        self._state_written_s = -float("inf")
        self._state_path: Path | None = None
        self._tracker = RequestTracker(
            grace_ns=round(self.config.grace_s * 1e9), max_open=self.config.max_open
        )
        self._delivery = Delivery(
            out=out,
            plan=export,
            max_file_bytes=self.config.max_file_bytes,
            max_files=self.config.max_files,
        )
        if out is not None:
            self._state_path = Path(out) / STATE_NAME
            self._restore(self._state_path)
        self._tails = RingTails(rings, self._tracker, known=self._state.rings)

    def poll(self) -> int:
        """Reads what is there, hands on what is finished; returns the number of records read."""
        now_ns = time.monotonic_ns()
        before = self._tails.counts.records
        if self._tails.read(now_ns, self._delivery.position or SinkPosition()):
            self._deliver(self._tracker.finished(now_ns))
        if time.monotonic() - self._state_written_s >= self.config.state_s:
            self._save_state()
        return self._tails.counts.records - before

    def run(self, stop: Stop, *, until_closed: bool = False) -> None:
        """Polls until `stop` is set or, with `until_closed`, until every ring is finished.

        When told to stop it goes on for up to `grace_s` while rings are still written, so that a
        server that is told at the same time gets its last words in.
        """
        interval_s = self.config.poll_s
        self.poll()
        if not self._tails.counts.rings:
            _log.info("no ring to read in %s yet", self._tails.directory)
        while not stop.is_set():
            if self.poll():
                interval_s = self.config.poll_s
            else:
                interval_s = min(interval_s * 1.5, self.config.idle_poll_s)
            if until_closed and self._tails.num_finished and self.is_drained:
                break
            stop.wait(interval_s)
        deadline = time.monotonic() + self.config.grace_s
        while True:
            self.poll()
            if self.is_drained or time.monotonic() >= deadline:
                break
            time.sleep(self.config.poll_s)
        self._deliver(self._tracker.finish_ended())

    @property
    def is_drained(self) -> bool:
        """Whether every ring found is finished and no request is in flight."""
        return not self._tails.num_live and not self._tracker.num_open

    def summary(self) -> AgentSummary:
        """Totals so far."""
        tails, tracker = self._tails.counts, self._tracker.counts
        return dataclasses.replace(
            self._summary,
            rings=tails.rings,
            records=tails.records,
            missed=tails.missed,
            torn=tails.torn,
            requests=tracker.requests,
            late=tracker.late,
            unnamed=tracker.unnamed,
            evicted=tracker.evicted,
            errors=self._summary.errors + self._delivery.errors + tails.unreadable,
            lines_lost=self._delivery.lines_lost,
            open=self._tracker.num_open,
            export=dict(self._delivery.totals()),
        )

    def close(self) -> AgentSummary:
        """Flushes, within `flush_s`, and lets go of everything; returns the totals. Idempotent.

        Requests in flight stay in their rings: the next agent with the same `out` goes on.
        """
        self._save_state()
        self._state_path = None
        self._tails.close()
        self._delivery.close(self.config.flush_s)
        return self.summary()

    def _deliver(self, requests: Iterable[CollectedRequest]) -> None:
        built: list[tuple[CollectedRequest, list[Span]]] = []
        for request in requests:
            try:
                spans = assemble(request)
            except Exception as error:  # a bug here costs one request's spans, not the agent
                self._fault("building the spans of", request, error)
                continue
            if spans:
                built.append((request, self._judged(request, spans)))
        self._delivery.deliver(built)
        for _, spans in built:
            self._summary.spans += len(spans)
            self._summary.incomplete += a.INCOMPLETE.key in spans[0].attributes

    def _judged(self, request: CollectedRequest, spans: list[Span]) -> list[Span]:
        root = spans[0]
        if self._judge is None or root.attributes.get(a.SPAN.key) != ROOT_SPAN:
            return spans
        try:
            verdict = self._judge(spans)
        except Exception as error:  # a bug here costs one verdict
            self._fault("judging", request, error)
            return spans
        if not verdict:
            return spans
        judged = dataclasses.replace(root, attributes={**root.attributes, **verdict})
        return [judged, *spans[1:]]

    def _fault(self, doing: str, request: CollectedRequest, error: Exception) -> None:
        self._summary.errors += 1
        kind = f"{doing} {type(error).__name__}"
        if kind not in self._said:
            self._said.add(kind)
            _log.error(
                "%s request %s failed; further errors like it are only counted",
                doing,
                request.request_id,
                exc_info=error,
            )

    def _restore(self, path: Path) -> None:
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except FileNotFoundError:
            state = _State()
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s cannot be used, rings are read from their begin: %s", path, error)
            state = _State()
        if state.version == self._state.version:
            self._state = state
        for line in self._delivery.lines_since(self._state.sink):
            try:
                spans = decode_line(line)
            except ValueError:
                continue  # not ours; readers say so
            self._tracker.remember_finished(_request_span_ids(spans))

    def _save_state(self) -> None:
        self._state_written_s = time.monotonic()
        position = self._delivery.position
        if self._state_path is None or position is None:
            return
        rings, sink = self._tails.states(position)
        state = _State(rings=rings, sink=sink)
        if state == self._state:
            return
        draft = self._state_path.with_suffix(".draft")
        try:
            draft.write_bytes(msgspec.json.encode(state))
            draft.replace(self._state_path)
        except OSError as error:
            if "state" not in self._said:
                self._said.add("state")
                _log.warning(
                    "cannot write %s: %s. A restarted agent reads more of the rings again",
                    self._state_path,
                    error.strerror,
                )
            return
        self._state = state


def _request_span_ids(spans: Iterable[Span]) -> set[str]:
    """Ids by which a request's records are known: of its root and its attempts."""
    ids: set[str] = set()
    for span in spans:
        if a.SPAN.key in span.attributes:
            ids.add(span.span_id)
        elif span.parent_id is not None:
            ids.add(span.parent_id)
    return ids


def run_agent(
    rings: str | Path,
    *,
    out: str | Path | None = None,
    until_closed: bool = False,
    stop: Stop | None = None,
    config: AgentConfig | None = None,
) -> AgentSummary:
    """Runs an agent with verdicts and the exporters that the OTEL_* variables ask for.

    Returns when `stop` is set or, with `until_closed`, when every ring is finished. Logs one INFO
    line at the end. Raises SinkError and ExportConfigError before anything is read.
    """
    export = plan_from_env()
    if export is None and out is None:
        _log.warning("spans go nowhere: give --out DIR, or set OTEL_EXPORTER_OTLP_ENDPOINT")
    agent = Agent(rings, out=out, export=export, judge=RollingJudge(), config=config)
    try:
        agent.run(stop or StopFlag(), until_closed=until_closed)
    finally:
        summary = agent.close()
        _log.info("agent done: %s", summary.line())
    return summary


def agent_command(
    rings: str | Path,
    *,
    out: str | Path | None = None,
    until_closed: bool = False,
    as_json: bool = False,
) -> int:
    """`pdtrace agent`: runs until SIGTERM or SIGINT; returns the exit code.

    0 after an orderly end, 2 with one line on stderr when it cannot start. With `as_json` the
    totals are printed as one JSON object at the end. Call it from the main thread.
    """
    stop = StopFlag()
    try:
        with stop_on_signals(stop):
            summary = run_agent(rings, out=out, until_closed=until_closed, stop=stop)
    except PdtraceError as error:
        print(f"pdtrace agent: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m pdtrace.agent`."""
    parser = argparse.ArgumentParser(
        prog="pdtrace agent",
        description="Tail the rings of one host; write and export the spans of finished requests.",
    )
    parser.add_argument("--rings", required=True, metavar="DIR", help="directory of ring files")
    parser.add_argument("--out", metavar="DIR", help="run directory for traces/ and the state")
    parser.add_argument(
        "--until-closed", action="store_true", help="exit when every ring is finished"
    )
    parser.add_argument("--json", action="store_true", help="print the totals as JSON at the end")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return agent_command(
        given.rings, out=given.out, until_closed=given.until_closed, as_json=given.json
    )


if __name__ == "__main__":
    sys.exit(main())
