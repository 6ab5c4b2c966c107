"""The agent's metrics: what is in flight at this instant, and what finished requests took.

Owns metric names, labels and what feeds each. Live ones are worked out when somebody scrapes, from
the rings, so they move while a worker is frozen; the others are plain numbers that finished spans
add to (`pdtrace.agent.tallies`). Seconds and bytes; request ids are never labels. A fault in here
is counted, and costs no request its spans.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import pdtrace
from pdtrace import semconv as a
from pdtrace.agent.buckets import COUNT_EDGES, DURATION_EDGES_S
from pdtrace.agent.summary import AgentSummary
from pdtrace.agent.tallies import MAX_SERIES, Counts, Errors, Histogram, Key, Seen
from pdtrace.analysis.baselines import NESTED_LEAVES, Leaf
from pdtrace.analysis.timeline import UNEXPLAINED
from pdtrace.assembly.collected import CollectedRequest
from pdtrace.inflight import Look, ProcessState
from pdtrace.ring.losses import Losses
from pdtrace.ring.records import StepRecord
from pdtrace.spans import AttrValue, Resource, Span, StatusCode
from pdtrace.stages import (
    ATTEMPT_SPAN,
    CHAINS,
    ROOT_SPAN,
    STAGES,
    GapCause,
    Gauge,
    Mode,
    Outcome,
    Role,
    StepKind,
)

UNKNOWN = "unknown"
"""Label value where no mark says which."""

_PAUSES = tuple(pause for pauses in NESTED_LEAVES.values() for pause in pauses)
_CHAIN_STAGES = tuple(dict.fromkeys(stage.name for mode in Mode for stage in CHAINS[mode]))

_KV_STATES = {
    Gauge.KV_PAGES_FREE: "free",
    Gauge.KV_PAGES_RESERVED: "reserved",
    Gauge.KV_PAGES_USED: "used",
    Gauge.KV_PAGES_CACHED: "cached",
}
_WORKER_GAUGES = {
    Gauge.KV_PAGES_TOTAL: ("pd_kv_pages_capacity", "KV pages of the pool."),
    Gauge.HELD_PAGES: (
        "pd_kv_pages_held",
        "KV pages held back because a transfer may still touch them.",
    ),
    Gauge.RUNNING: ("pd_worker_running", "Requests in the running batch."),
    Gauge.WAITING: ("pd_worker_waiting", "Requests that wait for a place in it."),
    Gauge.RESERVING: ("pd_worker_reserving", "Requests that wait for pages or for the other leg."),
    Gauge.TRANSFERRING: ("pd_worker_transferring", "Requests whose KV is on its way."),
    Gauge.IN_FLIGHT: ("pd_worker_in_flight", "Requests that the process holds in any state."),
    Gauge.COPY_JOBS_WAITING: ("pd_copy_jobs_waiting", "Copy jobs in the transfer's queue."),
    Gauge.RECORDING_DETAIL: (
        "pd_recording_detail",
        "Recording: 3 everything, 2 no steps, 1 no waits either, 0 no attributes either.",
    ),
}
_WORKER_COUNTERS = {
    Gauge.COPIED_BYTES: ("pd_copied_bytes", "Bytes of KV that the transfer process has copied."),
    Gauge.STEPS: ("pd_steps", "Forward passes of the process."),
}

_WAITING = "spans_waiting"
_EXPORT = {
    "spans_exported": "Spans that the exporters' collectors took.",
    "spans_replayed": "Exported spans that had waited in the files before.",
    "spans_unsampled": "Spans that stay in the files alone: their request was not sampled.",
    _WAITING: "Spans that no collector has taken yet, in memory or in the files.",
    "lines_lost": "Requests that could not be written to the files of traces.",
    "files_deleted": "Files of traces deleted, the oldest, to stay within their number.",
}
"""What of `AgentSummary.export` is exposed; spans dropped are, by reason."""

_STAGE, _BEGIN, _END, _REASON = a.STAGE.key, a.BEGIN_NS.key, a.END_NS.key, a.WAIT_REASON.key
_HANDOVER = frozenset({"hop.publish", "transfer", "transfer.queue", "transfer.copy", "hop.notice"})
"""Stages that depend on both workers of a pair."""
_TELLING = _HANDOVER | {"gateway.route", "decode.gap"}
"""Stages whose spans say more than how long they took."""
_BROKEN = frozenset({Outcome.FAILED.value, Outcome.TIMED_OUT.value, Outcome.LOST.value})
"""Outcomes that are nobody's wish."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNumbers:
    """What the agent knows of itself.

    dropped     spans that no exporter will send, by reason
    lag_s       since the rings were last read to their end
    poll_age_s  since the loop last went round
    """

    summary: AgentSummary = field(default_factory=AgentSummary)
    losses: Losses = field(default_factory=Losses)
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    lag_s: float = 0.0
    poll_age_s: float = 0.0


class AgentMetrics:
    """The metrics of one agent. Any thread may scrape while another observes.

    edges_s  upper bucket edges of every duration (`pdtrace.agent.buckets`)
    """

    def __init__(self, edges_s: Sequence[float] = DURATION_EDGES_S) -> None:
        self.errors = Errors()
        self._lock = threading.Lock()
        self._logged = False
        self._who: dict[int, tuple[Resource, str, str]] = {}
        self._processes_seen: set[tuple[str, str]] = set()
        self._histograms: list[Histogram] = []
        self._counters: list[Counts] = []

        def seconds(name: str, doc: str, *labels: str) -> Histogram:
            made = Histogram(name, doc, labels, edges_s, self.errors)
            self._histograms.append(made)
            return made

        def counter(name: str, doc: str, *labels: str) -> Counts:
            made = Counts(name, doc, labels, self.errors)
            self._counters.append(made)
            return made

        self._stage = seconds(
            "pd_stage_duration_seconds",
            "How long the stages of finished requests took.",
            *("stage", "role", "instance"),
        )
        self._handover = seconds(
            "pd_pair_stage_duration_seconds",
            "How long the stages took that depend on both workers of a pair.",
            *("stage", "source", "destination"),
        )
        self._wait = seconds(
            "pd_stage_wait_seconds",
            "Time that finished stages waited for one reason.",
            *("stage", "reason"),
        )
        self._gap = seconds(
            "pd_token_gap_seconds",
            "Gaps between two output tokens that exceeded the worker's threshold.",
            "cause",
        )
        self._duration = seconds(
            "pd_request_duration_seconds",
            "First request byte received to last byte written.",
            "outcome",
        )
        self._ttft = seconds(
            "pd_time_to_first_token_seconds",
            "First request byte received to first content bytes written.",
            "streamed",
        )
        self._copy = seconds(
            "pd_transfer_seconds",
            "Copies of KV from a prefill worker to a decode worker.",
            *("source", "destination"),
        )
        self._step = seconds(
            "pd_step_duration_seconds",
            "How long forward passes took, all of them.",
            "kind",
            "instance",
        )
        self._batch = Histogram(
            "pd_step_batch_size",
            "Requests that took part in a forward pass.",
            ("kind", "instance"),
            COUNT_EDGES,
            self.errors,
        )
        self._histograms.append(self._batch)
        self._requests = counter(
            "pd_finished_requests",
            "Requests that ended: outcome, its reason, and the stage they were in.",
            *("outcome", "reason", "stage"),
        )
        self._pairs = counter(
            "pd_requests_by_pair",
            "Requests that ended, by the last pair of workers they were routed to.",
            *("prefill", "decode", "outcome"),
        )
        self._bytes = counter(
            "pd_transfer_bytes", "Bytes of KV in finished copies.", "source", "destination"
        )
        self._broken = counter(
            "pd_transfer_failures",
            "Attempts that ended in the hand-over of KV from one worker to the other.",
            *("source", "destination"),
        )
        self._parts = counter(
            "pd_request_stage_seconds",
            "Time of finished requests by the stage that owns it: each instant has one owner.",
            "stage",
        )
        self._stalls = counter(
            "pd_stall", "Requests that a stage held up, by the agent's verdict.", "stage"
        )
        self._stuck = counter(
            "pd_stuck", "Requests reported as stuck, by stage and worker.", "stage", "instance"
        )
        self._retries = counter(
            "pd_retries", "Attempts after the first, by why the one before ended.", "reason"
        )
        # A series that appears with its first event hides that event from rate().
        self._requests.add((Outcome.COMPLETED.value, "", ""), 0)
        self._duration.of((Outcome.COMPLETED.value,))
        for streamed in ("true", "false"):
            self._ttft.of((streamed,))
        for cause in GapCause:
            self._gap.of((cause.value,))
        for stage in (*_CHAIN_STAGES, *_PAUSES):
            self._parts.add((stage,), 0)
            self._stalls.add((stage,), 0)
        self._parts.add((UNEXPLAINED,), 0)
        for stage in _CHAIN_STAGES:
            self._stuck.add((stage, UNKNOWN), 0)

    # -- observing ---------------------------------------------------------------------------

    def request(self, request: CollectedRequest, spans: Sequence[Span]) -> None:
        """A request is finished; its spans, root first."""
        try:
            with self._lock:
                self._observe(request, spans)
        except Exception:
            self._fault()

    def owned(self, leaves: Sequence[Leaf], total_ns: int) -> None:
        """What a finished request's time belongs to; what the leaves leave is unexplained."""
        try:
            with self._lock:
                rest_ns = total_ns
                for name, _, length_ns, _ in leaves:
                    rest_ns -= length_ns
                    self._parts.add((name,), length_ns / 1e9)
                self._parts.add((UNEXPLAINED,), rest_ns / 1e9)
        except Exception:
            self._fault()

    def step(self, instance: str, step: StepRecord) -> None:
        """A forward pass."""
        try:
            with self._lock:
                key = (step.kind.value, instance)
                self._step.of(key).observe((step.end_ns - step.begin_ns) / 1e9)
                self._batch.of(key).observe(step.size)
        except Exception:
            self._fault()

    def stuck(self, stage: str, instance: str | None) -> None:
        """A request was reported as stuck in `stage` of `instance`."""
        with self._lock:
            self._stuck.add((stage, instance or UNKNOWN))

    def _observe(self, request: CollectedRequest, spans: Sequence[Span]) -> None:
        known, sampled, who = self._stage.known, request.sampled, self._who
        handovers: list[tuple[str, float, Span]] = []
        attempts: list[Span] = []
        pairs: dict[AttrValue | None, tuple[str, str]] = {}
        for span in spans:
            attributes = span.attributes
            stage = attributes.get(_STAGE)
            if not isinstance(stage, str):
                kind = attributes.get(a.SPAN.key)
                if kind == ROOT_SPAN:
                    self._root(span, sampled)
                elif kind == ATTEMPT_SPAN:
                    attempts.append(span)
                continue
            begin_ns, end_ns = attributes.get(_BEGIN), attributes.get(_END)
            if isinstance(begin_ns, int) and isinstance(end_ns, int):
                seconds = (end_ns - begin_ns) / 1e9
            else:
                seconds = (span.end_ns - span.start_ns) / 1e9
            seen = (span.trace_id, span.span_id, seconds, span.end_ns) if sampled else None
            resource = span.resource
            owner = who.get(id(resource))
            if owner is None:
                owner = self._owner(resource)
            key = (stage, owner[1], owner[2])
            (known(key) or self._stage.of(key)).observe(seconds, seen)
            if stage in _TELLING or _REASON in attributes:
                if _REASON in attributes:
                    self._waits(stage, span, sampled)
                if stage in _HANDOVER:
                    handovers.append((stage, seconds, span))
                elif stage == "gateway.route":
                    pairs[attributes.get(a.ATTEMPT.key)] = _pair(attributes)
                elif stage == "decode.gap":
                    self._token_gap(span, sampled)
        broken: set[AttrValue | None] = set()
        for stage, seconds, span in handovers:
            number = span.attributes.get(a.ATTEMPT.key)
            pair = pairs.get(number, (UNKNOWN, UNKNOWN))
            seen = _seen(span, seconds) if sampled else None
            self._handover.of((stage, *pair)).observe(seconds, seen)
            if stage == "transfer.copy":
                self._copied(pair, span)
            if span.status is StatusCode.ERROR:
                broken.add(number)
        for span in attempts:
            self._ended(span, pairs, broken)
        if len(attempts) > 1:
            self._retried(attempts)

    def _ended(
        self,
        attempt: Span,
        pairs: Mapping[AttrValue | None, tuple[str, str]],
        broken: Collection[AttrValue | None],
    ) -> None:
        """Counts an attempt that failed in its hand-over."""
        attributes = attempt.attributes
        number = attributes.get(a.ATTEMPT.key)
        if number in pairs and attributes.get(a.OUTCOME.key) in _BROKEN:
            in_it = number in broken or attributes.get(a.OUTCOME_STAGE.key) in _HANDOVER
            self._broken.add(pairs[number], float(in_it))

    def _root(self, span: Span, sampled: bool) -> None:
        attributes = span.attributes
        outcome = str(attributes.get(a.OUTCOME.key, UNKNOWN))
        failed = outcome != Outcome.COMPLETED.value
        reason = str(attributes.get(a.OUTCOME_REASON.key, "")) if failed else ""
        stage = str(attributes.get(a.OUTCOME_STAGE.key, "")) if failed else ""
        self._requests.add((outcome, reason, stage))
        if a.PREFILL_WORKER.key in attributes or a.DECODE_WORKER.key in attributes:
            self._pairs.add((*_pair(attributes), outcome))
        seconds = _length_s(span)
        self._duration.of((outcome,)).observe(seconds, _seen(span, seconds) if sampled else None)
        ttft = attributes.get(a.TTFT_SECONDS.key)
        if isinstance(ttft, int | float):
            streamed = "true" if attributes.get(a.STREAM.key) else "false"
            self._ttft.of((streamed,)).observe(ttft, _seen(span, ttft) if sampled else None)
        stalled = attributes.get(a.STALL_STAGE.key)
        if stalled is not None:
            self._stalls.add((str(stalled),))

    def _waits(self, stage: str, span: Span, sampled: bool) -> None:
        """Each reason's time in force: from its event to the next, or to the end."""
        events = [event for event in span.events if event.name == "pd.wait"]
        in_force: dict[str, int] = {}
        until = [event.time_ns for event in events[1:]] + [span.end_ns]
        for event, end_ns in zip(events, until, strict=True):
            reason = str(event.attributes.get(a.WAIT_REASON.key, UNKNOWN))
            begin_ns = max(event.time_ns, span.start_ns)
            in_force[reason] = in_force.get(reason, 0) + max(0, end_ns - begin_ns)
        if not events:
            in_force[str(span.attributes[a.WAIT_REASON.key])] = span.end_ns - span.start_ns
        for reason, length_ns in in_force.items():
            seconds = length_ns / 1e9
            seen = _seen(span, seconds) if sampled else None
            self._wait.of((stage, reason)).observe(seconds, seen)

    def _token_gap(self, span: Span, sampled: bool) -> None:
        seconds = span.attributes.get(a.GAP_SECONDS.key)
        if isinstance(seconds, int | float):
            cause = str(span.attributes.get(a.GAP_CAUSE.key, GapCause.UNKNOWN.value))
            self._gap.of((cause,)).observe(seconds, _seen(span, seconds) if sampled else None)

    def _copied(self, pair: Key, span: Span) -> None:
        self._copy.of(pair).observe(_length_s(span))
        size = span.attributes.get(a.KV_BYTES.key)
        if isinstance(size, int):
            self._bytes.add(pair, size)

    def _retried(self, attempts: Sequence[Span]) -> None:
        for span in attempts[:-1]:
            self._retries.add((str(span.attributes.get(a.OUTCOME_REASON.key, UNKNOWN)),))

    def _owner(self, resource: Resource) -> tuple[Resource, str, str]:
        """Role and instance of a resource, remembered: they are few, and last as long as their
        process."""
        if len(self._who) > 1_000:
            self._who.clear()
        role = resource.attributes.get(a.ROLE.key)
        if role is None:
            role = resource.service_name.removeprefix("pd-")
        # The resource is held, so that its id is not used again.
        owner = self._who[id(resource)] = (resource, str(role), resource.instance_id or UNKNOWN)
        return owner

    def _fault(self) -> None:
        self.errors.count += 1
        if not self._logged:
            self._logged = True
            _log.exception("a metric could not be recorded; further faults are only counted")

    # -- scraping ----------------------------------------------------------------------------

    def families(self, look: Look, numbers: AgentNumbers) -> Iterator[Metric]:
        """Every metric at this instant."""
        yield from _open_requests(look)
        yield from _processes(look)
        with self._lock:
            self._expect(look)
            finished = [metric.family() for metric in (*self._histograms, *self._counters)]
        yield from finished
        yield from _agent(numbers, self.errors.count)

    def _expect(self, look: Look) -> None:
        """Series of the stages that the processes present will record or be stuck in, before they
        do."""
        for process in look.processes:
            role, name = Role(process.role), process.instance
            if (role.value, name) in self._processes_seen:
                continue
            if len(self._processes_seen) < MAX_SERIES:
                self._processes_seen.add((role.value, name))
            for stage in STAGES:
                if role not in stage.roles:
                    continue
                self._stage.of((stage.name, role.value, name))
                if stage.name in _CHAIN_STAGES:
                    self._stuck.add((stage.name, name), 0)
            if role in {Role.PREFILL, Role.WORKER}:
                self._step.of((StepKind.PREFILL.value, name))
            if role in {Role.DECODE, Role.WORKER}:
                self._step.of((StepKind.DECODE.value, name))
            self._expect_pairs(role, name)

    def _expect_pairs(self, role: Role, name: str) -> None:
        """A failure counter that appears with its first failure would hide it."""
        for other, instance in self._processes_seen:
            if (role, other) == (Role.PREFILL, Role.DECODE.value):
                self._broken.add((name, instance), 0)
            elif (role, other) == (Role.DECODE, Role.PREFILL.value):
                self._broken.add((instance, name), 0)


class Exposition(Collector):
    """The metrics in a registry of their own; `look` and `numbers` are asked at each scrape."""

    def __init__(
        self,
        metrics: AgentMetrics,
        look: Callable[[], Look],
        numbers: Callable[[], AgentNumbers],
    ) -> None:
        self._metrics, self._look, self._numbers = metrics, look, numbers
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing: describing would need a look."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        return self._metrics.families(self._look(), self._numbers())

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition in the format that `accept` prefers, and its content type.

        Exemplars are in OpenMetrics only.
        """
        try:
            return self._encoded(accept)
        except (TypeError, ValueError):  # it asks for a version that is no number
            return self._encoded("")

    def _encoded(self, accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def _seen(span: Span, value: float) -> Seen:
    return (span.trace_id, span.span_id, value, span.end_ns)


def _length_s(span: Span) -> float:
    begin_ns, end_ns = span.attributes.get(a.BEGIN_NS.key), span.attributes.get(a.END_NS.key)
    if isinstance(begin_ns, int) and isinstance(end_ns, int):
        return (end_ns - begin_ns) / 1e9
    return (span.end_ns - span.start_ns) / 1e9


def _pair(attributes: Mapping[str, AttrValue]) -> tuple[str, str]:
    return (
        str(attributes.get(a.PREFILL_WORKER.key, UNKNOWN)),
        str(attributes.get(a.DECODE_WORKER.key, UNKNOWN)),
    )


def _gauge(name: str, doc: str, labels: Sequence[str], rows: Mapping[Key, float]) -> Metric:
    family = GaugeMetricFamily(name, doc, labels=labels)
    for key, value in sorted(rows.items()):
        family.add_metric(key, value)
    return family


def _counter(name: str, doc: str, labels: Sequence[str], rows: Mapping[Key, float]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=labels)
    for key, value in sorted(rows.items()):
        family.add_metric(key, value)
    return family


def _open_requests(look: Look) -> Iterator[Metric]:
    """Requests in flight by stage; a stage without any is there with 0."""
    number: dict[Key, float] = {(stage,): 0.0 for stage in _CHAIN_STAGES}
    oldest: dict[Key, float] = dict(number)
    by_worker: dict[Key, float] = {}
    oldest_by_worker: dict[Key, float] = {}
    for request in look.requests:
        stage = UNKNOWN if request.stage is None else request.stage
        key = (stage,)
        number[key] = number.get(key, 0.0) + 1
        oldest[key] = max(oldest.get(key, 0.0), request.stage_age_s)
        if request.worker is not None:
            pair = (stage, request.worker)
            by_worker[pair] = by_worker.get(pair, 0.0) + 1
            oldest_by_worker[pair] = max(oldest_by_worker.get(pair, 0.0), request.stage_age_s)
    yield _gauge(
        "pd_open_requests", "Requests in flight, by the stage that they are in.", ("stage",), number
    )
    yield _gauge(
        "pd_open_request_oldest_age_seconds",
        "How long the request that is longest in a stage has been in it.",
        ("stage",),
        oldest,
    )
    yield _gauge(
        "pd_open_requests_by_worker",
        "Requests in flight, by the worker that has to end their stage.",
        ("stage", "instance"),
        by_worker,
    )
    yield _gauge(
        "pd_open_request_oldest_age_by_worker_seconds",
        "How long the request that is longest in a stage of a worker has been in it.",
        ("stage", "instance"),
        oldest_by_worker,
    )
    stuck = sum(request.stuck for request in look.requests)
    yield _gauge(
        "pd_open_requests_stuck", "Requests in flight that are stuck now.", (), {(): stuck}
    )


def _processes(look: Look) -> Iterator[Metric]:
    labels = ("role", "instance")
    pages: dict[Key, float] = {}
    gauges: dict[Gauge, dict[Key, float]] = {gauge: {} for gauge in _WORKER_GAUGES}
    counters: dict[Gauge, dict[Key, float]] = {gauge: {} for gauge in _WORKER_COUNTERS}
    progress: dict[Key, float] = {}
    share: dict[Key, float] = {}
    states: dict[Key, float] = {}
    for process in look.processes:
        key = (process.role, process.instance)
        for state in ProcessState:
            row = (*key, state.value)
            # Of several processes of one name, the latest is last.
            states[row] = float(process.state is state)
        if process.state in {ProcessState.CLOSED, ProcessState.LOST}:
            continue
        if process.progress_age_s is not None:
            progress[key] = process.progress_age_s
        values = process.gauges
        for gauge, state in _KV_STATES.items():
            if gauge.name.lower() in values:
                pages[*key, state] = values[gauge.name.lower()]
        for table in (gauges, counters):
            for gauge, rows in table.items():
                if gauge.name.lower() in values:
                    rows[key] = values[gauge.name.lower()]
        ppm = values.get(Gauge.RECORDING_SHARE_PPM.name.lower())
        if ppm is not None:
            share[key] = ppm / 1e6
    yield _gauge(
        "pd_kv_pages", "KV pages of a worker's pool by their state.", (*labels, "state"), pages
    )
    for gauge, (name, doc) in _WORKER_GAUGES.items():
        yield _gauge(name, doc, labels, gauges[gauge])
    for gauge, (name, doc) in _WORKER_COUNTERS.items():
        yield _counter(name, doc, labels, counters[gauge])
    yield _gauge(
        "pd_recording_share_ratio", "Part of one core that recording takes.", labels, share
    )
    yield _gauge(
        "pd_process_progress_age_seconds",
        "Time since the loop of a process last went round, read from its ring.",
        labels,
        progress,
    )
    yield _gauge(
        "pd_process_state", "1 for the state that a process is in.", (*labels, "state"), states
    )


def _agent(numbers: AgentNumbers, metric_errors: int) -> Iterator[Metric]:
    summary = numbers.summary

    def count(name: str, doc: str, value: float) -> Metric:
        return _counter(f"pd_agent_{name}", doc, (), {(): value})

    def gauge(name: str, doc: str, value: float) -> Metric:
        return _gauge(f"pd_agent_{name}", doc, (), {(): value})

    yield _gauge(
        "pd_build_info",
        "1; the version of pdtrace is a label.",
        ("version",),
        {(pdtrace.__version__,): 1},
    )
    yield count("requests", "Requests that finished, with an outcome or lost.", summary.requests)
    yield count(
        "incomplete_requests",
        "Finished requests of whose marks something is known to be missing.",
        summary.incomplete,
    )
    yield count(
        "evicted_requests",
        "Requests given up because too many were in flight at a time.",
        summary.evicted,
    )
    yield count("spans_recorded", "Spans built from the marks of requests.", summary.spans)
    yield count("step_spans", "Forward passes that became spans.", summary.steps)
    yield count(
        "step_spans_left_out",
        "Slow or sampled forward passes beyond the limit of spans per second.",
        summary.steps_left_out,
    )
    for name, doc in _EXPORT.items():
        if name in summary.export:
            yield (gauge if name == _WAITING else count)(name, doc, summary.export[name])
    yield _counter(
        "pd_agent_spans_dropped",
        "Spans that no exporter will send, by reason.",
        ("reason",),
        {(reason.replace(" ", "_"),): float(value) for reason, value in numbers.dropped.items()},
    )
    yield _counter(
        "pd_agent_records",
        "Records of the rings: read, overwritten before they were read (missed), damaged (torn), "
        "for a request finished already (late), for one not known (unnamed).",
        ("what",),
        {
            ("read",): summary.records,
            ("missed",): summary.missed,
            ("torn",): summary.torn,
            ("late",): summary.late,
            ("unnamed",): summary.unnamed,
        },
    )
    yield _counter(
        "pd_recorder_losses",
        "What a process's recording lacks, over all agents that read it.",
        ("role", "instance", "kind"),
        {
            (role, instance, kind): float(value)
            for (role, instance), kinds in numbers.losses.by_instance().items()
            for kind, value in kinds.items()
        },
    )
    yield gauge("lag_seconds", "Time since the rings were last read to their end.", numbers.lag_s)
    yield gauge(
        "last_poll_age_seconds", "Time since the agent's loop last went round.", numbers.poll_age_s
    )
    yield count(
        "rings_deleted",
        "Rings of ended processes deleted, their requests delivered.",
        summary.rings_deleted,
    )
    yield count(
        "errors",
        "Faults of the agent that cost spans or a verdict, and rings that it could not read.",
        summary.errors,
    )
    yield count("metrics_errors", "Measurements that were wrong or left out.", metric_errors)
