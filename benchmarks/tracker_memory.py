"""How much does a request in flight cost the agent, and how long is a look at all of them?

    python -m benchmarks.tracker_memory [--json] [--requests N]

Real recorders write the typical marks of requests that are held up in prefill.queue (gateway 5,
decode 2, prefill 2 and a wait) to rings, real readers read them, one tracker keeps them: once
for the memory that the process grows by and for the times, once for the bytes that Python's
allocator hands out, which tracemalloc counts. With --json the last line is an object.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdtrace import Mark, Recorder, RequestContext, Role, WaitReason
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.ring.layout import RingCapacity
from pdtrace.ring.reader import RingReader

ROLES = (Role.GATEWAY, Role.DECODE, Role.PREFILL)
STAGE = "prefill.queue"
BATCH = 2_000
RING_BYTES = 1_000
"""More than what one process writes of a request."""
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Cost:
    """Of `requests` in flight at once.

    bytes_per_request     by Python's allocator, without what it leaves unused
    resident_per_request  by which the process grew
    feed_us               reading and following, per request
    in_flight_ms          a look at all of them
    finished_us           asking what is finished while nothing changed
    """

    requests: int
    bytes_per_request: float
    resident_per_request: float
    feed_us: float
    in_flight_ms: float
    finished_us: float


def measure(requests: int) -> Cost:
    """Holds `requests` in one tracker. Raises RuntimeError if one is lost or misplaced."""
    with tempfile.TemporaryDirectory() as directory:
        # In a process of its own: what recorders remember is not the tracker's.
        child = multiprocessing.get_context("spawn").Process(
            target=_record_all, args=(directory, requests)
        )
        child.start()
        child.join()
        if child.exitcode:
            raise RuntimeError(f"recording failed with exit code {child.exitcode}")
        tracker = RequestTracker()
        gc.collect()
        resident = _resident_bytes()
        feed_s = _seconds(lambda: _feed(tracker, directory))
        resident = _resident_bytes() - resident
        allocated = _allocated(directory)
    now_ns = time.monotonic_ns()
    tracker.finished(now_ns)
    finished_s = _seconds(lambda: tracker.finished(now_ns))
    in_flight_s = _seconds(lambda: tracker.in_flight(now_ns))
    seen = tracker.in_flight(now_ns)
    stages = {request.stage for request in seen}
    if len(seen) != requests or stages != {STAGE} or any(request.wait is None for request in seen):
        raise RuntimeError(f"expected {requests} requests waiting in {STAGE}, got {stages}")
    return Cost(
        requests=requests,
        bytes_per_request=allocated / requests,
        resident_per_request=resident / requests,
        feed_us=feed_s / requests * 1e6,
        in_flight_ms=in_flight_s * 1e3,
        finished_us=finished_s * 1e6,
    )


def _allocated(directory: str) -> int:
    """Bytes that a tracker holds which was fed the rings of `directory`."""
    tracker = RequestTracker()
    tracemalloc.start()
    try:
        _feed(tracker, directory)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _record_all(directory: str, requests: int) -> None:
    block_bytes = RingCapacity().block_bytes
    capacity = RingCapacity(blocks=max(4, requests * RING_BYTES // block_bytes))
    recorders = [
        Recorder.open(
            directory, role=role, instance=f"{role.value}-0", capacity=capacity, budget=None
        )
        for role in ROLES
    ]
    for number in range(requests):
        _record(recorders, number)
    os._exit(0)  # as a crash would: the requests stay in flight


def _record(recorders: Sequence[Recorder], number: int) -> None:
    context = RequestContext.create()
    gateway, decode, prefill = (recorder.begin(context) for recorder in recorders)
    gateway.mark(Mark.RECEIVED, "POST", "/v1/chat/completions", "chat")
    gateway.mark(Mark.TOKENIZED, "SmolLM2-135M-Instruct", 300 + number % 900, 400, True, "pd")
    gateway.mark(Mark.ADMITTED, number % 512)
    gateway.mark(Mark.ROUTED, "prefill-0", "decode-0", "least_loaded", 4, "fewest waiting tokens")
    gateway.mark(Mark.DISPATCHED)
    decode.mark(Mark.RESERVE_RECEIVED)
    decode.mark(Mark.PAGES_RESERVED, 40 + number % 60, number % 4096)
    prefill.mark(Mark.PREFILL_RECEIVED)
    prefill.mark(Mark.HANDSHAKE_DONE, 40 + number % 60)
    prefill.wait(
        STAGE,
        WaitReason.TOKEN_BUDGET,
        needed=300 + number % 900,
        free=number % 512,
        limit=4096,
        position=number,
        blocker=f"req-{number:024x}",
    )


def _feed(tracker: RequestTracker, directory: str) -> None:
    now_ns = time.monotonic_ns()
    readers = {path.name: RingReader(path) for path in sorted(Path(directory).glob("*.ring"))}
    for name, reader in readers.items():
        tracker.add_ring(name, process_of(reader.identity, {}))
    records = 1
    while records:
        records = 0
        for name, reader in readers.items():
            batch = reader.read(limit=BATCH)
            tracker.feed(name, batch, now_ns)
            records += len(batch)
    for reader in readers.values():
        if reader.missed:
            raise RuntimeError(f"a ring was overwritten: {reader.missed} records")
        reader.close()


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args(argv)
    if options.requests < 100:
        parser.error(f"--requests takes 100 or more, got {options.requests}")
    cost = measure(options.requests)
    print(
        f"{cost.requests:,} requests in flight: {cost.bytes_per_request:,.0f} bytes each "
        f"(at most {MAX_BYTES:,} wanted), {cost.resident_per_request:,.0f} resident; "
        f"a look at all of them {cost.in_flight_ms:,.0f} ms, at what is finished "
        f"{cost.finished_us:,.0f} µs"
    )
    if options.json:
        print(json.dumps(asdict(cost)))
    return 0 if cost.bytes_per_request <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
