"""When a stage counts as having stalled a request. Pure.

Owns the outlier rule and its numbers; usual times come from `pdtrace.analysis.baselines`, what
follows from the rule is `pdtrace.analysis.verdict`'s.

The rule: a stage has stalled a request if its excess over its usual time

- is at least `floor_s`, and at least `spreads` times its peers' spread,
- is at least `share` of the whole request, and
- makes the stage at least `ratio` times as long as usual.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdtrace.analysis.baselines import Leaf, Usual


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictPolicy:
    """When an excess counts as a stall. Raises ValueError for values out of range.

    floor_s        seconds; shorter excesses never count
    spreads        how many of its peers' spreads an excess must reach
    share          part of the request, 0 to 1, that an excess must make up
    ratio          how many times its usual time the stage must take
    enough_peers   with fewer peers a verdict's confidence is low
    """

    floor_s: float = 0.3
    spreads: float = 4.0
    share: float = 0.25
    ratio: float = 1.5
    enough_peers: int = 5

    def __post_init__(self) -> None:
        if self.floor_s < 0 or self.spreads < 0 or not 0 <= self.share <= 1 or self.ratio < 1:
            raise ValueError(
                f"{self}: floor_s and spreads must be 0 or more, share 0 to 1, ratio 1 or more"
            )
        if self.enough_peers < 1:
            raise ValueError(f"enough_peers is {self.enough_peers}; it must be 1 or more")


DEFAULT_POLICY = VerdictPolicy()


@dataclass(frozen=True, slots=True)
class Assessment:
    """One judged leaf. `usual` is None without peers; `stalled` says it passes the rule."""

    leaf: Leaf
    usual: Usual | None
    stalled: bool

    @property
    def excess_ns(self) -> int:
        """Nanoseconds above the usual time; 0 without peers or below it."""
        return 0 if self.usual is None else max(0, self.leaf.ns - round(self.usual.ns))


def assess(leaf: Leaf, usual: Usual | None, total_ns: int, policy: VerdictPolicy) -> Assessment:
    """Judge one leaf of a request that took `total_ns`; `usual` is None without peers."""
    if usual is None:
        return Assessment(leaf, None, stalled=False)
    excess = leaf.ns - usual.ns
    stalled = (
        excess > 0
        and excess >= policy.floor_s * 1e9
        and excess >= policy.spreads * usual.spread_ns
        and excess >= policy.share * total_ns
        and leaf.ns >= policy.ratio * usual.ns
    )
    return Assessment(leaf, usual, stalled)
