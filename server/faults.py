"""Fault hooks: which stages of one request are delayed, by how much, and whether they still are.

Owns the header's syntax and the arithmetic of a hold; knows nothing of clocks, queues or messages.
Only a server started with `--allow-faults` reads the header.

    X-PD-Faults: decode.reserve=800, transfer=250        milliseconds per stage
"""

from __future__ import annotations

from collections.abc import Mapping

from pdtrace.stages import CHAINS
from server.errors import InvalidRequest

HEADER = "x-pd-faults"
MAX_DELAY_MS = 60_000
NS_PER_MS = 1_000_000

FAULT_STAGES: frozenset[str] = frozenset(
    stage.name for chain in CHAINS.values() for stage in chain
) | {"decode.gap"}
"""Stages that can be delayed: every chain stage, and the gap between two tokens."""


def parse_faults(header: str) -> dict[str, int]:
    """Stage → delay in milliseconds, in the header's order.

    Raises InvalidRequest for an unknown or repeated stage and for a delay that is no whole number
    of milliseconds in 0 … MAX_DELAY_MS.
    """
    faults: dict[str, int] = {}
    for part in header.split(","):
        entry = part.strip()
        if not entry:
            continue
        stage, separator, value = (piece.strip() for piece in entry.partition("="))
        if not separator:
            raise _invalid(f"{entry!r} is not of the form stage=milliseconds")
        if stage not in FAULT_STAGES:
            raise _invalid(f"stage {stage!r} is unknown, expected one of {sorted(FAULT_STAGES)}")
        if stage in faults:
            raise _invalid(f"stage {stage!r} is named twice")
        # Longer digit strings cannot be in range; int() of a huge one would be slow.
        if not (value.isascii() and value.isdigit() and len(value) <= 9):
            raise _invalid(f"delay {value[:20]!r} of {stage} is not a whole number of milliseconds")
        delay_ms = int(value)
        if delay_ms > MAX_DELAY_MS:
            raise _invalid(f"delay of {stage} is {delay_ms} ms, the limit is {MAX_DELAY_MS} ms")
        faults[stage] = delay_ms
    return faults


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(f"{HEADER}: {message}", param=HEADER, code="invalid_faults")


class FaultHolds:
    """The holds of one request: each stage is held once, from the first time it is asked about."""

    __slots__ = ("_delays_ns", "_until_ns")

    def __init__(self, faults: Mapping[str, int]) -> None:
        self._delays_ns = {
            stage: delay_ms * NS_PER_MS for stage, delay_ms in faults.items() if delay_ms > 0
        }
        self._until_ns: dict[str, int] = {}

    def held(self, stage: str, now_ns: int) -> bool:
        """Whether `stage` is still to be held at `now_ns`; the first call starts its hold."""
        delay_ns = self._delays_ns.pop(stage, None) if self._delays_ns else None
        if delay_ns is not None:
            self._until_ns[stage] = now_ns + delay_ns
        return now_ns < self._until_ns.get(stage, now_ns)

    def release_due(self, now_ns: int) -> None:
        """Forget the holds that are over, so that `next_release_ns` lies ahead."""
        for stage in [s for s, until_ns in self._until_ns.items() if until_ns <= now_ns]:
            del self._until_ns[stage]

    @property
    def next_release_ns(self) -> int | None:
        """When the earliest running hold ends; None when nothing is held."""
        return min(self._until_ns.values(), default=None) if self._until_ns else None
