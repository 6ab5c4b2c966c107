"""Which workers do not fit together, and how that is said."""

from __future__ import annotations

import msgspec

from server.gateway.pairing import MAX_REMEMBERED, RefusedPairs, conflict_of
from server.wire.messages import Peer
from tests.unit.server.gateway.test_gateway_routing import LAYOUT, worker


def peer(name: str) -> Peer:
    return Peer(instance=name, endpoint=f"ipc://{name}", incarnation=f"{name}-1")


def test_conflict_names_both_values() -> None:
    assert conflict_of(worker("p0"), worker("d0")) is None
    other_model = conflict_of(
        worker("p0", fingerprint="a" * 40), worker("d0", fingerprint="b" * 40)
    )
    assert other_model == f"model fingerprint {'a' * 16} against {'b' * 16}"
    layout = msgspec.structs.replace(LAYOUT, page_size=32, dtype="bfloat16")
    assert conflict_of(worker("p0"), worker("d0", layout=layout)) == (
        "KV layout: page_size 16 against 32, dtype float32 against bfloat16"
    )


def test_refusal_lasts_until_one_of_the_two_starts_again() -> None:
    refused = RefusedPairs()
    refused.add(peer("p0"), peer("d0"), "protocol 1 against 2")
    refused.add(peer("p0"), peer("d1"), "protocol 1 against 3")
    refused.add(peer("p1"), peer("d1"), "protocol 2 against 3")
    assert refused.reasons["p0-1", "d0-1"].sentence == "p0 with d0: protocol 1 against 2"
    refused.forget("d1-1")
    assert list(refused.reasons) == [("p0-1", "d0-1")]
    refused.forget("p0-1")
    refused.forget("p0-1")
    assert len(refused) == 0


def test_refusals_are_bounded() -> None:
    refused = RefusedPairs()
    for number in range(MAX_REMEMBERED + 5):
        refused.add(peer("p0"), peer(f"d{number}"), "x")
    assert len(refused) == MAX_REMEMBERED
    assert ("p0-1", "d0-1") not in refused.reasons
