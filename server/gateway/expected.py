"""The processes that report to the gateway, as far as the settings tell.

Others may come: another host's, or a stranger's.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

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
    return frozenset(name for names in _names(settings).values() for name in names)


def missing_processes(settings: Settings, heard: Set[str]) -> Mapping[str, int]:
    """How many of each role are not among those `heard` of, by name: a stranger takes nobody's
    place."""
    missing = {role: len(names - heard) for role, names in _names(settings).items()}
    return {role: count for role, count in missing.items() if count}


def _names(settings: Settings) -> Mapping[str, Set[str]]:
    return {
        role: {f"{role}-{index}" for index in range(count)}
        for role, count in expected_processes(settings).items()
    }
