"""Transfer processes over scripted transfers, and two hosts that copy over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.kv.transfer.memory import Script, copy_all
from tests.support.kv_transfers import TcpHarness
from tests.support.transfer_rig import MakeRig, Rig, new_rig


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(script: Script = copy_all, **options: Any) -> Rig:
        rigs.append(new_rig(script, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.transfer.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[TcpHarness]:
    harness = TcpHarness(tmp_path)
    yield harness
    harness.close()
