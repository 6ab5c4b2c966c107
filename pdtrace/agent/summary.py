"""What an agent has done: its totals, for the log, for `--json`, for /health and /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class AgentSummary:
    """Totals of one agent's life.

    incomplete   requests whose root, or else first span, says `pd.incomplete`
    spans        of requests; `steps` are forward passes that became spans of their own, and
                 `steps_left_out` those that would have, beyond the limit per second
    missed       records overwritten before they were read
    late         marks of requests that were finished already
    unnamed      marks whose request is not known
    evicted      requests finished early because too many were open
    stuck        requests reported as stuck
    errors       faults that cost a request's spans or verdict, and unreadable rings
    lines_lost   requests that could not be written to the files
    rings_deleted finished rings deleted, their requests delivered
    open         requests in flight at the end; the next agent with the same `out` goes on
    export       what became of the spans, as `pdtrace.export.delivery` counts it
    """

    rings: int = 0
    records: int = 0
    requests: int = 0
    incomplete: int = 0
    spans: int = 0
    steps: int = 0
    steps_left_out: int = 0
    missed: int = 0
    torn: int = 0
    late: int = 0
    unnamed: int = 0
    evicted: int = 0
    overgrown: int = 0
    stuck: int = 0
    errors: int = 0
    lines_lost: int = 0
    rings_deleted: int = 0
    open: int = 0
    export: Mapping[str, int] = field(default_factory=dict[str, int])

    def line(self) -> str:
        """One line for the log."""
        export = "".join(
            f", {count} {name.replace('_', ' ')}"
            for name, count in self.export.items()
            if name != "lines_lost"
        )
        return (
            f"{self.requests} requests ({self.incomplete} incomplete, {self.stuck} stuck, "
            f"{self.open} still open), "
            f"{self.spans} spans of {self.rings} rings; {self.records} records, {self.missed} "
            f"missed, {self.torn} torn, {self.late} late, {self.unnamed} without request; "
            f"{self.lines_lost} lines lost, {self.errors} errors{export}"
        )
