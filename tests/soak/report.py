"""What a soak found, and whether it is good enough. Pure.

Owns the limits; knows nothing of how the numbers came about.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.soak.answers import End, Ended
from tests.soak.watch import Use

MORE_FILES = 12
MORE_THREADS = 3
MORE_RSS_BYTES = 80 << 20
"""What a process may use at the end beyond what it, or its predecessor, used at rest before."""
BROKEN_WITHIN_S = 12.0
"""A connection may break so long after its gateway was told to stop: it has streams to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One fault. `recovery_s`: until a request had its answer that began after it; None: never."""

    at_s: float
    kind: str
    what: str
    recovery_s: float | None


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything that a soak found.

    ignored       messages without effect, by series of the gateway's metrics
    before        what processes used at rest before anything happened
    traced        request ids in the recording
    without_end   those of them whose end it does not tell
    unexplained   what else it lacks without saying why
    """

    seed: int
    seconds: float
    run_dir: str
    requests: Sequence[Ended]
    happened: Sequence[Happened] = ()
    gateway_ends_s: Sequence[float] = ()
    not_idle: Sequence[str] = ()
    pages_leaked: Mapping[str, int] = field(default_factory=dict[str, int])
    damage: Sequence[str] = ()
    ignored: Mapping[str, float] = field(default_factory=dict[str, float])
    wrong_afterwards: Sequence[str] = ()
    before: Mapping[str, Use] = field(default_factory=dict[str, Use])
    after: Mapping[str, Use] = field(default_factory=dict[str, Use])
    exit_code: int | None = None
    traced: frozenset[str] = frozenset()
    without_end: Sequence[str] = ()
    unexplained: Sequence[str] = ()
    load_errors: str = ""

    @property
    def outcomes(self) -> Counter[str]:
        """Requests by end, failures and refusals with their code."""
        return Counter(f"{r.end}{f' {r.code}' if r.code else ''}" for r in self.requests)

    @property
    def wrong(self) -> list[Ended]:
        return [request for request in self.requests if request.wrong]

    @property
    def stuck(self) -> list[Ended]:
        return [request for request in self.requests if request.end is End.STUCK]

    @property
    def untraced(self) -> list[str]:
        """Requests that were answered and of which the recording knows nothing."""
        return [
            request.request_id
            for request in self.requests
            if request.status is not None and request.request_id not in self.traced
        ]

    @property
    def broken_for_nothing(self) -> list[Ended]:
        """Connections that broke though no gateway ended in their time."""
        return [
            request
            for request in self.requests
            if request.end is End.BROKEN
            and not any(
                request.begun_s - BROKEN_WITHIN_S <= end_s <= request.ended_s
                for end_s in self.gateway_ends_s
            )
        ]

    def grown(self) -> list[str]:
        """Processes that use more at the end than at the beginning, at rest both times."""
        found: list[str] = []
        for name, now in self.after.items():
            then = self.before.get(name)
            if then is None:
                continue
            for what, before, after, more in (
                ("open files", then.files, now.files, MORE_FILES),
                ("threads", then.threads, now.threads, MORE_THREADS),
                ("bytes of memory", then.rss_bytes, now.rss_bytes, MORE_RSS_BYTES),
            ):
                if after > before + more:
                    found.append(f"{name}: {before} {what} before, {after} afterwards")
        return found

    def failures(self) -> list[str]:
        """Why the soak failed; empty when it did not."""
        found: list[str] = []

        def expect_none(what: str, those: Sequence[object]) -> None:
            if those:
                examples = "; ".join(str(each) for each in those[:3])
                found.append(f"{len(those)} {what}: {examples}")

        expect_none("wrong outputs", [f"{r.request_id} {r.wrong}" for r in self.wrong])
        expect_none("wrong outputs afterwards", self.wrong_afterwards)
        expect_none("stuck requests", [r.request_id for r in self.stuck])
        expect_none("connections broke for nothing", self.broken_for_nothing)
        expect_none("pools with leaked pages", [f"{k}: {v}" for k, v in self.pages_leaked.items()])
        expect_none("signs of damage", self.damage)
        expect_none("things were not at rest at the end", self.not_idle)
        expect_none(
            "faults without recovery", [h.what for h in self.happened if h.recovery_s is None]
        )
        expect_none("processes have grown", self.grown())
        expect_none("answered requests without a trace", self.untraced)
        expect_none("recorded requests without an end", self.without_end)
        expect_none("rules that the recording breaks without a cause", self.unexplained)
        if not any(request.end is End.COMPLETED for request in self.requests):
            found.append("no request was completed")
        if self.exit_code != 0:
            found.append(f"the server ended with exit code {self.exit_code}")
        if self.load_errors:
            found.append(f"the load said: {self.load_errors[-500:]}")
        return found

    def recovery(self) -> dict[str, tuple[int, float, float]]:
        """Per kind of fault: how many, and the median and the longest recovery in seconds."""
        by_kind: dict[str, list[float]] = {}
        for each in self.happened:
            if each.recovery_s is not None:
                by_kind.setdefault(each.kind, []).append(each.recovery_s)
        return {
            kind: (len(times), statistics.median(times), max(times))
            for kind, times in sorted(by_kind.items())
        }

    def document(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "run_dir": self.run_dir,
            "ok": not self.failures(),
            "failures": self.failures(),
            "requests": dict(sorted(self.outcomes.items())),
            "wrong_outputs": len(self.wrong) + len(self.wrong_afterwards),
            "stuck_requests": len(self.stuck),
            "pages_leaked": sum(self.pages_leaked.values()),
            "ignored": dict(self.ignored),
            "traced": len(self.traced),
            "untraced": len(self.untraced),
            "unexplained": list(self.unexplained),
            "faults": [asdict(each) for each in self.happened],
            "recovery_s": {
                kind: {"faults": count, "median": median, "longest": longest}
                for kind, (count, median, longest) in self.recovery().items()
            },
            "before": {name: asdict(use) for name, use in self.before.items()},
            "after": {name: asdict(use) for name, use in self.after.items()},
        }

    def show(self, console: Console) -> None:
        """Tables, and the verdict."""
        requests = _table("requests", "number")
        for name, count in sorted(self.outcomes.items()):
            requests.add_row(name, str(count))
        requests.add_row("together", str(len(self.requests)))
        console.print(requests)
        if self.happened:
            recovery = _table("faults", "number", "until the next answer: median", "longest")
            for kind, (count, median, longest) in self.recovery().items():
                recovery.add_row(kind, str(count), f"{median:.2f} s", f"{longest:.2f} s")
            console.print(recovery)
        use = _table("process", "memory", "threads", "open files")
        for name, now in sorted(self.after.items()):
            then = self.before.get(name, now)
            use.add_row(
                name,
                f"{then.rss_bytes >> 20} → {now.rss_bytes >> 20} MiB",
                f"{then.threads} → {now.threads}",
                f"{then.files} → {now.files}",
            )
        console.print(use)
        traced = len(self.requests) - len(self.untraced)
        must = _table("must be", "found")
        must.add_row("0 pages leaked", str(sum(self.pages_leaked.values())))
        must.add_row("0 stuck requests", str(len(self.stuck)))
        must.add_row("0 wrong outputs", str(len(self.wrong) + len(self.wrong_afterwards)))
        must.add_row("0 answered requests without a trace", str(len(self.untraced)))
        must.add_row("0 rules of the recording broken without a cause", str(len(self.unexplained)))
        console.print(must)
        console.print(f"{len(self.traced)} requests recorded, {traced} of {len(self.requests)} ok")
        for failure in self.failures():
            console.print(f"[red]failed[/]: {failure}", soft_wrap=True)
        if not self.failures():
            console.print("[green]ok[/]")


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name)
    return table
