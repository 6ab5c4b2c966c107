"""GET /health: whether every process of the server makes progress, and which does not.

Owns the verdict; where it comes from is `registry`. Health is about progress, not about load: a
server that refuses work because it is full is healthy, and so is one that a process left because it
was told to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdtrace.stages import Role
from server.gateway.expected import missing_processes
from server.gateway.pairing import Refusal
from server.gateway.registry import MemberReport, MemberState

if TYPE_CHECKING:
    from server.gateway.pipeline import Gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """`missing`: processes that never announced themselves, by role. `refused`: pairs of workers
    that are ready and do not fit together; others may serve. `recorded`: whether what the gateway
    does is."""

    gateway: str
    members: Sequence[MemberReport]
    refused: Sequence[Refusal]
    missing: Mapping[str, int]
    stopping: bool
    recorded: bool

    @property
    def healthy(self) -> bool:
        lacking = any(member.lacking for member in self.members)
        return not lacking and not self.missing and not self.stopping

    def body(self) -> dict[str, Any]:
        """JSON body of GET /health."""
        return {
            "status": "ok" if self.healthy else "unhealthy",
            "processes": [
                {
                    "instance": self.gateway,
                    "role": Role.GATEWAY.value,
                    "state": MemberState.DRAINING if self.stopping else MemberState.READY,
                    "last_progress_age_s": 0.0,  # it has just handled this request
                    "reason": "is shutting down" if self.stopping else None,
                    "recorded": self.recorded,
                },
                *(
                    {
                        "instance": member.instance,
                        "role": member.role,
                        "state": member.state,
                        "last_progress_age_s": round(member.progress_age_s, 3),
                        "reason": member.reason,
                        "recorded": member.recorded,
                    }
                    for member in self.members
                ),
                *(
                    {
                        "instance": f"{count} more",
                        "role": role,
                        "state": "missing",
                        "last_progress_age_s": None,
                        "reason": "has not announced itself",
                        "recorded": None,
                    }
                    for role, count in self.missing.items()
                ),
            ],
            "refused_pairs": [
                {"prefill": pair.prefill, "decode": pair.decode, "reason": pair.reason}
                for pair in self.refused
            ],
        }


def health_of(gateway: Gateway) -> HealthReport:
    """The report of this instant."""
    members = gateway.cluster.reports()
    return HealthReport(
        gateway=gateway.cluster.me.instance,
        members=members,
        refused=gateway.cluster.refusals(),
        missing=missing_processes(gateway.settings, {member.instance for member in members}),
        stopping=gateway.stopping,
        recorded=gateway.recorded,
    )
