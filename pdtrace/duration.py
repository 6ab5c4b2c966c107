"""How durations and counts are written for people: one form everywhere."""

from __future__ import annotations


def seconds_text(ns: float) -> str:
    """Nanoseconds in three significant digits with the unit that fits: `12.3 ms`, `3.40 s`."""
    if ns < 0:
        return f"-{seconds_text(-ns)}"
    if ns == 0:
        return "0 s"
    for limit, unit, size in ((1e3, "ns", 1), (1e6, "µs", 1e3), (1e9, "ms", 1e6)):
        if ns < limit * 0.9995:
            return f"{_three_digits(ns / size)} {unit}"
    if ns < 1e12:
        return f"{_three_digits(ns / 1e9)} s"
    return f"{ns / 1e9:,.0f} s"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"
