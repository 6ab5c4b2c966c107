"""Faults for a running server of a test, and waiting until they have acted."""

from __future__ import annotations

import time
from collections import Counter

from server.injection.client import FaultClient
from server.injection.fault import Damage, Fault, name_of
from server.injection.injector import Injector
from server.kv.transfer.base import PageCopy
from server.kv.transfer.memory import Abort, Delay, Fate, Script, copy_all
from server.wire.messages import FaultReport
from tests.support.server import RunningServer

WAIT_S = 60.0


def scripted(injector: Injector, script: Script = copy_all) -> Script:
    """What a `MemoryTransfer` does where `injector` damages copies, and else `script` decides."""

    def decide(copy: PageCopy) -> Fate | Delay | Abort:
        match injector.copy(copy.handoff_id, copy.index):
            case Damage.SHORT:
                return Fate.SHORT
            case Damage.ALTERED:
                return Fate.CORRUPT
            case Damage.NEVER:
                return Fate.LOSE
            case None:
                return script(copy)

    return decide


def inject(server: RunningServer, *faults: Fault) -> dict[str, FaultReport]:
    """Arm `faults` in addition to what is armed; the reports by instance. Every process answers."""
    with FaultClient(server.run_dir) as client:
        return _tell(client, *faults)


def clear(server: RunningServer) -> dict[str, FaultReport]:
    """Disarm everything and let go of what is held."""
    with FaultClient(server.run_dir) as client:
        return _tell(client, clear=True)


def injected(server: RunningServer, *, at: str | None = None) -> Counter[str]:
    """How often each fault has acted so far, by name, in one instance or in all together."""
    with FaultClient(server.run_dir) as client:
        return _counts(client, at)


def wait_injected(
    server: RunningServer, fault: Fault | str, times: int = 1, *, at: str | None = None
) -> None:
    """Return when the fault, or the one of that name, has acted `times` times since the start."""
    name = fault if isinstance(fault, str) else name_of(fault)
    end_s = time.monotonic() + WAIT_S
    with FaultClient(server.run_dir) as client:
        while (counts := _counts(client, at))[name] < times:
            assert time.monotonic() < end_s, f"{name} did not act {times} times: {dict(counts)}"
            time.sleep(0.05)


def _counts(client: FaultClient, at: str | None) -> Counter[str]:
    total: Counter[str] = Counter()
    for instance, report in _tell(client).items():
        if at in (None, instance):
            total.update(report.injected)
    return total


def _tell(client: FaultClient, *faults: Fault, clear: bool = False) -> dict[str, FaultReport]:
    reports = client.tell(faults, clear=clear, timeout_s=WAIT_S)
    silent = [instance for instance, report in reports.items() if report is None]
    assert not silent, f"{silent} did not answer"
    return {instance: report for instance, report in reports.items() if report is not None}
