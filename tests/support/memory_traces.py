"""Spans of what processes recorded into rings in memory, as an agent would assemble them."""

from __future__ import annotations

from pdtrace.assembly.request_spans import assemble
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.ring.records import Record
from pdtrace.spans import Span
from pdtrace.testing import MemoryRings

LONG_NS = 1 << 60
"""When everybody has had the time to say more."""


def spans_by_request(rings: MemoryRings) -> dict[str, list[Span]]:
    """Spans of every request whose records were not read before, root first, by request id.

    Fails if one of them is not over.
    """
    records: dict[str, list[Record]] = {}
    tracker = RequestTracker()
    for identity, record in rings.read():
        if identity.instance not in records:
            records[identity.instance] = []
            tracker.add_ring(identity.instance, process_of(identity, {}))
        records[identity.instance].append(record)
    for ring, read in records.items():
        tracker.feed(ring, read, 0)
    finished = tracker.finished(LONG_NS)
    assert tracker.num_open == 0, tracker.open_ids()
    return {request.request_id: list(assemble(request)) for request in finished}
