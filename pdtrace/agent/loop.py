"""The agent's loop: read, track, assemble, judge, write, export; and the look at what is in flight.

Owns the order of it all, and the state that lets a restarted agent go on where the last one
stopped. Rings are `pdtrace.agent.tails`', requests in flight `pdtrace.assembly.tracker`'s, spans
`pdtrace.assembly.request_spans`'s, where they go `pdtrace.export.delivery`'s; the command is
`pdtrace.agent.command`'s.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from pdtrace import semconv as a
from pdtrace.agent.keeping import why_keep, with_reason
from pdtrace.agent.summary import AgentSummary
from pdtrace.agent.tails import DEFAULT_KEEP_RINGS, RingState, RingTails
from pdtrace.analysis.recent import recent_requests
from pdtrace.assembly.collected import CollectedRequest, Process, Stuck
from pdtrace.assembly.orderly import OrderlySpans
from pdtrace.assembly.request_spans import assemble_lazily
from pdtrace.assembly.steps import StepPolicy, StepWatch, are_step_keys, step_delivery
from pdtrace.assembly.tracker import DEFAULT_GRACE_NS, DEFAULT_MAX_OPEN, RequestTracker
from pdtrace.errors import PdtraceError
from pdtrace.export.delivery import TRACES_NAME, Delivery
from pdtrace.export.settings import ExportPlan
from pdtrace.export.sink import MAX_FILE_BYTES, MAX_FILES, SinkPosition
from pdtrace.inflight import InFlight, Look
from pdtrace.live.process_view import needed_by
from pdtrace.live.stuck import RollingStageTimes, StuckPolicy, StuckWatch, rest_of
from pdtrace.logtext import one_line
from pdtrace.otlp.json_lines import SpanHead, decode_heads
from pdtrace.ring.losses import STATE_NAME, Losses
from pdtrace.ring.records import StepRecord
from pdtrace.slo import DEFAULT_SLO, Slo
from pdtrace.spans import AttrValue, Span
from pdtrace.stages import ROOT_SPAN
from pdtrace.stopping import Stop

KEEPS_UP_S = 5.0
"""An agent whose loop has not gone round, or that is behind the rings, for longer is unwell."""

MAX_STUCK_LINES = 20
"""Stuck requests that get a log line of their own at a time; the others are added up."""

MAX_STUCK_KEPT = 10_000
"""Requests in flight of which the state says that they were reported; the latest."""

_ROUND_S = 0.5
"""The loop looks up at least so often, whatever there is to read: to write the state, to stop."""

_LAST_WORDS_POLL_S = 0.05
"""Between looks at the rings of a server that is told to stop at the same time."""

_AT_ONCE = 128
"""Requests whose spans are in memory at a time."""

_RECALLED_AT_ONCE = 64
"""Delivered requests that are looked at before it is asked whether that is enough."""

_LOOK_AT_ONCE = 1_000
"""Requests looked at while the loop may not go on."""

_LONG_LOOK_S = 0.1
_LOOK_KEEPS = 2.0
"""A look that took longer than that is shown again for so many times as long."""

_LOOK_SHARE = 0.05
"""Part of the agent's time that looking for stuck requests may take, however many are open."""

_log = logging.getLogger(__name__)


class AgentError(PdtraceError):
    """The agent cannot do what it is asked for."""

    code: ClassVar[str] = "agent_unusable"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How an agent works. Times in seconds.

    poll_s         between looks at the rings; grows to `idle_poll_s` while nothing happens
    grace_s        how long an ended request waits for legs that have not finished
    flush_s        how long it may take to end, once told to: last words, then exporting. With the
                   process's own end that is less than 2 s
    state_s        between writes of the state file
    stuck_s        between looks for stuck requests
    max_open       requests in flight; the oldest are given up beyond it
    keep_rings     finished rings that are kept once their requests are delivered, the newest
    slo            limits; requests that miss one must not be sampled away
    """

    poll_s: float = 0.1
    idle_poll_s: float = 0.5
    grace_s: float = DEFAULT_GRACE_NS / 1e9
    flush_s: float = 1.4
    state_s: float = 1.0
    stuck_s: float = 1.0
    max_open: int = DEFAULT_MAX_OPEN
    max_file_bytes: int = MAX_FILE_BYTES
    max_files: int = MAX_FILES
    keep_rings: int = DEFAULT_KEEP_RINGS
    stuck: StuckPolicy = field(default_factory=StuckPolicy)
    steps: StepPolicy = field(default_factory=StepPolicy)
    slo: Slo = DEFAULT_SLO


Judge = Callable[[Sequence[Span]], Mapping[str, AttrValue]]
"""Spans of one request → attributes for its root."""


class Metrics(Protocol):
    """What is told of everything that can be measured; `pdtrace.agent.metrics` is one. None of
    these raises."""

    def request(self, request: CollectedRequest, spans: Sequence[Span]) -> None:
        """A request is finished."""
        ...

    def step(self, instance: str, step: StepRecord) -> None:
        """A forward pass."""
        ...

    def stuck(self, stage: str, instance: str | None) -> None:
        """A request was reported as stuck."""
        ...


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """What a restarted agent needs. Requests finished since `sink` stand in the sink's files.

    written   where the sink stood: what stands behind it is not in `losses`
    stuck     its StuckPolicy, for who judges in its place while it is stopped
    reported  what was reported as stuck of requests in flight, by root
    """

    version: int = 1
    rings: dict[str, RingState] = {}
    sink: SinkPosition = SinkPosition()
    written: SinkPosition | None = None
    losses: Losses = Losses()
    stuck: dict[str, Any] = {}
    reported: dict[str, tuple[Stuck, ...]] = {}


class Agent:
    """Tails the rings of one directory. One thread polls; any may call `look`, `health`, `losses`
    and `summary`.

    out       run directory for `traces/` and the state; None: spans are only exported, and a
              restarted agent exports again what the rings still hold
    export    exporters for finished requests; None: files only
    judge     attributes for the root; None: no verdicts
    metrics   is told what finished; None: nothing is measured

    Raises AgentError when `rings` is no directory, and SinkError when `out` cannot be written or
    has an agent already.
    """

    def __init__(
        self,
        rings: str | Path,
        *,
        out: str | Path | None = None,
        export: ExportPlan | None = None,
        judge: Judge | None = None,
        metrics: Metrics | None = None,
        config: AgentConfig | None = None,
    ) -> None:
        self.config = AgentConfig() if config is None else config
        if Path(rings).exists() and not Path(rings).is_dir():
            raise AgentError(
                f"{rings} is a file, and rings are read from a directory: give the one it is in"
            )
        self._judge = judge
        self._metrics = metrics
        self._summary = AgentSummary()
        self._said: set[str] = set()
        self._state = _State()
        self._state_written_s = -float("inf")
        self._state_path: Path | None = None
        self._run_dir = None if out is None else str(Path(out).resolve())
        self._told_to_stop_s: float | None = None
        self._polled_s = self._caught_up_s = time.monotonic()
        self._look_due_s = self._polled_s + self.config.stuck_s
        self._look_lock = threading.Lock()
        self._last_look: Look | None = None
        self._look_again_s = 0.0
        self._times = RollingStageTimes()
        self._watch = StuckWatch(self.config.stuck)
        self._steps = StepWatch(self.config.steps)
        self._enough: Callable[[], bool] = lambda: False
        self._recalling: Iterator[None] | None = None
        """What former agents delivered and this one has not looked at yet."""
        self._recalls_all = False
        self._known_steps: set[str] = set()
        """Spans of passes that a former agent delivered, and that may be read again."""
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
            self._learn_from(Path(out) / TRACES_NAME)
        self._tails = RingTails(
            rings,
            self._tracker,
            known=self._state.rings,
            floor=self._state.sink,
            losses=self._state.losses,
            choose=self._choose_step,
            again=self._recall_all,
        )

    # -- the loop ----------------------------------------------------------------------------

    def poll(self, *, enough: Callable[[], bool] = lambda: False) -> int:
        """Reads what is there, hands on what is finished; returns the number of records read.

        enough  asked every few milliseconds: once it says so the rest is left to the next call
        """
        self._enough = enough
        if not self._recall():
            self._polled_s = time.monotonic()
            return 0
        before = self._tails.counts.records
        now_ns = time.monotonic_ns()
        # What is finished is handed on before more is read: what waits in a ring takes no memory.
        reads = not self._tracker.num_done
        caught_up = False
        if reads:
            position = self._delivery.position or SinkPosition()
            caught_up = self._tails.read(now_ns, position, enough=enough)
        if caught_up or not reads:
            self._hand_on(now_ns, enough)
        now_s = time.monotonic()
        if reads and self._tails.at_end:
            self._caught_up_s = now_s
            if now_s >= self._look_due_s:
                self._report_stuck()
        # The state of a ring that waits for what is recalled must not be written over.
        if now_s - self._state_written_s >= self.config.state_s and self._recalling is None:
            self._keep_house()
        self._polled_s = time.monotonic()
        return self._tails.counts.records - before

    def _hand_on(self, now_ns: int, enough: Callable[[], bool]) -> None:
        """A few at a time: spans of thousands of requests would not fit into memory."""
        while True:
            with self._tails.lock:
                finished = self._tracker.finished(
                    now_ns,
                    at_most=_AT_ONCE,
                    gateways_behind=self._tails.gateways_behind,
                    halted=self._tails.halted,
                )
            self._deliver(finished)
            if not self._tracker.num_done or enough():
                return

    def run(self, stop: Stop, *, until_closed: bool = False) -> None:
        """Polls until `stop` is set or, with `until_closed`, until every ring is finished.

        When told to stop it goes on for up to `grace_s`, and half of `flush_s`, while rings are
        still written, so that a server that is told at the same time gets its last words in. What
        it cannot read and write within that time stays in the rings.
        """
        interval_s = self.config.poll_s

        def soon() -> Callable[[], bool]:
            until_s = time.monotonic() + _ROUND_S
            return lambda: stop.is_set() or time.monotonic() >= until_s

        self.poll(enough=soon())
        if not self._tails.counts.rings and self._recalling is None:
            _log.info("no ring to read in %s yet", self._tails.directory)
        while not stop.is_set():
            if self.poll(enough=soon()):
                interval_s = self.config.poll_s
            else:
                interval_s = min(interval_s * 1.5, self.config.idle_poll_s)
            if until_closed and self._tails.num_finished and self.is_drained:
                break
            if self._tails.at_end and not self._tracker.num_done and self._recalling is None:
                stop.wait(interval_s)
        self._told_to_stop_s = time.monotonic()
        last_words_s = self._told_to_stop_s + min(self.config.grace_s, self.config.flush_s / 2)
        deadline_s = self._told_to_stop_s + self.config.flush_s * 0.75

        def is_over() -> bool:
            return time.monotonic() >= deadline_s

        while True:
            self.poll(enough=is_over)
            if self.is_drained or time.monotonic() >= last_words_s:
                break
            time.sleep(min(self.config.poll_s, _LAST_WORDS_POLL_S))
        # Of what a ring still holds, nobody knows to which of the requests that have ended it is.
        while self._tails.at_end and not is_over():
            with self._tails.lock:
                ended = self._tracker.finish_ended(
                    time.monotonic_ns(), at_most=_AT_ONCE, halted=self._tails.halted
                )
            if not ended:
                break
            self._deliver(ended)

    @property
    def is_drained(self) -> bool:
        """Whether every ring found is finished and no request is in flight."""
        is_quiet = not self._tails.num_live and not self._tracker.num_open
        return is_quiet and self._recalling is None

    def close(self) -> AgentSummary:
        """Flushes, within what is left of `flush_s`, and lets go of everything; returns the totals.
        Idempotent.

        Requests in flight stay in their rings: the next agent with the same `out` goes on.
        """
        # One that was stopped before it knew what is delivered leaves the state of the last one.
        if self._state_path is not None and self._recalling is None:
            try:
                self._keep_house()
            except AgentError as error:
                _log.error("%s", error)
        self._state_path = None
        self._tails.close()
        flush_s = self.config.flush_s
        if self._told_to_stop_s is not None:
            flush_s = max(flush_s / 4, flush_s - (time.monotonic() - self._told_to_stop_s))
        self._delivery.close(flush_s)
        return self.summary()

    # -- what it knows -----------------------------------------------------------------------

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
            overgrown=tracker.overgrown,
            steps=self._steps.chosen,
            steps_left_out=self._steps.left_out,
            errors=self._summary.errors + self._delivery.errors + tails.unreadable,
            lines_lost=self._delivery.lines_lost,
            open=self._tracker.num_open,
            export=dict(self._delivery.totals()),
        )

    def dropped(self) -> Mapping[str, int]:
        """Spans that no exporter will send, by reason."""
        return self._delivery.dropped()

    def losses(self) -> Losses:
        """What is known to be lost, over all agents of this run."""
        summary, tracker = self._summary, self._tracker.counts
        return self._tails.losses(
            requests=tracker.requests,
            incomplete=summary.incomplete,
            late=tracker.late,
            unnamed=tracker.unnamed,
            evicted=tracker.evicted,
            overgrown=tracker.overgrown,
            faults=summary.errors + self._delivery.errors,
            lines_lost=self._delivery.lines_lost,
            spans_dropped=sum(self._delivery.dropped().values()),
        )

    def look(self) -> Look:
        """What is in flight and how the processes stand, at this instant, from the rings.

        One that took long is shown again for a while: many who ask cost no more than one.
        """
        with self._look_lock:
            if self._last_look is not None and time.monotonic() < self._look_again_s:
                return self._last_look
            begin_s = time.monotonic()
            self._last_look = look = self._look()
            end_s = time.monotonic()
            took_s = end_s - begin_s
            if took_s > _LONG_LOOK_S:
                self._look_again_s = end_s + _LOOK_KEEPS * took_s
            else:
                self._last_look = None
            return look

    def _look(self) -> Look:
        requests = self._in_flight(time.monotonic_ns())
        problems = [*self.losses().sentences()]
        if (lag_s := self.lag_s) > KEEPS_UP_S:
            problems.insert(0, f"the agent is {lag_s:.0f} s behind the rings: ages may be too high")
        return Look(
            at_ns=time.time_ns(),
            requests=tuple(requests),
            processes=tuple(self._tails.processes(needed_by(requests))),
            problems=tuple(problems),
            pid=os.getpid(),
            run_dir=self._run_dir,
            lag_s=max(lag_s, self.poll_age_s),
        )

    @property
    def lag_s(self) -> float:
        """Seconds since the rings were last read to their end."""
        return time.monotonic() - self._caught_up_s

    @property
    def poll_age_s(self) -> float:
        """Seconds since the loop last went round."""
        return time.monotonic() - self._polled_s

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether the loop polls and keeps up with the rings, and the facts behind it."""
        poll_age_s, lag_s = self.poll_age_s, self.lag_s
        status = "ok"
        if poll_age_s > KEEPS_UP_S:
            status = "stopped"
        elif lag_s > KEEPS_UP_S:
            status = "behind"
        facts: dict[str, object] = {
            "status": status,
            "last_poll_age_s": round(poll_age_s, 3),
            "lag_s": round(lag_s, 3),
            "pid": os.getpid(),
            "problems": list(self.losses().sentences()),
            "exporters": [dataclasses.asdict(state) for state in self._delivery.exporters()],
            "totals": dataclasses.asdict(self.summary()),
        }
        return status == "ok", facts

    def _in_flight(self, now_ns: int) -> list[InFlight]:
        """A few at a time: the loop does not wait for the whole of them."""
        with self._tails.lock:
            roots = self._tracker.open_roots()
        found: list[InFlight] = []
        for begin in range(0, len(roots), _LOOK_AT_ONCE):
            with self._tails.lock:
                some = self._tracker.in_flight(now_ns, roots[begin : begin + _LOOK_AT_ONCE])
            found += [self._beside_usual(request) for request in some]
        return found

    def _beside_usual(self, request: InFlight) -> InFlight:
        if request.stage is None:
            return request
        usual = self._times.of(request.mode, request.stage)
        if usual is not None:
            request = msgspec.structs.replace(request, usual_s=usual.usual_s, p99_s=usual.p99_s)
        if not request.stuck and self.config.stuck.is_stuck(request):
            return msgspec.structs.replace(request, stuck=True)
        return request

    # -- finished requests -------------------------------------------------------------------

    def _deliver(self, requests: Iterable[CollectedRequest]) -> None:
        built: list[tuple[CollectedRequest, Sequence[Span]]] = []
        for request in requests:
            try:
                spans = assemble_lazily(request)
            except Exception as error:  # a bug here costs one request's spans, not the agent
                self._fault("building the spans of", request, error)
                continue
            if spans:
                spans = self._judged(request, spans)
                self._times.add(spans)  # here, while they are in the processor's cache
                built.append((request, spans))
        steps = [step_delivery(step) for step in self._tails.take_steps()]
        if self._known_steps:
            steps = [step for step in steps if step[1][0].span_id not in self._known_steps]
        if built or steps:
            self._delivery.deliver([*built, *steps])
        metrics = self._metrics
        for request, spans in built:
            self._summary.spans += len(spans)
            self._summary.incomplete += a.INCOMPLETE.key in spans[0].attributes
            if metrics is not None:
                metrics.request(request, spans)
            if isinstance(spans, OrderlySpans):
                spans.forget()  # those that wait for an exporter need little memory without

    def _judged(self, request: CollectedRequest, spans: Sequence[Span]) -> Sequence[Span]:
        """The spans with the verdict on the root, and on each of them why they must be kept."""
        verdict = self._verdict(request, spans)
        if (reason := why_keep(spans, verdict, self.config.slo)) is not None:
            spans = with_reason(spans, reason)
        if not verdict:
            return spans
        root = spans[0]
        judged = msgspec.structs.replace(root, attributes={**root.attributes, **verdict})
        return [judged, *spans[1:]]

    def _verdict(self, request: CollectedRequest, spans: Sequence[Span]) -> Mapping[str, AttrValue]:
        if self._judge is None or spans[0].attributes.get(a.SPAN.key) != ROOT_SPAN:
            return {}
        try:
            return self._judge(spans)
        except Exception as error:  # a bug here costs one verdict
            self._fault("judging", request, error)
            return {}

    def _learn_from(self, traces: Path) -> None:
        """What is usual, for this agent's verdicts too, from what a former one wrote."""
        try:
            for spans in recent_requests(traces):
                self._times.add(spans)
                if self._judge is not None:
                    self._judge(spans)  # it learns from what it judges
        except Exception as error:  # spans of other programs or versions: a help, not a promise
            _log.warning("usual times are learnt anew: %s in %s", error, traces)

    def _fault(self, doing: str, request: CollectedRequest, error: Exception) -> None:
        self._summary.errors += 1
        kind = f"{doing} {type(error).__name__}"
        if kind not in self._said:
            self._said.add(kind)
            _log.error(
                "%s request %s failed; further errors like it are only counted",
                doing,
                one_line(request.request_id),
                exc_info=error,
            )

    # -- steps and stuck requests ------------------------------------------------------------

    def _choose_step(self, ring: str, process: Process, step: StepRecord) -> bool:
        if self._metrics is not None:
            self._metrics.step(process.instance, step)
        return self._steps.choose(ring, step)

    def _report_stuck(self) -> None:
        """Looks at everything in flight, at most for `_LOOK_SHARE` of the time."""
        begin_s = time.monotonic()
        at_ns = time.monotonic_ns()
        reports = self._watch.check(self._in_flight(at_ns))
        for report in reports[:MAX_STUCK_LINES]:
            _log.warning("%s", report.line())
        if len(reports) > MAX_STUCK_LINES:
            _log.warning("%s", rest_of(reports[MAX_STUCK_LINES:]))
        for report in reports:
            request = report.request
            self._summary.stuck += 1
            with self._tails.lock:
                self._tracker.mark_stuck(
                    request.root_span_id,
                    Stuck(
                        stage=report.stage,
                        attempt=request.attempt,
                        at_ns=at_ns,
                        age_ns=round(request.stage_age_s * 1e9),
                        threshold_ns=round(report.threshold_s * 1e9),
                    ),
                )
            if self._metrics is not None:
                self._metrics.stuck(report.stage, request.worker)
        end_s = time.monotonic()
        self._look_due_s = end_s + max(self.config.stuck_s, (end_s - begin_s) / _LOOK_SHARE)

    # -- state -------------------------------------------------------------------------------

    def _restore(self, path: Path) -> None:
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except FileNotFoundError:
            state = _State()
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s cannot be used, rings are read from their begin: %s", path, error)
            state = _State()
        if state.version != self._state.version:
            _log.warning(
                "%s is of version %d, this pdtrace writes %d: rings are read from their begin",
                path,
                state.version,
                self._state.version,
            )
            state = _State()
        if state.sink > (self._delivery.position or SinkPosition()):  # somebody removed files
            state = msgspec.structs.replace(state, sink=SinkPosition())
        if state.written is not None:
            state = msgspec.structs.replace(
                state, losses=self._with_uncounted(state, state.written)
            )
        self._state = state
        self._watch.restore(state.reported)
        self._tracker.remember_stuck(state.reported)
        self._recalling = self._remember_delivered(state.sink)

    def _with_uncounted(self, state: _State, since: SinkPosition) -> Losses:
        """The losses with the requests that an agent delivered after it wrote its state, before it
        was killed."""
        requests = incomplete = 0
        for line in self._delivery.lines_since(since):
            try:
                spans = decode_heads(line)
            except ValueError:
                continue
            if spans and not are_step_keys(keys := spans[0].keys):
                requests += 1
                incomplete += a.INCOMPLETE.key in keys
        losses = state.losses
        return msgspec.structs.replace(
            losses,
            requests=losses.requests + requests,
            incomplete=losses.incomplete + incomplete,
        )

    def _remember_delivered(self, since: SinkPosition | None) -> Iterator[None]:
        """Requests and steps that the files have behind `since` are not delivered again. Yields
        after each."""
        for line in self._delivery.lines_since(since):
            try:
                spans = decode_heads(line)
            except ValueError:
                continue  # not ours; readers say so
            if spans and are_step_keys(spans[0].keys):
                self._known_steps.update(span.span_id for span in spans)
            else:
                self._tracker.remember_finished(_request_span_ids(spans))
            yield

    def _recall(self) -> bool:
        """Goes on with that; whether it is done. A request in flight for long makes it long."""
        if self._recalling is None:
            return True
        for count, _ in enumerate(self._recalling, 1):
            if count % _RECALLED_AT_ONCE == 0 and self._enough():
                return False
        self._recalling = None
        return True

    def _recall_all(self) -> bool:
        """The same for all that was ever delivered."""
        if not self._recalls_all:
            self._recalls_all = True
            self._recalling = self._remember_delivered(None)
        return self._recall()

    def _keep_house(self) -> None:
        """Writes the state, then deletes the rings that it no longer needs, and drafts of rings.

        Raises AgentError when the run directory was deleted and is another agent's now.
        """
        self._state_written_s = time.monotonic()
        path = self._state_path
        if path is not None and not self._delivery.owns_files:
            self._state_path = None
            raise AgentError(f"{path.parent} is another agent's now: this one ends")
        self._steps.keep(self._tails.live)
        self._tails.delete_drafts()
        written = self._delivery.position
        rings, sink = self._tails.states(written or SinkPosition())
        stuck = dataclasses.asdict(self.config.stuck)
        with self._tails.lock:
            reported = self._tracker.stuck_ones(MAX_STUCK_KEPT)
        state = _State(
            rings=rings,
            sink=sink,
            written=written,
            losses=self.losses(),
            stuck=stuck,
            reported=reported,
        )
        if path is None or self._save(path, state):
            self._summary.rings_deleted += self._tails.delete_old(self.config.keep_rings)

    def _save(self, path: Path, state: _State) -> bool:
        """Whether `path` holds `state`."""
        if state == self._state:
            return True
        draft = path.with_suffix(".draft")
        try:
            draft.write_bytes(msgspec.json.encode(state))
            draft.replace(path)
        except OSError as error:
            if "state" not in self._said:
                self._said.add("state")
                _log.warning(
                    "cannot write %s: %s. A restarted agent reads more of the rings again",
                    path,
                    error.strerror,
                )
            return False
        self._state = state
        return True


def _request_span_ids(spans: Iterable[SpanHead]) -> set[str]:
    """Ids by which a request's records are known: of its root and its attempts."""
    ids: set[str] = set()
    for span in spans:
        if a.SPAN.key in span.keys:
            ids.add(span.span_id)
        elif span.parent_id is not None:
            ids.add(span.parent_id)
    return ids
