"""Whether a recording keeps what pdtrace promises: time adds up, ids agree, nothing is missing.

Owns rules over a whole recording; rules over one request are `pdtrace.analysis.violations`'s, what
became of the processes is `pdtrace.live.health`'s. Pure.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text
from pdtrace.analysis.host_clocks import HostSummary, clock_breach, summarize_clocks
from pdtrace.analysis.placement import is_attempt, is_root, split_requests, stage_of
from pdtrace.analysis.skew import MAX_SKEW_NS
from pdtrace.analysis.sources import Recording
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.analysis.violations import ViolationKind
from pdtrace.export.spill import Waiting
from pdtrace.live.health import ProcessHealth, RunHealth
from pdtrace.ring.losses import WriterEnd
from pdtrace.spans import Trace
from pdtrace.stages import Mode, Outcome, Role

MAX_UNEXPLAINED_SHARE = 0.01
MAX_EXAMPLES = 5

_V = ViolationKind
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
    recording: Recording, runs: Sequence[RunHealth] = (), *, max_skew_ns: int = MAX_SKEW_NS
) -> CheckReport:
    """Check everything a source held, and the processes of the runs that it came from. A recording
    without requests keeps no rule.

    max_skew_ns  as for `build_timeline`
    """
    processes = tuple(process for run in runs for process in run.processes)
    parts = [split_requests(trace) for trace in recording.traces]
    requests = [part for those in parts for part in those]
    timelines = [build_timeline(part, max_skew_ns=max_skew_ns) for part in requests]
    problems = recording.problems
    rules = [
        _rule(
            "requests",
            "the recording holds requests",
            1,
            [] if timelines else ["no request was found"],
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
        _partition(timelines),
        _unexplained(timelines),
        *(_by_kind(name, title, kinds, timelines) for name, title, kinds in _RULES),
        _each(
            "clocks",
            "hosts' clocks contradict the order of stages by no more than their error",
            timelines,
            clock_breach,
        ),
        _ids_present(requests, timelines),
        _one_trace_per_request(requests, timelines),
        _roles(timelines),
        _complete(timelines),
        _lost_requests(timelines, processes),
        _vanished(processes),
        _lost_records(processes),
        _unreadable(runs),
        _handled(runs),
    ]
    outcomes = Counter(t.outcome.value if t.outcome else "unknown" for t in timelines)
    parentless = {ViolationKind.ORPHAN, ViolationKind.MISSING_PARENT}
    return CheckReport(
        source=recording.source,
        requests=len(timelines),
        traces=len(recording.traces),
        spans=recording.spans,
        unexplained_ns=sum(t.unexplained_ns for t in timelines),
        total_ns=sum(t.total_ns for t in timelines),
        outcomes=dict(sorted(outcomes.items())),
        step_traces=sum(not those for those in parts),
        orphans=sum(v.kind in parentless for t in timelines for v in t.violations),
        rules=tuple(rules),
        clocks=summarize_clocks(timelines),
        processes=processes,
        notes=(*problems.sentences(), *_run_notes(runs, processes)),
    )


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


def _each(
    name: str, title: str, timelines: Sequence[Timeline], breach: Callable[[Timeline], str | None]
) -> Rule:
    """A rule that each request keeps or breaks; `breach` says how, or None."""
    found = [f"{_name(t)}: {what}" for t in timelines if (what := breach(t))]
    return _rule(name, title, len(timelines), found)


def _by_kind(
    name: str, title: str, kinds: tuple[ViolationKind, ...], timelines: Sequence[Timeline]
) -> Rule:
    def breach(timeline: Timeline) -> str | None:
        found = [v.message for v in timeline.violations if v.kind in kinds]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return found[0] + more if found else None

    return _each(name, title, timelines, breach)


def _partition(timelines: Sequence[Timeline]) -> Rule:
    def breach(timeline: Timeline) -> str | None:
        parts = sum(part.ns for part in timeline.parts)
        if parts != timeline.total_ns or any(part.ns < 0 for part in timeline.parts):
            return f"parts sum to {parts} ns of {timeline.total_ns} ns"
        at = 0
        for segment in timeline.segments:
            if segment.begin_ns != at or segment.end_ns <= at:
                return f"the partition has a gap or an overlap at {at} ns"
            at = segment.end_ns
        return None if at == timeline.total_ns else f"the partition ends at {at} ns"

    return _each("partition", "the parts of each request sum to the whole", timelines, breach)


def _unexplained(timelines: Sequence[Timeline]) -> Rule:
    total = sum(t.total_ns for t in timelines)
    unexplained = sum(t.unexplained_ns for t in timelines)
    breaches: list[str] = []
    if unexplained > MAX_UNEXPLAINED_SHARE * total:
        worst = sorted(timelines, key=lambda t: -t.unexplained_ns)
        breaches = [
            f"{_name(t)}: {t.unexplained_ns / t.total_ns * 100:.1f} % of {t.total_ns / 1e9:.3f} s"
            for t in worst
            if t.unexplained_ns
        ]
    return _rule(
        "unexplained",
        f"at most {MAX_UNEXPLAINED_SHARE * 100:.0f} % of all time is unexplained "
        "(counts the recording)",
        1,
        breaches,
        broken=1 if breaches else 0,
    )


def _ids_present(requests: Sequence[Trace], timelines: Sequence[Timeline]) -> Rule:
    breaches: list[str] = []
    for trace, timeline in zip(requests, timelines, strict=True):
        silent = {
            span.resource.service_name
            for span in trace.spans
            if (stage_of(span) or is_root(span) or is_attempt(span))
            and text(span.attributes, a.REQUEST_ID) is None
        }
        if silent:
            breaches.append(f"{_name(timeline)}: no request id on spans of {_listed(silent)}")
    return _rule(
        "identified", "every process puts the request id on its spans", len(requests), breaches
    )


def _one_trace_per_request(requests: Sequence[Trace], timelines: Sequence[Timeline]) -> Rule:
    """A caller may use an id again: then each trace has a root and handoffs of its own. A trace
    without a root, or a handoff in two traces, is a request whose context was lost on the way."""
    traces: defaultdict[str, set[str]] = defaultdict(set)
    rootless: set[str] = set()
    handoffs: defaultdict[str, set[str]] = defaultdict(set)
    owners: defaultdict[str, set[str]] = defaultdict(set)  # handoff → request ids
    for trace, timeline in zip(requests, timelines, strict=True):
        if timeline.request_id is None:
            continue
        traces[timeline.request_id].add(timeline.trace_id)
        if timeline.root_id is None:
            rootless.add(timeline.trace_id)
        for span in trace.spans:
            handoff = text(span.attributes, a.HANDOFF_ID)
            if handoff is not None:
                handoffs[handoff].add(timeline.trace_id)
                owners[handoff].add(timeline.request_id)
    torn = {
        request_id
        for handoff, found in handoffs.items()
        if len(found) > 1
        for request_id in owners[handoff]
    }
    breaches = [
        f"{request_id}: traces {_listed(found)}"
        for request_id, found in traces.items()
        if len(found) > 1 and (request_id in torn or found & rootless)
    ]
    return _rule("one_trace", "the spans of a request are in one trace", len(traces), breaches)


def _roles(timelines: Sequence[Timeline]) -> Rule:
    def breach(timeline: Timeline) -> str | None:
        expected = _expected_roles(timeline)
        missing = {role.service_name for role in expected - timeline.roles}
        return f"no span of {_listed(missing)}" if missing else None

    return _each("roles", "every process that took part left spans", timelines, breach)


def _expected_roles(timeline: Timeline) -> set[Role]:
    if timeline.outcome is not Outcome.COMPLETED:
        return {Role.GATEWAY}
    if timeline.mode is Mode.COLOCATED:
        return {Role.GATEWAY, Role.WORKER}
    if timeline.output_tokens is not None and timeline.output_tokens <= 1:
        return {Role.GATEWAY, Role.PREFILL}  # nothing to decode
    return {Role.GATEWAY, Role.PREFILL, Role.TRANSFER, Role.DECODE}


def _complete(timelines: Sequence[Timeline]) -> Rule:
    def breach(timeline: Timeline) -> str | None:
        # Where the root is missing a stage says so.
        spans = (timeline.attributes, *(visit.attributes for visit in timeline.visits))
        reason = next((why for one in spans if (why := text(one, a.INCOMPLETE))), None)
        if reason is not None:
            return reason
        return "no outcome" if timeline.root_id and timeline.outcome is None else None

    return _each("complete", "nothing is known to be missing", timelines, breach)


def _lost_requests(timelines: Sequence[Timeline], processes: Sequence[ProcessHealth]) -> Rule:
    """A request is lost also if a gateway was left to say that it failed: with the process of one
    of its stages, or with one that had it open though no stage of its own had begun."""
    vanished = [process for process in processes if process.ended is WriterEnd.LOST]

    def breach(timeline: Timeline) -> str | None:
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

    return _each("lost", "no request lost a process that served it", timelines, breach)


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
