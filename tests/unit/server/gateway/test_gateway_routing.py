"""Which pair is chosen, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gateway.pairing import Refusal
from server.gateway.routing import (
    ClusterSnapshot,
    PairChoice,
    Policy,
    PrefixIndex,
    RouteRequest,
    RouterState,
    WorkerSnapshot,
    choose_pair,
    count_pairs,
    misfits,
    page_hashes,
    refusals,
)
from server.kv.layout import KvLayout
from server.wire.messages import Peer, WorkerLoad

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=16, dtype="float32")
PROMPT = RouteRequest(prompt_ids=tuple(range(100)), max_tokens=10)


def worker(name: str, *, total: int = 100, free: int = 100, **fields: Any) -> WorkerSnapshot:
    values: dict[str, Any] = {
        "peer": Peer(instance=name, endpoint=f"ipc://{name}", incarnation=f"{name}-1"),
        "fingerprint": "f",
        "layout": LAYOUT,
        "load": WorkerLoad(pages_total=total, pages_free=free, queued_tokens=0),
        **fields,
    }
    return WorkerSnapshot(**values)


def cluster(prefill: int = 2, decode: int = 2) -> ClusterSnapshot:
    return ClusterSnapshot(
        prefill=tuple(worker(f"p{i}") for i in range(prefill)),
        decode=tuple(worker(f"d{i}") for i in range(decode)),
    )


def names(choice: PairChoice | None) -> tuple[str, str]:
    assert choice is not None
    return choice.prefill.peer.instance, choice.decode.peer.instance


def choices(
    snapshot: ClusterSnapshot, policy: Policy, count: int, request: RouteRequest = PROMPT
) -> list[tuple[str, str]]:
    state, chosen = RouterState(), list[tuple[str, str]]()
    for _ in range(count):
        choice = choose_pair(snapshot, request, policy, state)
        assert choice is not None
        state.record(choice, request, policy)
        chosen.append(names(choice))
    return chosen


@pytest.mark.parametrize("policy", list(Policy))
def test_nobody_is_chosen_from_nothing(policy: Policy) -> None:
    for snapshot in (cluster(0, 0), cluster(1, 0), cluster(0, 1)):
        assert choose_pair(snapshot, PROMPT, policy, RouterState()) is None
        assert count_pairs(snapshot) == 0


@pytest.mark.parametrize("policy", list(Policy))
def test_only_workers_that_fit_together_are_paired(policy: Policy) -> None:
    other_layout = msgspec.structs.replace(LAYOUT, page_size=32)
    snapshot = ClusterSnapshot(
        prefill=(worker("p0", fingerprint="x"), worker("p1"), worker("p2", layout=other_layout)),
        decode=(worker("d0", fingerprint="y"), worker("d1"), worker("d2", fingerprint="x")),
    )
    assert set(choices(snapshot, policy, 12)) <= {("p0", "d2"), ("p1", "d1")}
    choice = choose_pair(snapshot, PROMPT, policy, RouterState())
    assert choice is not None
    assert choice.candidates == count_pairs(snapshot) == 2


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 4)])
def test_round_robin_uses_every_pair_equally(prefill: int, decode: int) -> None:
    counts = Counter(choices(cluster(prefill, decode), Policy.ROUND_ROBIN, prefill * decode * 3))
    assert len(counts) == prefill * decode
    assert set(counts.values()) == {3}


@pytest.mark.parametrize("policy", [Policy.LEAST_LOADED, Policy.PREFIX_AWARE])
def test_equal_workers_share_the_work(policy: Policy) -> None:
    request = RouteRequest(prompt_ids=(1, 2, 3), max_tokens=1)
    chosen = choices(cluster(), policy, 8, request)
    assert Counter(p for p, _ in chosen) == {"p0": 4, "p1": 4}
    assert Counter(d for _, d in chosen) == {"d0": 4, "d1": 4}


def test_least_loaded_looks_at_tokens_for_prefill_and_pages_for_decode() -> None:
    snapshot = ClusterSnapshot(
        prefill=(
            worker("p0", load=WorkerLoad(queued_tokens=500)),
            worker("p1", pending_tokens=300),
            worker("p2", load=WorkerLoad(queued_tokens=200), pending_tokens=400),
        ),
        decode=(worker("d0", free=40), worker("d1", promised_pages=30), worker("d2", free=60)),
    )
    choice = choose_pair(snapshot, PROMPT, Policy.LEAST_LOADED, RouterState())
    assert names(choice) == ("p1", "d1")
    assert choice is not None
    assert "300 tokens queued" in choice.reason
    assert "30% of pages" in choice.reason


def test_decode_without_room_for_the_prompt_is_the_last_choice() -> None:
    snapshot = ClusterSnapshot(
        prefill=(worker("p0"),),
        decode=(worker("d0", total=8, free=6), worker("d1", total=100, free=50)),
    )
    assert names(choose_pair(snapshot, PROMPT, Policy.LEAST_LOADED, RouterState()))[1] == "d1"


def test_prefix_goes_where_it_was_computed_until_that_costs_more() -> None:
    state = RouterState()
    first = choose_pair(cluster(), PROMPT, Policy.PREFIX_AWARE, state)
    assert first is not None
    state.record(first, PROMPT, Policy.PREFIX_AWARE)
    home = first.prefill.peer.instance
    longer = RouteRequest(prompt_ids=(*PROMPT.prompt_ids, 7, 8), max_tokens=1)
    again = choose_pair(cluster(), longer, Policy.PREFIX_AWARE, state)
    assert again is not None
    assert again.prefill.peer.instance == home
    assert "96 prompt tokens cached" in again.reason

    def with_queue(tokens: int) -> ClusterSnapshot:
        prefill = [worker("p0"), worker("p1")]
        position = int(home[1:])
        prefill[position] = worker(home, pending_tokens=tokens)
        return ClusterSnapshot(prefill=tuple(prefill), decode=(worker("d0"),))

    kept = choose_pair(with_queue(95), longer, Policy.PREFIX_AWARE, state)
    left = choose_pair(with_queue(97), longer, Policy.PREFIX_AWARE, state)
    assert names(kept)[0] == home
    assert names(left)[0] != home
    assert left is not None
    assert f"prefix of 96 on {home}" in left.reason


def test_restarted_worker_has_no_prefixes() -> None:
    state = RouterState()
    choice = choose_pair(cluster(1, 1), PROMPT, Policy.PREFIX_AWARE, state)
    assert choice is not None
    state.record(choice, PROMPT, Policy.PREFIX_AWARE)
    peer = Peer(instance="p0", endpoint="ipc://p0", incarnation="p0-2")
    snapshot = ClusterSnapshot(prefill=(worker("p0", peer=peer),), decode=(worker("d0"),))
    again = choose_pair(snapshot, PROMPT, Policy.PREFIX_AWARE, state)
    assert again is not None
    assert "cached" not in again.reason
    state.forget("p0-1")
    assert state.prefixes == {}


def test_colocated_worker_is_both() -> None:
    workers = (worker("w0", pending_tokens=9), worker("w1"))
    snapshot = ClusterSnapshot(prefill=workers, decode=workers, colocated=True)
    for policy in (Policy.LEAST_LOADED, Policy.PREFIX_AWARE):
        assert names(choose_pair(snapshot, PROMPT, policy, RouterState())) == ("w1", "w1")
    assert choices(snapshot, Policy.ROUND_ROBIN, 2) == [("w0", "w0"), ("w1", "w1")]


def test_choosing_changes_nothing() -> None:
    state = RouterState()
    for policy in Policy:
        choose_pair(cluster(), PROMPT, policy, state)
    assert state == RouterState()


@given(st.lists(st.integers(0, 3), max_size=70), st.integers(0, 70))
def test_page_hash_covers_everything_before_it(token_ids: list[int], cut: int) -> None:
    hashes = page_hashes(token_ids, 16)
    assert len(hashes) == len(token_ids) // 16
    assert page_hashes(token_ids[:cut], 16) == hashes[: min(cut, len(token_ids)) // 16]
    if len(token_ids) >= 16:
        changed = [token_ids[0] + 1, *token_ids[1:]]
        assert not set(page_hashes(changed, 16)) & set(hashes)


def test_prefix_index_is_bounded_and_forgets_tails_first() -> None:
    index = PrefixIndex(max_pages=4)
    first = page_hashes(range(64), 16)
    index.add(first)
    index.add(page_hashes(range(1000, 1032), 16))
    assert len(index) == 4
    assert index.matched_pages(first) == 2


@pytest.mark.parametrize("policy", list(Policy))
def test_refused_pair_is_never_chosen_and_others_are(policy: Policy) -> None:
    full = cluster()
    snapshot = ClusterSnapshot(
        prefill=full.prefill, decode=full.decode, refused=frozenset({("p0-1", "d0-1")})
    )
    assert set(choices(snapshot, policy, 24)) <= {("p0", "d1"), ("p1", "d0"), ("p1", "d1")}
    assert count_pairs(snapshot) == 3
    reason = Refusal(prefill="p0", decode="d0", reason="protocol 1 against 2")
    assert refusals(snapshot, {("p0-1", "d0-1"): reason}) == [reason]
    assert misfits(snapshot, {("p0-1", "d0-1"): reason}) == {}


def test_worker_that_fits_nobody_is_named_with_a_reason() -> None:
    snapshot = ClusterSnapshot(
        prefill=(worker("p0"), worker("p1", fingerprint="x")), decode=(worker("d0"),)
    )
    (refusal,) = refusals(snapshot, {})
    assert (refusal.prefill, refusal.decode) == ("p1", "d0")
    assert misfits(snapshot, {}) == {"p1": refusal}


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(
    ("avoid", "expected"),
    [
        ({"p0-1"}, {("p1", "d0"), ("p1", "d1")}),
        ({"p0-1", "d0-1"}, {("p1", "d1")}),
        ({"p0-1", "p1-1"}, {("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")}),
        ({"p0-1", "p1-1", "d0-1"}, {("p0", "d1"), ("p1", "d1")}),
    ],
)
def test_workers_on_which_an_attempt_failed_are_the_last_choice(
    policy: Policy, avoid: set[str], expected: set[tuple[str, str]]
) -> None:
    request = RouteRequest(prompt_ids=(1, 2, 3), max_tokens=1, avoid=frozenset(avoid))
    chosen = set(choices(cluster(), policy, 24, request))
    assert chosen == expected if policy is Policy.ROUND_ROBIN else chosen <= expected


def test_only_others_will_do_where_the_same_would_end_the_same_way() -> None:
    request = RouteRequest(prompt_ids=(1,), max_tokens=1, avoid=frozenset({"d0-1"}), elsewhere=True)
    assert names(choose_pair(cluster(1, 2), request, Policy.LEAST_LOADED, RouterState()))[1] == "d1"
    assert choose_pair(cluster(2, 1), request, Policy.LEAST_LOADED, RouterState()) is None


def test_pool_that_can_never_hold_the_request_is_not_chosen() -> None:
    snapshot = ClusterSnapshot(
        prefill=(worker("p0", total=6, free=6), worker("p1", total=7, free=0)),
        decode=(
            worker("d0", total=7, free=7),
            worker("d1", total=8, free=0),
            worker("d2", total=0),
        ),
    )
    fits = RouteRequest(prompt_ids=tuple(range(112)), max_tokens=1)
    grows = RouteRequest(prompt_ids=tuple(range(112)), max_tokens=2)
    policy = Policy.ROUND_ROBIN
    assert set(choices(snapshot, policy, 9, fits)) == {("p1", "d0"), ("p1", "d1"), ("p1", "d2")}
    assert set(choices(snapshot, policy, 9, grows)) == {("p1", "d1"), ("p1", "d2")}
