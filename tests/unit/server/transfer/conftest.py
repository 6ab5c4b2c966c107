"""Transfer processes over scripted transfers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server.kv.transfer.memory import Script, copy_all
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
