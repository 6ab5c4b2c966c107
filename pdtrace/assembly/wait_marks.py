"""What WAITING marks say on the span of the stage that waited. Pure.

Owns the events for the changes, the attributes of the reason that was in force longest, and the
links to the requests in the way. Which span that is, is the assemblers' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdtrace import semconv as a
from pdtrace.assembly.collected import CollectedRequest
from pdtrace.assembly.drafts import Marked, mark_attributes
from pdtrace.assembly.evidence import blocker_names, place_of
from pdtrace.spans import AttrValue, Event, Link
from pdtrace.stages import Mark

MAX_WAIT_EVENTS = 64
"""Wait records shown as events on one span; more are counted in `pd.wait.changes`."""

MAX_BLOCKER_LINKS = 8

_REASON_AT = place_of(Mark.WAITING, a.WAIT_REASON)


class ToldWaits(NamedTuple):
    """Events and attributes for one span."""

    events: tuple[Event, ...]
    attributes: dict[str, AttrValue]


def tell_waits(
    waits: Sequence[Marked], begin_ns: int, end_ns: int, wall_offset_ns: int
) -> ToldWaits:
    """What the waits of one stage say, in the order of their times.

    begin_ns, end_ns  of the stage
    wall_offset_ns    from the waits' clock to Unix time
    """
    longest = waits[0] if len(waits) == 1 else _longest(waits, begin_ns, end_ns)
    shown = waits[:MAX_WAIT_EVENTS]
    carried = [mark_attributes(wait) for wait in shown]
    events = tuple(
        [
            Event("pd.wait", wait.t_ns + wall_offset_ns, attributes)
            for wait, attributes in zip(shown, carried, strict=True)
        ]
    )
    attributes = carried[0].copy() if longest is shown[0] else mark_attributes(longest)
    attributes.pop(a.WAIT_STAGE.key, None)
    if len(waits) > len(shown):
        attributes[a.WAIT_CHANGES.key] = len(waits)
    return ToldWaits(events, attributes)


def blocker_links(request: CollectedRequest, marks: Iterable[Marked]) -> tuple[Link, ...]:
    """Links to the requests that WAITING and TOKEN_GAP marks name, as far as they are known."""
    blockers = request.blockers
    if not blockers:
        return ()
    names = dict.fromkeys([name for at in marks for name in blocker_names(at.mark, at.values)])
    known = [blockers[name] for name in names if name in blockers]
    return tuple(
        [
            Link(trace_id, span_id, {"pd.link": "blocked_by"})
            for trace_id, span_id in known[:MAX_BLOCKER_LINKS]
            if trace_id != request.trace_id
        ]
    )


def _longest(waits: Sequence[Marked], begin_ns: int, end_ns: int) -> Marked:
    """Of the reason that was in force longest, the mark that was."""
    in_force: dict[str, int] = {}
    longest: dict[str, tuple[int, Marked]] = {}
    until = [wait.t_ns for wait in waits[1:]] + [end_ns]
    for wait, until_ns in zip(waits, until, strict=True):
        reason = str(wait.values[_REASON_AT] if len(wait.values) > _REASON_AT else None)
        length = max(until_ns - max(wait.t_ns, begin_ns), 0)
        in_force[reason] = in_force.get(reason, 0) + length
        if reason not in longest or length > longest[reason][0]:
            longest[reason] = (length, wait)
    return longest[max(in_force, key=lambda reason: in_force[reason])][1]
