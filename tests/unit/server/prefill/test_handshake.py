"""What the two legs of a handoff compare before anything moves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.engine.fake import FakeModel
from server.kv.layout import KvLayout
from server.prefill.handshake import find_mismatch
from server.wire.messages import HANDOFF_PROTOCOL, PagesReserved, Peer, PoolRef

MODEL = FakeModel()
LAYOUT = MODEL.layout(16)


def other_layout(**changes: Any) -> KvLayout:
    return msgspec.structs.replace(LAYOUT, **changes)


def mismatch(**changes: Any) -> str | None:
    values: dict[str, Any] = {
        "handoff_id": "h",
        "decode": Peer(instance="decode-0", endpoint="ipc://d", incarnation="d"),
        "fingerprint": MODEL.info.fingerprint,
        "layout": LAYOUT,
        "pool": PoolRef(owner="decode-0", incarnation="d"),
        "pages": (1, 2),
        "transfer_address": None,
        **changes,
    }
    return find_mismatch(PagesReserved(**values), info=MODEL.info, layout=LAYOUT, num_pages=2)


def test_legs_that_say_the_same_fit() -> None:
    assert mismatch() is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"protocol": HANDOFF_PROTOCOL + 1},
            f"handoff protocol: prefill has {HANDOFF_PROTOCOL}, "
            f"decode-0 has {HANDOFF_PROTOCOL + 1}",
        ),
        (
            {"fingerprint": "f" * 40},
            f"model fingerprint: prefill has {MODEL.info.fingerprint[:16]}, "
            f"decode-0 has {'f' * 16}",
        ),
        (
            {"layout": other_layout(page_size=32)},
            "KV layout, prefill against decode-0: page_size 16 against 32",
        ),
        (
            {"layout": other_layout(dtype="bfloat16")},
            f"KV layout, prefill against decode-0: dtype {LAYOUT.dtype} against bfloat16",
        ),
        ({"pages": (1,)}, "pages: the prompt has 2, decode-0 reserved 1"),
    ],
)
def test_what_differs_is_named_with_both_values(changes: dict[str, Any], sentence: str) -> None:
    assert mismatch(**changes) == sentence


def test_legs_of_two_protocols_are_not_compared_further() -> None:
    """What another protocol means by a layout is not known."""
    found = mismatch(protocol=HANDOFF_PROTOCOL + 1, layout=other_layout(page_size=32))
    assert found is not None
    assert found.startswith("handoff protocol")
