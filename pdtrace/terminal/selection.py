"""Which requests a user means, and what they are compared with.

Owns matching ids and where to look: in the traces first, then in the rings of their runs, which
also hold what has no trace: requests in flight, and those that no agent was there for. Output and
exit codes are `pdtrace.cli`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar

from pdtrace import semconv as a
from pdtrace.analysis.attributes import text
from pdtrace.analysis.requests import Requests, RequestsOfTraces
from pdtrace.analysis.skew import MAX_SKEW_NS
from pdtrace.analysis.sources import (
    NO_QUERY,
    RINGS_FOLDER,
    Recording,
    empty_recording,
    read_sources,
    run_directories,
    shown_run,
)
from pdtrace.analysis.time_range import TraceQuery
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.analysis.trace_store import join_spans
from pdtrace.analysis.waits import describe_wait_now
from pdtrace.assembly.request_spans import assemble
from pdtrace.duration import seconds_text
from pdtrace.errors import PdtraceError, SourceError
from pdtrace.inflight import InFlight
from pdtrace.live.health import ProcessHealth, RunHealth, read_health
from pdtrace.live.looks import RingLooks, is_live
from pdtrace.live.run_looks import RunLooks
from pdtrace.patience import Progress, no_progress
from pdtrace.ring import scan_rings
from pdtrace.ring.losses import WriterEnd
from pdtrace.spans import Span, Trace
from pdtrace.stages import Outcome
from pdtrace.terminal.standings import Standings
from pdtrace.terminal.top import ordered
from pdtrace.terminal.waterfall import LastSigns

MAX_FROM_RINGS = 500
"""Finished requests, the latest, that are taken out of the rings of a run."""


class SelectionError(PdtraceError):
    """Nothing, or more than one request, is what was asked for."""

    code: ClassVar[str] = "no_such_request"


class SeveralRequestsError(SelectionError):
    """An id names several requests."""

    code: ClassVar[str] = "several_requests"

    def __init__(self, wanted: str, found: Sequence[Timeline]) -> None:
        super().__init__(f"{wanted!r} names {len(found)} requests")
        self.found = tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The requests chosen, and what they stand among.

    peers       all finished requests known
    standing    sentences on processes that cannot go on, by root span id: for requests in flight,
                and for those that lost a process that served them
    last_signs  Unix times at which processes that cannot go on last went round, by instance
    notes       sentences that weaken any conclusion
    """

    recording: Recording
    chosen: Sequence[Timeline]
    peers: Sequence[Timeline]
    standing: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    last_signs: LastSigns = field(default_factory=dict[str, Sequence[int]])
    notes: Sequence[str] = ()


def select_slowest(
    sources: Sequence[str | Path],
    count: int,
    *,
    max_skew_ns: int = MAX_SKEW_NS,
    progress: Progress = no_progress,
    query: TraceQuery = NO_QUERY,
) -> Selection:
    """The longest finished requests. Raises SourceError or SelectionError if there are none.

    max_skew_ns  as for `build_timeline`
    """
    recording, requests = finished_requests(
        sources, max_skew_ns=max_skew_ns, progress=progress, query=query
    )
    peers = list(requests)
    chosen = sorted(peers, key=lambda t: (-t.total_ns, t.request_id or "", t.trace_id))[:count]
    health = [read_health(run) for run in run_directories(sources)]
    return Selection(
        recording=recording,
        chosen=chosen,
        peers=peers,
        standing=_vanished(health, chosen),
        last_signs=_last_signs(health),
        notes=_loss_notes(health, chosen),
    )


def finished_requests(
    sources: Sequence[str | Path],
    *,
    max_skew_ns: int = MAX_SKEW_NS,
    progress: Progress = no_progress,
    query: TraceQuery = NO_QUERY,
    watch: Callable[[Trace], None] | None = None,
) -> tuple[Recording, Requests]:
    """All finished requests of the sources; of runs without traces, what their rings still hold.

    max_skew_ns  as for `build_timeline`
    watch        is shown each trace when its requests are gone through

    Raises SourceError or SelectionError if there are none.
    """
    runs = run_directories(sources)
    recording, trouble = _recording(sources, progress, query)
    if trouble is not None:
        rings = _read_rings(runs)
        if not rings.finished:
            raise rings.unreadable(recording.source) or trouble
        return recording, rings.finished
    requests = RequestsOfTraces(
        recording.traces, max_skew_ns=max_skew_ns, progress=progress, watch=watch
    )
    if next(iter(requests), None) is None:
        raise SelectionError(f"{recording.source}: holds no request")
    return recording, requests


def count_in_flight(sources: Sequence[str | Path]) -> int:
    """Requests that were not answered yet, by the rings of runs that processes still write to."""
    runs = [run for run in run_directories(sources) if is_live(run)]
    if not runs:
        return 0
    looks = RingLooks(*runs)
    try:
        return sum(request.ended is None for request in looks.look().requests)
    finally:
        looks.close()


def select_request(
    sources: Sequence[str | Path],
    wanted: str,
    *,
    max_skew_ns: int = MAX_SKEW_NS,
    progress: Progress = no_progress,
    query: TraceQuery = NO_QUERY,
) -> Selection:
    """The one request with that id, or with an id that begins so; finished, or in flight.

    max_skew_ns  as for `build_timeline`

    Raises SelectionError, or SourceError if there was nothing to look through.
    """
    if not wanted.strip():
        raise SelectionError("the id is empty; without an ID the slowest request is shown")
    runs = run_directories(sources)
    recording, trouble = _recording(sources, progress, replace(query, wanted=wanted))
    if trouble is not None and not runs:
        raise trouble
    peers = build_timelines(recording.traces, max_skew_ns=max_skew_ns)
    rings = _Rings()
    found = _exactly(peers, wanted)
    # An id that comes again may be in flight now.
    if not found or any(map(is_live, runs)):
        rings = _read_rings(runs)
        known = {timeline.key for timeline in peers}
        peers += [timeline for timeline in rings.finished if timeline.key not in known]
        in_flight = [timeline for timeline in rings.in_flight if timeline.key not in known]
        everything = [*peers, *in_flight]
        found = _exactly(everything, wanted) or _beginning(everything, wanted)
    if len(found) > 1:
        raise SeveralRequestsError(wanted, found)
    if not found:
        for request in rings.bare:
            if wanted in {request.request_id, request.root_span_id, request.trace_id}:
                raise SelectionError(_bare_sentence(request))
        if not peers and not rings.in_flight:
            failure = rings.unreadable(recording.source) or trouble
            if failure is not None:
                raise failure
        raise SelectionError(_not_found(wanted, recording.source, peers, rings))
    health = [read_health(run) for run in runs]
    return Selection(
        recording=recording,
        chosen=found,
        peers=peers,
        standing={**_vanished(health, found), **rings.standing},
        last_signs=_last_signs(health),
        notes=[*_loss_notes(health, found), *rings.problems],
    )


def select_in_flight(
    sources: Sequence[str | Path], count: int, *, progress: Progress = no_progress
) -> Selection:
    """Unanswered requests, those first that exceed their stage's usual time by most; maybe none.

    Raises SelectionError if no source has rings, SourceError if none of them can be read.
    """
    name = " + ".join(map(shown_run, sources))
    runs = run_directories(sources)
    for source in sources:
        if "://" in str(source):
            raise SelectionError(
                f"{source}: a Jaeger has finished requests only; give a run directory or an agent"
            )
        if str(source) != "-" and not Path(source).exists():
            raise SelectionError(f"{source}: no such directory; give a run directory")
    if not runs:
        raise SelectionError(
            f"{name}: holds no rings, so nothing can be in flight; give a run directory"
        )
    recording, _ = _recording(sources, progress)
    rings = _read_rings(runs, only=count)
    if (failure := rings.unreadable(name)) is not None:
        raise failure
    peers = build_timelines(recording.traces)
    known = {timeline.key for timeline in peers}
    peers += [timeline for timeline in rings.finished if timeline.key not in known]
    chosen = rings.in_flight[:count]
    health = [read_health(run) for run in runs]
    if rings.bare and not chosen:
        raise SelectionError(_bare_sentence(rings.bare[0]))
    return Selection(
        recording=recording,
        chosen=chosen,
        peers=peers,
        standing=rings.standing,
        last_signs=_last_signs(health),
        notes=[
            *_loss_notes(health, chosen),
            *rings.problems,
            *(f"{_bare_sentence(request)}." for request in rings.bare),
        ],
    )


def _recording(
    sources: Sequence[str | Path], progress: Progress, query: TraceQuery = NO_QUERY
) -> tuple[Recording, SourceError | None]:
    """What sources hold; an empty recording, and why, if there is nothing to read. Raises
    SourceError for what this user may not read."""
    try:
        recording = read_sources(sources, progress=progress, query=query)
    except SourceError as error:
        if isinstance(error.__cause__, PermissionError):
            raise  # there is something to read
        return empty_recording(sources), error
    progress(f"comparing {len(recording.traces)} traces", None)
    return recording, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rings:
    """What the rings of runs hold; `in_flight` the worst first.

    num_read  processes whose rings could be read
    bare      requests in flight whose records do not make a timeline any more
    """

    in_flight: Sequence[Timeline] = ()
    finished: Sequence[Timeline] = ()
    standing: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    problems: Sequence[str] = ()
    num_read: int = 0
    bare: Sequence[InFlight] = ()

    def unreadable(self, source: str) -> SourceError | None:
        """Why nothing is known of what is in flight; None where something is, or without rings."""
        if self.num_read or not self.problems:
            return None
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        what = self.problems[0].removesuffix(".")
        return SourceError(f"{source}: what is in flight cannot be told: {what}{more}")


def _read_rings(runs: Sequence[Path], *, only: int | None = None) -> _Rings:
    """Read the rings of run directories; those without rings hold nothing.

    only  requests to describe that were not answered, the worst first; None: whatever is open
    """
    with_rings = [run for run in runs if (run / RINGS_FOLDER).is_dir() or scan_rings(run)]
    if not with_rings:
        return _Rings()
    looks = RingLooks(*with_rings, keep=True)
    try:
        look = looks.look()
        wanted = ordered(look.requests)
        if only is not None:
            wanted = [request for request in wanted if request.ended is None][:only]
        rank = {request.root_span_id: position for position, request in enumerate(wanted)}
        told = {request.root_span_id: request for request in look.requests}
        if len(with_rings) == 1 and any(request.incomplete for request in wanted):
            # An agent that has read all of it knows more of how they stand.
            told.update((r.root_span_id, r) for r in RunLooks(looks).look().requests)
        spans: list[Span] = []
        for collected in (*looks.find(rank), *looks.kept()[-MAX_FROM_RINGS:]):
            spans += assemble(collected)
    finally:
        looks.close()
    standings = Standings(look)
    timelines = build_timelines(join_spans(spans))
    open_ones = [timeline for timeline in timelines if timeline.root_id in rank]
    return _Rings(
        in_flight=sorted(open_ones, key=lambda timeline: rank[timeline.root_id or ""]),
        finished=[timeline for timeline in timelines if timeline.root_id not in rank],
        standing={request.root_span_id: standings.of(request, all_legs=True) for request in wanted},
        problems=[f"{problem}." for problem in look.problems],
        num_read=len(look.processes),
        bare=[told[root] for root in rank if root not in {t.root_id for t in open_ones}],
    )


def _bare_sentence(request: InFlight) -> str:
    """What is known of a request in flight whose records in the rings do not make a picture."""
    text = f"{request.request_id} has been in flight for {_seconds(request.age_s)}"
    if request.stage is not None:
        text += f", in {request.stage} for {_seconds(request.stage_age_s)}"
        text += f" (usual {_seconds(request.usual_s)})" if request.usual_s is not None else ""
    if request.wait is not None:
        text += f": {describe_wait_now(request.wait.stage or request.stage, request.wait)}"
    return text + "; its first records were overwritten in the rings: there is no more to show"


def _seconds(seconds: float) -> str:
    return seconds_text(round(seconds * 1e9))


def _vanished(runs: Sequence[RunHealth], chosen: Sequence[Timeline]) -> dict[str, Sequence[str]]:
    """What the runs know of the processes that requests which did not complete were lost with."""
    ended = [t for t in chosen if not t.open and t.outcome is not Outcome.COMPLETED]
    if not ended:
        return {}
    gone = [process for run in runs for process in run.processes if process.ended is WriterEnd.LOST]
    return {
        timeline.root_id or "": [
            f"{process.vanished}."
            for process in gone
            if timeline.request_id in process.open_ids or _is_lost_with(timeline, process, gone)
        ]
        for timeline in ended
    }


def _is_lost_with(
    timeline: Timeline, process: ProcessHealth, gone: Sequence[ProcessHealth]
) -> bool:
    """Whether a stage was lost with the only vanished process of that name whose requests are not
    all known by id."""
    if process.open_requests <= len(process.open_ids):
        return False
    if sum(other.instance == process.instance for other in gone) > 1:
        return False
    return any(
        visit.outcome is Outcome.LOST
        and process.instance in {text(visit.attributes, a.OUTCOME_BY), visit.instance}
        for visit in timeline.visits
    )


def _last_signs(runs: Iterable[RunHealth]) -> LastSigns:
    signs: defaultdict[str, list[int]] = defaultdict(list)
    for run in runs:
        for process in run.processes:
            if process.last_sign_ns is not None:
                signs[process.instance].append(process.last_sign_ns)
    return signs


def _loss_notes(runs: Iterable[RunHealth], chosen: Sequence[Timeline]) -> list[str]:
    """What the recorders of the chosen requests' processes are known to have lost, ever."""
    instances = {visit.instance for timeline in chosen for visit in timeline.visits}
    return [
        f"{process.instance} {what} in the whole run."
        for run in runs
        for process in run.processes
        if process.instance in instances and (what := process.lost)
    ]


MAX_SHOWN_ID = 64
MAX_COMPARED = 5_000
"""Requests, the latest, that an unknown id is compared with."""


def _not_found(wanted: str, source: str, finished: Sequence[Timeline], rings: _Rings) -> str:
    """What was looked for, where, and what is like it."""
    shown = wanted if len(wanted) <= MAX_SHOWN_ID else f"{wanted[:MAX_SHOWN_ID]}…"
    text = f"no request has an id that begins with {shown!r}: looked through {len(finished)} "
    text += f"finished in {source}"
    text += f" and {len(rings.in_flight)} in flight" if rings.num_read else ""
    both = [*rings.in_flight, *reversed(finished[-MAX_COMPARED:])]
    ids = list(dict.fromkeys(timeline.request_id or timeline.trace_id for timeline in both))
    low = wanted.lower()[:MAX_SHOWN_ID]
    within = [name for name in ids if low in name.lower()]
    alike = get_close_matches(wanted[:MAX_SHOWN_ID], ids, n=3, cutoff=0.7)
    closest = list(dict.fromkeys((*within, *alike)))[:3]
    if closest:
        text += f"; the closest: {', '.join(map(repr, closest))}"
    elif problems := rings.problems:
        text += f"; {problems[0].removesuffix('.')}"
    return text


_Test = Callable[[Timeline], bool]


def _exactly(timelines: Sequence[Timeline], wanted: str) -> list[Timeline]:
    """Requests with that request id, else root span id, else trace id in long or short form."""
    low = wanted.lower()
    padded = low.removeprefix("0x").zfill(32)
    tests: tuple[_Test, ...] = (
        lambda t: t.request_id == wanted,
        lambda t: t.root_id == low,
        lambda t: t.trace_id == padded,
    )
    for test in tests if wanted else ():
        if found := [timeline for timeline in timelines if test(timeline)]:
            return found
    return []


def _beginning(timelines: Sequence[Timeline], wanted: str) -> list[Timeline]:
    """Requests with an id that begins so."""
    low = wanted.lower()
    return [
        t
        for t in timelines
        if wanted
        and (
            (t.request_id or "").startswith(wanted)
            or t.trace_id.startswith(low)
            or t.trace_id.lstrip("0").startswith(low)
        )
    ]
