"""How far rules look back and how long they wait. Pure.

Rules name nominal durations (`5m`); `Timing` says what they are in a file. Tests against running
programs shrink them, so that a day's rule can fire within a minute, by the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def seconds(text: str) -> int:
    """`90s`, `5m`, `6h`, `3d` in seconds."""
    return int(text[:-1]) * _UNITS[text[-1]]


def duration(total_s: int) -> str:
    """The shortest way to write it."""
    for unit in ("d", "h", "m"):
        if total_s and total_s % _UNITS[unit] == 0:
            return f"{total_s // _UNITS[unit]}{unit}"
    return f"{total_s}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """
    scale         what every nominal duration is multiplied by
    least_s       shortest window: four scrapes, so that a rate has samples
    least_hold_s  shortest wait, of what waits at all
    interval      between two evaluations, nominal
    """

    scale: float = 1.0
    least_s: int = 20
    least_hold_s: int = 1
    interval: str = "30s"

    def window(self, nominal: str) -> str:
        """How far back a rate looks."""
        return duration(max(self.least_s, round(seconds(nominal) * self.scale)))

    def hold(self, nominal: str) -> str:
        """How long a condition has to hold; may be nothing."""
        nominal_s = seconds(nominal)
        return duration(nominal_s and max(self.least_hold_s, round(nominal_s * self.scale)))

    @property
    def every(self) -> str:
        """From one evaluation to the next, a second at least: 0 would be Prometheus's default."""
        return duration(max(1, round(seconds(self.interval) * self.scale)))


NOMINAL = Timing()
