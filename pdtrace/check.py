"""Whether a recording keeps what pdtrace promises: time adds up, ids agree, nothing is missing.

Owns rules over a whole recording; rules over one request are `pdtrace.analysis.violations`'s, what
became of the processes is `pdtrace.live.health`'s. Pure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text
from pdtrace.analysis.host_clocks import ClockBook, HostSummary, clock_breach
from pdtrace.analysis.placement import is_attempt, is_root, split_requests, stage_of
from pdtrace.analysis.skew import MAX_SKEW_NS
from pdtrace.analysis.sources import Recording
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.analysis.violations import ViolationKind
from pdtrace.export.spill import Waiting
from pdtrace.live.health import ProcessHealth, RunHealth
from pdtrace.patience import Progress, no_progress
from pdtrace.ring.losses import WriterEnd
from pdtrace.spans import Trace
from pdtrace.stages import Mode, Outcome, Role

MAX_UNEXPLAINED_SHARE = 0.01
MAX_EXAMPLES = 5
_TELL_EVERY = 100

_V = ViolationKind
_PARENTLESS = frozenset({_V.ORPHAN, _V.MISSING_PARENT})
_RULES: tuple[tuple[str, str, tuple[ViolationKind, ...]], ...] = (
    ("root", "each request has one root span", (_V.NO_ROOT, _V.TWO_ROOTS)),
    ("parents", "parents exist and lead to the request", (_V.MISSING_PARENT, _V.ORPHAN)),
    ("clock", "spans stand on wall time", (_V.BAD_CLOCK,)),
    ("durations", "no span ends before it begins", (_V.NEGATIVE,)),
    (
        "order",
        "chain stages keep their order and do not overlap",
        (_V.OVERLAP, _V.OUT_OF_ORDER, _V.REPEATED),
    ),
    ("bounds", "stages lie inside their request", (_V.OUTSIDE_ROOT,)),
    ("stages", "completed requests have every stage", (_V.MISSING_STAGE,)),
    ("marks", "no impossible marks were recorded", (_V.IMPOSSIBLE_MARKS,)),
    ("request_id", "no span carries another request's id", (_V.MIXED_REQUEST_IDS,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule's result. `checked` and `broken` count requests, unless the title says otherwise."""

    name: str
    title: str
    checked: int
    broken: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result for one recording.

    unexplained_ns, total_ns   over all requests
    outcomes                   requests by outcome; `unknown` where it was not recorded
    orphans                    spans without a parent, or whose ancestors miss the request
    step_traces                traces that hold forward passes alone, among `traces`
    clocks                     those of hosts other than the gateway's
    processes                  the recording processes of the run, where the source is one
    notes                      what the reader could not use, and what breaks no rule
    """

    source: str
    requests: int
    traces: int
    spans: int
    unexplained_ns: int
    total_ns: int
    outcomes: Mapping[str, int]
    orphans: int
    step_traces: int
    rules: tuple[Rule, ...]
    clocks: tuple[HostSummary, ...]
    processes: tuple[ProcessHealth, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(rule.broken == 0 for rule in self.rules)

    @property
    def unexplained_share(self) -> float:
        return self.unexplained_ns / self.total_ns if self.total_ns else 0.0

    @property
    def sentence(self) -> str:
        if self.ok:
            keep = "request keeps" if self.requests == 1 else "requests keep"
            return f"{self.requests} {keep} all {len(self.rules)} rules."
        broken = [rule.name for rule in self.rules if rule.broken]
        are = "is" if len(broken) == 1 else "are"
        return f"{len(broken)} of {len(self.rules)} rules {are} broken: {', '.join(broken)}."

    @property
    def facts(self) -> tuple[str, ...]:
        """Sentences on size, outcomes, unexplained time and clocks."""
        outcomes = ", ".join(f"{count} {name}" for name, count in self.outcomes.items())
        traces = _many(self.traces - self.step_traces, "trace")
        passes = ""
        if self.step_traces:
            passes = f" and {_many(self.step_traces, 'trace')} of forward passes"
        return (
            f"{_many(self.requests, 'request')} in {traces}{passes}, "
            f"{_many(self.spans, 'span')}{': ' if outcomes else ''}{outcomes}.",
            f"Unexplained: {self.unexplained_share * 100:.4f} % of the requests' time.",
            *(clock.sentence for clock in self.clocks),
        )

    def document(self) -> dict[str, Any]:
        """The report as one JSON object (`pdtrace check --json`)."""
        return {
            "schema": "pdtrace.check/1",
            "source": self.source,
            "ok": self.ok,
            "requests": self.requests,
            "traces": self.traces,
            "spans": self.spans,
            "outcomes": dict(self.outcomes),
            "orphans": self.orphans,
            "step_traces": self.step_traces,
            "total_ns": self.total_ns,
            "unexplained_ns": self.unexplained_ns,
            "unexplained_share": self.unexplained_share,
            "rules": [
                {
                    "name": rule.name,
                    "title": rule.title,
                    "checked": rule.checked,
                    "broken": rule.broken,
                    "examples": list(rule.examples),
                }
                for rule in self.rules
            ],
            "clocks": [{**asdict(clock), "basis": clock.basis.value} for clock in self.clocks],
            "processes": [
                {
                    "role": process.role,
                    "instance": process.instance,
                    "pid": process.pid,
                    "ended": process.ended.value if process.ended else None,
                    "standing": process.standing,
                    "open_requests": process.open_requests,
                    "open_ids": list(process.open_ids),
                    "losses": dict(process.losses),
                }
                for process in self.processes
            ],
            "notes": list(self.notes),
        }


def check_recording(
    recording: Recording,
    runs: Sequence[RunHealth] = (),
    *,
    max_skew_ns: int = MAX_SKEW_NS,
    progress: Progress = no_progress,
) -> CheckReport:
    """Check everything a source held, and the processes of the runs that it came from. A recording
    without requests keeps no rule. Each request is looked at once, and nothing of its size is kept.

    max_skew_ns  as for `build_timeline`
    """
    processes = tuple(process for run in runs for process in run.processes)
    book = _Book(processes)
    for number, trace in enumerate(recording.traces):
        if number % _TELL_EVERY == 0:
            progress(f"checking {len(recording.traces)} traces", number / len(recording.traces))
        parts = split_requests(trace)
        book.step_traces += not parts
        for part in parts:
            book.add(part, build_timeline(part, max_skew_ns=max_skew_ns))
    problems = recording.problems
    rules = [
        _rule(
            "requests",
            "the recording holds requests",
            1,
            [] if book.requests else ["no request was found"],
        ),
        _rule(
            "readable",
            "lines could be read whole (counts lines)",
            recording.lines,
            problems.sentences() if problems.lossy else [],
            broken=problems.bad_line_count
            + problems.bad_spans
            + problems.conflicts
            + len(problems.cut_files),
        ),
        *book.rules(),
        _vanished(processes),
        _lost_records(processes),
        _unreadable(runs),
        _handled(runs),
    ]
    return CheckReport(
        source=recording.source,
        requests=book.requests,
        traces=len(recording.traces),
        spans=recording.spans,
        unexplained_ns=book.unexplained.ns,
        total_ns=book.unexplained.total_ns,
        outcomes=dict(sorted(book.outcomes.items())),
        step_traces=book.step_traces,
        orphans=book.orphans,
        rules=tuple(rules),
        clocks=book.clocks.summaries(),
        processes=processes,
        notes=(*problems.sentences(), *_run_notes(runs, processes)),
    )


class _Told(Protocol):
    """A rule that is told of the requests one by one."""

    def add(self, trace: Trace, timeline: Timeline) -> None: ...
    def rule(self) -> Rule: ...


class _Book:
    """What is counted over the requests, and the rules over them in the order of the report."""

    def __init__(self, processes: Sequence[ProcessHealth]) -> None:
        self.requests = 0
        self.step_traces = 0
        self.outcomes: Counter[str] = Counter()
        self.orphans = 0
        self.clocks = ClockBook()
        self.unexplained = _Unexplained()
        self._rules: tuple[_Told, ...] = (
            _Tally("partition", "the parts of each request sum to the whole", _partition),
            self.unexplained,
            *(_Tally(name, title, _of_kinds(kinds)) for name, title, kinds in _RULES),
            _Tally(
                "clocks",
                "hosts' clocks contradict the order of stages by no more than their error",
                lambda _, timeline: clock_breach(timeline),
            ),
            _Tally("identified", "every process puts the request id on its spans", _silent),
            _Owners(),
            _Tally("roles", "every process that took part left spans", _roles),
            _Tally("complete", "nothing is known to be missing", _complete),
            _Tally("lost", "no request lost a process that served it", _lost(processes)),
        )

    def add(self, trace: Trace, timeline: Timeline) -> None:
        """`trace` holds the spans of that request alone."""
        self.requests += 1
        self.outcomes[timeline.outcome.value if timeline.outcome else "unknown"] += 1
        self.orphans += sum(v.kind in _PARENTLESS for v in timeline.violations)
        self.clocks.add(timeline)
        for rule in self._rules:
            rule.add(trace, timeline)

    def rules(self) -> Iterator[Rule]:
        return (rule.rule() for rule in self._rules)


class _Unexplained:
    """Whether the stages cover the time of all requests together."""

    def __init__(self) -> None:
        self.ns = 0
        self.total_ns = 0
        self._worst: list[tuple[int, str]] = []

    def add(self, trace: Trace, timeline: Timeline) -> None:
        del trace
        ns, total = timeline.unexplained_ns, timeline.total_ns
        self.ns += ns
        self.total_ns += total
        if ns:
            told = f"{_name(timeline)}: {ns / total * 100:.1f} % of {total / 1e9:.3f} s"
            self._worst.append((ns, told))
            self._worst.sort(key=lambda one: -one[0])
            del self._worst[MAX_EXAMPLES:]

    def rule(self) -> Rule:
        is_much = self.ns > MAX_UNEXPLAINED_SHARE * self.total_ns
        return _rule(
            "unexplained",
            f"at most {MAX_UNEXPLAINED_SHARE * 100:.0f} % of all time is unexplained "
            "(counts the recording)",
            1,
            [told for _, told in self._worst] if is_much else [],
            broken=1 if is_much else 0,
        )


_Breach = Callable[[Trace, Timeline], str | None]


@dataclass(slots=True)
class _Tally:
    """A rule that each request keeps or breaks; `breach` says how, or None."""

    name: str
    title: str
    breach: _Breach
    checked: int = 0
    broken: int = 0
    examples: list[str] = field(default_factory=list[str])

    def add(self, trace: Trace, timeline: Timeline) -> None:
        self.checked += 1
        if what := self.breach(trace, timeline):
            self.broken += 1
            if len(self.examples) < MAX_EXAMPLES:
                self.examples.append(f"{_name(timeline)}: {what}")

    def rule(self) -> Rule:
        return _rule(self.name, self.title, self.checked, self.examples, broken=self.broken)


def _rule(
    name: str, title: str, checked: int, breaches: Sequence[str], broken: int | None = None
) -> Rule:
    return Rule(
        name=name,
        title=title,
        checked=checked,
        broken=len(breaches) if broken is None else broken,
        examples=tuple(breaches[:MAX_EXAMPLES]),
    )


def _name(timeline: Timeline) -> str:
    return timeline.request_id or f"trace {timeline.trace_id}"


def _of_kinds(kinds: tuple[ViolationKind, ...]) -> _Breach:
    def breach(_: Trace, timeline: Timeline) -> str | None:
        found = [v.message for v in timeline.violations if v.kind in kinds]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return found[0] + more if found else None

    return breach


def _partition(_: Trace, timeline: Timeline) -> str | None:
    parts = sum(part.ns for part in timeline.parts)
    if parts != timeline.total_ns or any(part.ns < 0 for part in timeline.parts):
        return f"parts sum to {parts} ns of {timeline.total_ns} ns"
    at = 0
    for segment in timeline.segments:
        if segment.begin_ns != at or segment.end_ns <= at:
            return f"the partition has a gap or an overlap at {at} ns"
        at = segment.end_ns
    return None if at == timeline.total_ns else f"the partition ends at {at} ns"


def _silent(trace: Trace, _: Timeline) -> str | None:
    silent = {
        span.resource.service_name
        for span in trace.spans
        if text(span.attributes, a.REQUEST_ID) is None
        and (stage_of(span) or is_root(span) or is_attempt(span))
    }
    return f"no request id on spans of {_listed(silent)}" if silent else None


class _Owners:
    """Whose traces and handoffs are whose.

    A caller may use an id again: then each trace has a root and handoffs of its own. A trace
    without a root, or a handoff in two traces, is a request whose context was lost on the way.
    """

    def __init__(self) -> None:
        self._traces: dict[str, str] = {}  # request id → its first trace
        self._several: dict[str, set[str]] = {}  # all traces of those in more than one
        self._rootless: set[str] = set()
        self._handoffs: dict[str, tuple[str, str]] = {}  # → the first trace and request id
        self._shared: dict[str, tuple[set[str], set[str]]] = {}  # all of those with more than one

    def add(self, trace: Trace, timeline: Timeline) -> None:
        request_id, trace_id = timeline.request_id, timeline.trace_id
        if request_id is None:
            return
        first = self._traces.setdefault(request_id, trace_id)
        if first != trace_id:
            self._several.setdefault(request_id, {first}).add(trace_id)
        if timeline.root_id is None:
            self._rootless.add(trace_id)
        owner = trace_id, request_id
        for handoff in {text(span.attributes, a.HANDOFF_ID) for span in trace.spans}:
            if handoff is None:
                continue
            known = self._handoffs.setdefault(handoff, owner)
            if known != owner:
                traces, requests = self._shared.setdefault(handoff, ({known[0]}, {known[1]}))
                traces.add(trace_id)
                requests.add(request_id)

    def rule(self) -> Rule:
        torn = {
            request_id
            for traces, requests in self._shared.values()
            if len(traces) > 1
            for request_id in requests
        }
        breaches = [
            f"{request_id}: traces {_listed(found)}"
            for request_id in self._traces
            if (found := self._several.get(request_id))
            and (request_id in torn or found & self._rootless)
        ]
        title = "the spans of a request are in one trace"
        return _rule("one_trace", title, len(self._traces), breaches)


def _roles(_: Trace, timeline: Timeline) -> str | None:
    missing = {role.service_name for role in _expected_roles(timeline) - timeline.roles}
    return f"no span of {_listed(missing)}" if missing else None


def _expected_roles(timeline: Timeline) -> set[Role]:
    if timeline.outcome is not Outcome.COMPLETED:
        return {Role.GATEWAY}
    if timeline.mode is Mode.COLOCATED:
        return {Role.GATEWAY, Role.WORKER}
    if timeline.output_tokens is not None and timeline.output_tokens <= 1:
        return {Role.GATEWAY, Role.PREFILL}  # nothing to decode
    return {Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE}


def _complete(_: Trace, timeline: Timeline) -> str | None:
    # Where the root is missing a stage says so.
    spans = (timeline.attributes, *(visit.attributes for visit in timeline.visits))
    reason = next((why for one in spans if (why := text(one, a.INCOMPLETE))), None)
    if reason is not None:
        return reason
    return "no outcome" if timeline.root_id and timeline.outcome is None else None


def _lost(processes: Sequence[ProcessHealth]) -> _Breach:
    """A request is lost also if a gateway was left to say that it failed: with the process of one
    of its stages, or with one that had it open though no stage of its own had begun."""
    vanished = [process for process in processes if process.ended is WriterEnd.LOST]

    def breach(_: Trace, timeline: Timeline) -> str | None:
        if timeline.outcome is not Outcome.LOST:
            for visit in timeline.visits:
                if visit.outcome is Outcome.LOST:
                    who = text(visit.attributes, a.OUTCOME_BY) or visit.instance
                    return f"{visit.name} was lost{f' with {who}' if who else ''}"
            if timeline.outcome is Outcome.COMPLETED:
                return None
            for process in vanished:
                if timeline.request_id in process.open_ids:
                    return f"{process.instance} was lost with it"
            return None
        where = f" in {timeline.outcome_stage}" if timeline.outcome_stage else ""
        who = f" with {timeline.outcome_by}" if timeline.outcome_by else ""
        why = f" ({timeline.outcome_reason})" if timeline.outcome_reason else ""
        return f"lost{who}{where}{why}"

    return breach


def _vanished(processes: Sequence[ProcessHealth]) -> Rule:
    found: list[str] = []
    for process in processes:
        if process.ended is not WriterEnd.LOST:
            continue
        ids = ", ".join(process.open_ids[:MAX_EXAMPLES])
        more = ", …" if len(process.open_ids) > MAX_EXAMPLES else ""
        found.append(f"{process.vanished}{f': {ids}{more}' if ids else ''}")
    return _rule("processes", "no process vanished (counts processes)", len(processes), found)


def _lost_records(processes: Sequence[ProcessHealth]) -> Rule:
    found = [
        f"{process.instance} (pid {process.pid}) {what}"
        for process in processes
        if (what := process.lost)
    ]
    return _rule("records", "no record was lost (counts processes)", len(processes), found)


def _unreadable(runs: Sequence[RunHealth]) -> Rule:
    found = [f"{name}: {why}" for run in runs for name, why in sorted(run.unreadable.items())]
    checked = sum(len(run.processes) for run in runs) + len(found)
    return _rule("rings", "every ring could be read (counts rings)", checked, found)


def _handled(runs: Sequence[RunHealth]) -> Rule:
    """What the agent could not do with requests that it had read."""
    found: list[str] = []
    broken = 0
    for run in runs:
        losses = run.losses
        for count, what in (
            (losses.faults, "requests cost pdtrace an error of its own: no spans, or no verdict"),
            (losses.evicted, "requests were given up because too many were in flight"),
            (losses.lines_lost, "requests could not be written to the files"),
            (
                losses.spans_dropped,
                "spans were exported to nobody: collectors refused them or could not be reached",
            ),
        ):
            if count:
                broken += count
                found.append(f"{run.run}: {count} {what}")
        for waiting in () if run.has_agent else run.waiting:
            broken += waiting.spans
            found.append(
                f"{run.run}: {_waits(waiting)}; no agent is there: `pdtrace agent --rings "
                f"{run.run}/rings --out {run.run}` sends them"
            )
    checked = sum(run.losses.requests for run in runs)
    title = "what was read was written, and exported or on its way (counts requests, spans)"
    return _rule("delivered", title, checked, found, broken=broken)


def _waits(waiting: Waiting) -> str:
    """`otlp http://…: 778 spans wait since 21:03:11 UTC: connection refused`."""
    failing = waiting.failing
    since = time.strftime("%H:%M:%S", time.gmtime(waiting.since_unix_ns / 1e9))
    wait = "span waits" if waiting.spans == 1 else "spans wait"
    name = waiting.kind if failing is None else failing.name
    why = "" if failing is None else f" ({failing.reason.rstrip('.')})"
    return f"{waiting.spans} {wait} to be exported with {name} since {since} UTC{why}"


def _run_notes(runs: Sequence[RunHealth], processes: Sequence[ProcessHealth]) -> Iterable[str]:
    for run in runs:
        for waiting in run.waiting if run.has_agent else ():
            yield f"{_waits(waiting)}; the agent goes on trying."
        if run.losses.problem:
            yield f"{run.losses.problem}."
        if run.losses.unnamed:
            yield f"{_many(run.losses.unnamed, 'mark')} of requests that nobody knows."
        if run.losses.overgrown:
            yield f"{_many(run.losses.overgrown, 'mark')} left out of requests with too many."
    for process in processes:
        if process.standing:
            yield f"{process.standing}."
        if process.shed:
            yield f"{process.instance} (pid {process.pid}) {process.shed}."
        if cut := process.losses.get("truncated", 0):
            yield f"{process.instance} (pid {process.pid}) cut {_many(cut, 'long text')}."


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
