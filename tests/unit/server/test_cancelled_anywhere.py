"""A client that leaves, whichever worker has its request: all legs have stopped and let go within a
second, and the same request may come again at once. The real gateway, workers and transfer process
in fake time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace.ring.records import MarkRecord
from pdtrace.stages import CHAINS, Mark, Mode, Outcome, Role
from server.config import COLOCATED, Deadlines
from server.injection.fault import Corrupt, Damage, Fault, Freeze, name_of
from tests.support.whole_server import WholeServer, scarce_settings

STOPPED_S = 1.0
LATER_MS = 60_000
"""Nothing goes on by itself: neither what is held, nor because a deadline passes."""
PATIENT = Deadlines(drain_s=LATER_MS / 1000)
MODES = {
    Mode.PD: scarce_settings(deadlines=PATIENT),
    Mode.PD_EARLY: scarce_settings(deadlines=PATIENT, first_token="prefill"),
    Mode.COLOCATED: scarce_settings(deadlines=PATIENT, mode=COLOCATED, workers=2),
}
WORKERS = {Mode.COLOCATED: {Role.WORKER}}
HOLDS: list[tuple[Mode, Fault]] = [
    *(
        (mode, Freeze(stage=stage.name, ms=LATER_MS))
        for mode in MODES
        for stage in CHAINS[mode]
        if stage.roles & WORKERS.get(mode, {Role.PREFILL, Role.DECODE, Role.TRANSFER})
    ),
    (Mode.PD, Corrupt(copy=Damage.NEVER)),
]
PROMPT = [(3 + 7 * i) % 200 for i in range(13)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("mode", "hold"), HOLDS, ids=[f"{mode}-{getattr(h, 'stage', 'copy')}" for mode, h in HOLDS]
)
def test_legs_stop_within_a_second_and_the_same_id_is_served_at_once(
    tmp_path: Path, mode: Mode, hold: Fault, stream: bool
) -> None:
    server = WholeServer(tmp_path, MODES[mode])
    try:
        for _ in range(30):  # everybody hears of everybody
            server.turn(ms=50.0)
        injectors = [process.injector for process in server.processes.values()]
        for injector in injectors:
            injector.arm([hold])
        left = server.ask(PROMPT, 6, stream=stream)
        server.run(until=lambda: any(i.injected[name_of(hold)] for i in injectors), limit_s=10.0)
        left.left.set()
        server.loop.settle()
        server.run(until=lambda: not server.what_is_open(), limit_s=STOPPED_S, turn_ms=10.0)
        assert endings(server) == [(Outcome.CANCELLED, "client")]
        server.check()
        assert not left.ended

        server.clear_faults()
        again = server.ask(PROMPT, 6, stream=stream, request_id=left.request_id)
        server.run(until=lambda: not server.what_is_open(), limit_s=10.0)
        assert endings(server) == [(Outcome.COMPLETED, None)]
        server.check()
        assert (again.status, again.text) == (200, again.right_text)
    finally:
        server.close()


def endings(server: WholeServer) -> list[tuple[object, object]]:
    """Outcomes that the gateway has recorded since the last look, and by whom each was."""
    gateway = server.gateway
    assert gateway is not None
    return [
        (record.values[0], record.values[2])
        for record in server.rings.records(Role.GATEWAY, gateway.cluster.me.incarnation)
        if isinstance(record, MarkRecord) and record.mark is Mark.COMPLETED
    ]
