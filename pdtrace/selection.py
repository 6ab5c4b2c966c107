"""Which requests a user means: by an id or the beginning of one, the slowest, those in flight.

Owns matching and where to look: in the traces first, then in the rings of their run, which also
hold what has no trace yet. Output and exit codes are `pdtrace.cli`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdtrace.assembly import assemble
from pdtrace.collected import CollectedRequest
from pdtrace.errors import LiveError
from pdtrace.inflight import InFlight, Look
from pdtrace.live import RingLooks
from pdtrace.spans import Trace
from pdtrace.timeline import Timeline, build_timeline
from pdtrace.top import ordered, standing_of

MAX_PEERS = 500
"""Finished requests out of rings that usual times are learnt from, where there are no traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """What the rings of some runs hold.

    in_flight  the worst first
    finished   the latest that the rings hold, with or without a trace
    standing   what holds of the process that has to go on, by root span id
    problems   what could not be read
    """

    in_flight: tuple[Timeline, ...] = ()
    finished: tuple[Timeline, ...] = ()
    standing: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    problems: tuple[str, ...] = ()


def read_rings(runs: Iterable[Path], *, only: int | None = None) -> Rings:
    """Read the rings of run directories. Runs without rings hold nothing.

    only  requests to describe that were not answered, the worst first; None: whatever is open
    """
    in_flight: list[Timeline] = []
    finished: list[Timeline] = []
    standing: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for run in runs:
        try:
            looks = RingLooks(run, keep=True)
        except LiveError:
            continue
        try:
            look = looks.look()
            wanted = ordered(look.requests)
            if only is not None:
                wanted = [request for request in wanted if request.ended is None][:only]
            by_root = {r.root_span_id: r for r in looks.find(w.root_span_id for w in wanted)}
            for request in wanted:
                timeline = _timeline(by_root.get(request.root_span_id))
                if timeline is not None:
                    in_flight.append(timeline)
                    standing[request.root_span_id] = _standing(request, look)
            finished += filter(None, map(_timeline, looks.kept()[-MAX_PEERS:]))
            problems += look.problems
        finally:
            looks.close()
    return Rings(
        in_flight=tuple(in_flight),
        finished=tuple(finished),
        standing=standing,
        problems=tuple(problems),
    )


def _timeline(request: CollectedRequest | None) -> Timeline | None:
    spans = assemble(request) if request is not None else []
    return build_timeline(Trace(trace_id=spans[0].trace_id, spans=spans)) if spans else None


def _standing(request: InFlight, look: Look) -> tuple[str, ...]:
    """On the process that has to end the stage, and on workers of the request that are gone."""
    names = {request.worker, request.prefill_worker, request.decode_worker} - {None}
    sentences = [
        sentence
        for process in look.processes
        if process.instance in names and (sentence := standing_of(process))
    ]
    return tuple(dict.fromkeys(sentences))


def slowest(timelines: Sequence[Timeline], count: int) -> list[Timeline]:
    """The longest requests, the longest first."""
    return sorted(timelines, key=lambda t: (-t.total_ns, t.request_id or "", t.trace_id))[:count]


def exactly(timelines: Sequence[Timeline], wanted: str) -> list[Timeline]:
    """Requests with that request id, else root span id, else trace id in long or short form."""
    return _first_match(timelines, _exact_tests(wanted))


def beginning(timelines: Sequence[Timeline], wanted: str) -> list[Timeline]:
    """Requests with an id that begins so."""
    low = wanted.lower()
    return _first_match(
        timelines,
        (
            lambda t: (
                (t.request_id or "").startswith(wanted)
                or t.trace_id.startswith(low)
                or t.trace_id.lstrip("0").startswith(low)
            ),
        ),
    )


_Test = Callable[[Timeline], bool]


def _exact_tests(wanted: str) -> tuple[_Test, ...]:
    low = wanted.lower()
    padded = low.removeprefix("0x").zfill(32)
    return (
        lambda t: t.request_id == wanted,
        lambda t: t.root_id == low,
        lambda t: t.trace_id == padded,
    )


def _first_match(timelines: Sequence[Timeline], tests: Iterable[_Test]) -> list[Timeline]:
    for test in tests:
        if found := [timeline for timeline in timelines if test(timeline)]:
            return found
    return []


def unseen(timelines: Iterable[Timeline], known: Iterable[Timeline]) -> list[Timeline]:
    """Those of `timelines` that are not among `known`."""
    keys = {timeline.key for timeline in known}
    return [timeline for timeline in timelines if timeline.key not in keys]
