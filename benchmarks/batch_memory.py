"""What do `pdtrace slo` and `check` cost per request, in time and in memory, over many requests?

    python -m benchmarks.batch_memory [--json] [--requests N [N …]] [--pdtrace DIR]

Requests are recorded by the ordinary recorders (those of `benchmarks.agent_throughput`: 29 spans,
29 kB), assembled, and written as an agent writes them: a line each, a file per thousand. Each
command then reads the first N of them in a process of its own.

    slo         with its own limits, which the requests keep as far as that is recorded
    check       all rules
    slo missed  with limits that all of them miss: each is looked at a second time

Time is CPU time of that process. Its peak of memory is what the system says; `added` is by how much
that grew since the size before, for each further request. With --json the last line is an object.
--pdtrace runs the commands of another checkout on the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.agent_throughput import Traffic
from pdtrace.assembly.request_spans import assemble
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.otlp.json_lines import encode_line
from pdtrace.ring import RingReader, scan_rings

SIZES = (1_000, 10_000, 100_000)
PER_FILE = 1_000
SLICE = 100
BATCH = 2_000
MAX_ADDED_BYTES = 1_024
CASES = {
    "slo": ("slo",),
    "check": ("check",),
    "slo missed": ("slo", "--ttft", "0.001", "--e2e", "0.001"),
}
# The system counts what a process's parent had in memory to its peak, but not this.
WATCHED = """
import re, runpy, sys
from pathlib import Path
sys.path.insert(0, "")
try:
    runpy.run_module("pdtrace", run_name="__main__", alter_sys=True)
finally:
    status = Path("/proc/self/status").read_text()
    print(re.search("VmHWM:[^0-9]*([0-9]+) kB", status)[1], file=sys.stderr)
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one command over `requests`.

    peak_bytes   largest resident size of the process
    added_bytes  per request more than at the size before; None for the first
    """

    case: str
    requests: int
    cpu_ms_per_request: float
    wall_s: float
    peak_bytes: int
    added_bytes: float | None


def write_recording(folder: Path, requests: int) -> None:
    """Files of PER_FILE requests each. Raises RuntimeError if one is lost on the way."""
    with tempfile.TemporaryDirectory() as rings:
        traffic = Traffic(Path(rings))
        tracker = RequestTracker()
        readers = {path.name: RingReader(path) for path in scan_rings(rings)}
        for name, reader in readers.items():
            tracker.add_ring(name, process_of(reader.identity, {}))
        for number in range(requests // PER_FILE):
            lines: list[bytes] = []
            for _ in range(PER_FILE // SLICE):
                traffic.record(SLICE)
                now_ns = time.monotonic_ns()
                for name, reader in readers.items():
                    while batch := reader.read(limit=BATCH):
                        tracker.feed(name, batch, now_ns)
                lines += [encode_line(assemble(one)) for one in tracker.finished(now_ns)]
            if len(lines) != PER_FILE:
                raise RuntimeError(f"{len(lines)} requests were finished, {PER_FILE} recorded")
            (folder / f"spans-{number:06d}.jsonl").write_bytes(b"".join(lines))
        for reader in readers.values():
            reader.close()
        traffic.close()


def run(case: str, recording: Path, requests: int, before: Cost | None, pdtrace: Path) -> Cost:
    """Raises RuntimeError if the command has not looked at all requests."""
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(recording.iterdir())[: requests // PER_FILE]:
            os.link(path, Path(folder) / path.name)
        command = [sys.executable, "-c", WATCHED, *CASES[case], "--from", folder, "--json"]
        begun, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=pdtrace, capture_output=True, text=True, check=False)
        wall_s, until = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    looked_at = json.loads(done.stdout)["requests"]
    if looked_at != requests:
        raise RuntimeError(f"{case} looked at {looked_at} requests of {requests}")
    peak = int(done.stderr.splitlines()[-1]) * 1024
    cpu_s = until.ru_utime + until.ru_stime - used.ru_utime - used.ru_stime
    added = None if before is None else (peak - before.peak_bytes) / (requests - before.requests)
    return Cost(
        case=case,
        requests=requests,
        cpu_ms_per_request=cpu_s / requests * 1e3,
        wall_s=wall_s,
        peak_bytes=peak,
        added_bytes=added,
    )


def measure(sizes: Sequence[int], pdtrace: Path) -> list[Cost]:
    """Every case at every size."""
    costs: list[Cost] = []
    # Beside the system's other temporary files: it takes 29 kB for each request.
    with tempfile.TemporaryDirectory() as folder:
        write_recording(Path(folder), max(sizes))
        before: dict[str, Cost] = {}
        for requests in sizes:
            for case in CASES:
                cost = run(case, Path(folder), requests, before.get(case), pdtrace)
                before[case] = cost
                costs.append(cost)
                print(sentence(cost), flush=True)
    return costs


def sentence(cost: Cost) -> str:
    added = "" if cost.added_bytes is None else f", {cost.added_bytes:,.0f} bytes a request added"
    return (
        f"{cost.case:<10} {cost.requests:>9,} requests: {cost.cpu_ms_per_request:.2f} ms each, "
        f"{cost.wall_s:,.1f} s in all; peak {cost.peak_bytes / 1e6:,.0f} MB{added}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--requests", type=int, nargs="+", default=SIZES, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--pdtrace", type=Path, default=Path(), metavar="DIR", help="checkout to run; default: this"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args(argv)
    sizes = sorted(options.requests)
    if any(size < PER_FILE or size % PER_FILE for size in sizes):
        parser.error(f"--requests takes multiples of {PER_FILE}, got {sizes}")
    costs = measure(sizes, options.pdtrace)
    for case in CASES:
        of_case = [cost for cost in costs if cost.case == case]
        first, last = of_case[0], of_case[-1]
        print(
            f"{case}: {last.requests / first.requests:,.0f} times the requests take "
            f"{last.peak_bytes / first.peak_bytes:.2f} times the memory and "
            f"{last.cpu_ms_per_request / first.cpu_ms_per_request:.2f} times the time for each"
        )
    if options.json:
        print(json.dumps({"costs": [asdict(cost) for cost in costs]}))
    largest = [cost for cost in costs if cost.requests == sizes[-1]]
    return 1 if any((cost.added_bytes or 0) > MAX_ADDED_BYTES for cost in largest) else 0


if __name__ == "__main__":
    sys.exit(main())
