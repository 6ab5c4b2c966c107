"""How fast do KV pages move, against a plain memory copy of the same bytes?

    python -m benchmarks.bench_kv_copy [--json] [--rounds N] [--mib 1,8,64]

Both pools lie in shared memory and are mapped as the transfer process maps them. Each round copies
the same bytes in every way, in an order drawn anew: with one memcpy from pool to pool, with the
shared-memory transfer (pages in a row, the same without verifying, and every page somewhere else),
and with the TCP transfer to a second process on loopback, which verifies and confirms. A copy is
timed from `submit` to its `Copied` event, so small copies show what a copy job costs beside its
bytes.

Ratios are memcpy's time over the transfer's: the median of those taken within one round, and best
round against best round. Where the calling thread does all the work (memcpy, shared memory) they
compare its CPU time, so that waiting for a core on a busy machine does not count; for TCP, where
two processes work, elapsed time. GB/s is by elapsed time. With --json the last line is an object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from server.kv.layout import KvLayout
from server.kv.pool import KvPool, PoolDescriptor
from server.kv.transfer.base import Copied, KvTransfer, PageCopy
from server.kv.transfer.shm import ShmTransfer
from server.kv.transfer.tcp import TcpTransfer
from server.wire.messages import PoolRef

# Pages of 512 KiB: they divide the sizes, and the default model's pages have 720 KiB.
LAYOUT = KvLayout(num_layers=32, num_kv_heads=2, head_dim=64, page_size=16, dtype="float32")
MIB = 2**20
SECRET = bytes(32)
SOURCE = PoolRef(owner="prefill-0", incarnation="1")
DESTINATION = PoolRef(owner="decode-0", incarnation="1")
MIN_SECONDS = 0.01  # per way and round: small copies are repeated


@dataclass(slots=True)
class Way:
    """A way to copy. Seconds per copy, one for each round.

    elsewhere   whether other threads or processes do a part of the work
    """

    name: str
    copy: Callable[[], object]
    elsewhere: bool = False
    elapsed: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])

    def run(self, repeats: int) -> None:
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        for _ in range(repeats):
            self.copy()
        self.cpu.append((time.thread_time() - cpu_begin) / repeats)
        self.elapsed.append((time.perf_counter() - begin) / repeats)

    def against(self, base: Way) -> tuple[list[float], float]:
        """Ratios per round, and best to best: 1 is as fast as `base`."""
        ours, theirs = (self.elapsed, base.elapsed) if self.elsewhere else (self.cpu, base.cpu)
        ratios = [b / w for b, w in zip(theirs, ours, strict=True)]
        return ratios, min(theirs) / min(ours)


def address_of(pool: KvPool) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pool.memory))


def transfer_way(
    name: str,
    transfer: KvTransfer,
    source_pages: Sequence[int],
    destination_pages: Sequence[int],
    address: str | None = None,
) -> Way:
    count = 0

    def copy() -> None:
        nonlocal count
        count += 1
        transfer.submit(
            PageCopy(
                handoff_id=f"{name}-{count}",
                index=0,
                source=SOURCE,
                source_pages=source_pages,
                destination=DESTINATION,
                destination_pages=destination_pages,
                address=address,
            )
        )
        events = transfer.poll(1.0)
        while not events:
            events = transfer.poll(1.0)
        assert isinstance(events[0], Copied), f"{name}: {events[0]}"

    return Way(name, copy, elsewhere=address is not None)


def receive(pool: PoolDescriptor, pipe: Connection) -> None:
    """The destination host's transfer process, until `pipe` says stop."""
    transfer = TcpTransfer("127.0.0.1:0", secret=SECRET)
    transfer.register(DESTINATION, pool)
    pipe.send(transfer.address)
    while not pipe.poll():
        transfer.poll(0.2)
    transfer.close()


@contextmanager
def receiver(pool: PoolDescriptor) -> Generator[str]:
    """A receiving process; yields its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(pool, theirs))
    process.start()
    yield ours.recv()
    ours.send(None)
    process.join(10)


def measure(num_bytes: int, rounds: int) -> list[Way]:
    num_pages = num_bytes // LAYOUT.page_bytes
    pages = list(range(num_pages))
    shuffled = random.Random(1).sample(pages, num_pages)
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        source, destination = (
            KvPool.create(
                Path(directory, ref.owner), owner=ref.owner, layout=LAYOUT, num_pages=num_pages
            )
            for ref in (SOURCE, DESTINATION)
        )
        source.memory[:] = os.urandom(MIB) * (num_bytes // MIB)
        shm, unverified = ShmTransfer(), ShmTransfer(verify=False)
        tcp = TcpTransfer("127.0.0.1:0", secret=SECRET)
        for transfer in (shm, unverified, tcp):
            transfer.register(SOURCE, source.descriptor)
        for transfer in (shm, unverified):
            transfer.register(DESTINATION, destination.descriptor)
        to, origin = address_of(destination), address_of(source)
        with receiver(destination.descriptor) as address:
            ways = [
                Way("memcpy", lambda: ctypes.memmove(to, origin, num_bytes)),
                transfer_way("shm, pages in a row", shm, pages, pages),
                transfer_way("shm, not verified", unverified, pages, pages),
                transfer_way("shm, pages scattered", shm, pages, shuffled),
                transfer_way("tcp, pages in a row", tcp, pages, pages, address),
            ]
            for way in ways:  # page tables, connection, TCP windows
                way.copy()
            started = time.perf_counter()
            ways[0].copy()
            repeats = max(1, round(MIN_SECONDS / (time.perf_counter() - started)))
            for _ in range(rounds):
                for way in random.sample(ways, len(ways)):
                    way.run(repeats)
            for way in (ways[1], ways[2], ways[4]):
                destination.memory[:] = bytes(num_bytes)
                way.copy()
                assert source.memory == destination.memory, f"{way.name}: other bytes arrived"
        for transfer in (shm, unverified, tcp):
            transfer.close()
        source.close()
        destination.close()
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="an object as the last line")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", default="1,8,64", help="sizes in MiB, separated by commas")
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    print(f"{'size':>8}  {'way':<22} {'GB/s':>6}  {'of memcpy':>9}  {'best to best':>12}")
    for mib in (int(part) for part in options.mib.split(",")):
        ways = measure(mib * MIB, options.rounds)
        base = ways[0]
        for way in ways:
            ratios, best = way.against(base)
            rate = mib * MIB / statistics.median(way.elapsed) / 1e9
            ratio = statistics.median(ratios)
            print(f"{mib:>4} MiB  {way.name:<22} {rate:>6.2f}  {ratio:>9.0%}  {best:>12.0%}")
            results.append(
                {
                    "mib": mib,
                    "way": way.name,
                    "gb_per_s": round(rate, 3),
                    "of_memcpy": round(ratio, 3),
                    "of_memcpy_rounds": [round(value, 3) for value in ratios],
                    "best_of_best_memcpy": round(best, 3),
                }
            )
    if options.json:
        print(
            json.dumps(
                {
                    "benchmark": "kv_copy",
                    "machine": platform.processor() or platform.machine(),
                    "cpus": os.cpu_count(),
                    "page_bytes": LAYOUT.page_bytes,
                    "rounds": options.rounds,
                    "results": results,
                }
            )
        )


if __name__ == "__main__":
    main()
