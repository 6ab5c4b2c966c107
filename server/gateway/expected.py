"""The processes that report to the gateway, as far as the settings tell.

Others may come: another host's, or a stranger's.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdtrace.stages import Role
from server.config import COLOCATED, Settings


def expected_processes(settings: Settings) -> Mapping[str, int]:
    """How many of each role."""
    if settings.mode == COLOCATED:
        return {Role.WORKER: settings.workers}
    return {
        Role.PREFILL: settings.prefill,
        Role.TRANSFER: 2 if settings.transfer == "tcp" else 1,
        Role.DECODE: settings.decode,
    }


def expected_instances(settings: Settings) -> frozenset[str]:
    """Their names, as `server.plan` gives them."""
    counts = expected_processes(settings)
    return frozenset(f"{role}-{index}" for role in counts for index in range(counts[role]))
