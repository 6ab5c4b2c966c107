"""Members' states from heartbeats, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import msgspec

from pdtrace.stages import Role
from server.config import COLOCATED, Settings
from server.engine.fake import FakeModel
from server.gateway.expected import missing_processes
from server.gateway.health import HealthReport
from server.gateway.registry import MAX_STRANGERS, MemberState, Registry, WorkerUse
from server.gateway.routing import count_pairs
from server.wire.messages import Heartbeat, Peer, WorkerLoad

MODEL = FakeModel()
PLAN = [("transfer-0", Role.TRANSFER), ("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)]


def beat(
    name: str, role: Role, *, incarnation: str = "1", seq: int = 1, **fields: Any
) -> Heartbeat:
    values: dict[str, Any] = {
        "peer": Peer(instance=name, endpoint=f"ipc://{name}", incarnation=incarnation),
        "role": role,
        "seq": seq,
        "sent_ns": 0,
        "load": WorkerLoad(pages_total=10, pages_free=10),
        "progress_age_s": 0.0,
        "busy": False,
        "info": None if role is Role.TRANSFER else MODEL.info,
        "layout": None if role is Role.TRANSFER else MODEL.layout(16),
        **fields,
    }
    return Heartbeat(**values)


def registry(*, colocated: bool = False, num_transfers: int = 1) -> Registry:
    return Registry(
        fingerprint=MODEL.info.fingerprint,
        colocated=colocated,
        num_transfers=num_transfers,
        dead_after_s=3.0,
        stalled_after_s=10.0,
        expected={*(name for name, _ in PLAN), "decode-1"},
    )


def full_registry() -> Registry:
    members = registry()
    for name, role in PLAN:
        members.observe(beat(name, role), 0.0)
    return members


def pairs(members: Registry, now_s: float = 0.0) -> int:
    return count_pairs(members.snapshot(now_s, {}))


def state(members: Registry, name: str, now_s: float = 0.0) -> MemberState:
    (report,) = [r for r in members.reports(now_s) if r.instance == name]
    assert (report.reason is None) is (report.state is MemberState.READY)
    return report.state


def test_whole_set_makes_a_pair() -> None:
    assert pairs(full_registry()) == 1
    assert {r.state for r in full_registry().reports(0.0)} == {MemberState.READY}


def test_any_missing_role_makes_none() -> None:
    for missing, _ in PLAN:
        members = registry()
        for name, role in PLAN:
            if name != missing:
                members.observe(beat(name, role), 0.0)
        assert pairs(members) == 0, missing


def test_silent_worker_is_dead_once_and_revives() -> None:
    members = full_registry()
    assert members.newly_dead(3.0) == []
    for name, role in PLAN[:2]:
        members.observe(beat(name, role, seq=2), 3.0)
    (dead,) = members.newly_dead(3.1)
    assert dead.instance == "decode-0"
    assert members.newly_dead(3.2) == []
    assert state(members, "decode-0", 3.2) is MemberState.DEAD
    assert pairs(members, 3.2) == 0
    members.observe(beat("decode-0", Role.DECODE, seq=2), 4.0)
    assert pairs(members, 4.0) == 1
    assert len(members.newly_dead(9.0)) == 3


def test_silence_while_the_gateway_stood_still_is_excused() -> None:
    members = full_registry()
    members.excuse(100.0, 4.0)
    assert members.newly_dead(4.0) == []
    assert pairs(members, 4.0) == 1
    members.excuse(2.0, 6.0)
    assert members.newly_dead(9.0) == []
    assert len(members.newly_dead(9.1)) == 3


def test_new_incarnation_replaces_the_old_for_good() -> None:
    members = full_registry()
    replaced = members.observe(beat("decode-0", Role.DECODE, incarnation="2"), 1.0)
    assert replaced is not None
    assert replaced.incarnation == "1"
    assert members.observe(beat("decode-0", Role.DECODE, incarnation="1", seq=9), 1.1) is None
    (worker,) = members.snapshot(1.1, {}).decode
    assert worker.peer.incarnation == "2"


def test_one_that_goes_on_while_its_successor_is_silent_takes_its_place_again() -> None:
    """Somebody used its name once; a beat of its own that comes late says nothing meanwhile."""
    members = full_registry()
    members.observe(beat("decode-0", Role.DECODE, incarnation="foreign", info=None), 1.0)
    assert members.observe(beat("decode-0", Role.DECODE, seq=2), 2.0) is None
    assert pairs(members, 2.0) == 0
    replaced = members.observe(beat("decode-0", Role.DECODE, seq=9), 4.5)
    assert replaced is not None
    assert replaced.incarnation == "foreign"
    for name, role in PLAN[:2]:
        members.observe(beat(name, role, seq=9), 4.5)
    assert pairs(members, 4.5) == 1


def test_late_beat_of_the_same_incarnation_changes_nothing() -> None:
    members = full_registry()
    members.observe(beat("decode-0", Role.DECODE, seq=5, draining=True), 1.0)
    members.observe(beat("decode-0", Role.DECODE, seq=4), 1.1)
    assert state(members, "decode-0", 1.1) is MemberState.DRAINING
    assert pairs(members, 1.1) == 0


def test_worker_that_hangs_with_work_is_stalled_and_an_idle_one_is_not() -> None:
    members = full_registry()
    members.observe(beat("decode-0", Role.DECODE, seq=2, progress_age_s=11.0), 0.0)
    assert state(members, "decode-0") is MemberState.READY
    members.observe(beat("decode-0", Role.DECODE, seq=3, progress_age_s=9.0, busy=True), 0.0)
    assert state(members, "decode-0") is MemberState.READY
    assert state(members, "decode-0", 1.5) is MemberState.STALLED
    (report,) = [r for r in members.reports(1.5) if r.instance == "decode-0"]
    assert report.progress_age_s == 10.5
    assert pairs(members, 1.5) == 0


def test_worker_without_a_model_is_loading_and_of_another_model_incompatible() -> None:
    members = full_registry()
    members.observe(beat("prefill-0", Role.PREFILL, seq=2, info=None), 0.0)
    assert state(members, "prefill-0") is MemberState.LOADING
    other = FakeModel(num_layers=3)
    members.observe(beat("prefill-0", Role.PREFILL, seq=3, info=other.info), 0.0)
    assert state(members, "prefill-0") is MemberState.INCOMPATIBLE
    assert pairs(members) == 0


def test_colocated_workers_need_no_transfer() -> None:
    members = registry(colocated=True, num_transfers=0)
    members.observe(beat("worker-0", Role.WORKER), 0.0)
    assert pairs(members) == 1


def test_snapshot_carries_the_gateways_own_count() -> None:
    use = {"1": WorkerUse(pending_tokens=5, in_flight=2, promised_pages=3)}
    (worker,) = full_registry().snapshot(0.0, use).prefill
    assert (worker.pending_tokens, worker.in_flight, worker.promised_pages) == (5, 2, 3)


def test_capacity_is_the_largest_pool_of_each_role() -> None:
    members = full_registry()
    big = WorkerLoad(pages_total=30, pages_free=1)
    members.observe(beat("decode-1", Role.DECODE, load=big), 0.0)
    capacity = members.kv_capacity(0.0)
    assert (capacity.prompt_tokens, capacity.total_tokens) == (160, 480)
    assert registry().kv_capacity(0.0).total_tokens is None


def test_doubted_member_gets_no_work_until_it_is_heard_of() -> None:
    members = full_registry()
    members.doubt("of somebody else", "x")
    assert pairs(members) == 1
    decode = Peer(instance="decode-0", endpoint="ipc://decode-0", incarnation="d")
    members.observe(beat("decode-0", Role.DECODE, incarnation="d"), 0.0)
    members.doubt(decode.incarnation, "shutting_down")
    assert state(members, "decode-0") is MemberState.SUSPECT
    assert pairs(members) == 0
    members.observe(beat("decode-0", Role.DECODE, incarnation="d", seq=1), 0.1)
    assert pairs(members, 0.1) == 0  # an old beat tells nothing
    members.observe(beat("decode-0", Role.DECODE, incarnation="d", seq=2), 0.2)
    assert pairs(members, 0.2) == 1


def test_doubted_transfer_leaves_no_pair_until_it_is_heard_of() -> None:
    members = full_registry()
    members.doubt_transfers("transfer_lost")
    assert state(members, "transfer-0") is MemberState.SUSPECT
    assert pairs(members) == 0
    members.observe(beat("transfer-0", Role.TRANSFER, seq=2), 0.1)
    assert pairs(members, 0.1) == 1


def test_silent_member_whose_connection_is_lost_is_dead_before_its_time() -> None:
    members = full_registry()

    def is_lost(peer: Peer) -> bool:
        return peer.instance == "decode-0"

    members.cut_off(is_lost, 1.0, 1.0)
    assert members.newly_dead(1.0) == []  # its next beat may only be late
    members.cut_off(is_lost, 1.0, 1.1)
    (dead,) = members.newly_dead(1.1)
    assert dead.instance == "decode-0"
    assert members.newly_dead(1.2) == []
    assert state(members, "decode-0", 1.2) is MemberState.DEAD
    assert pairs(members, 1.2) == 0
    assert members.kv_capacity(1.2).total_tokens is None
    members.observe(beat("decode-0", Role.DECODE, seq=2), 1.3)
    assert pairs(members, 1.3) == 1


def test_long_prefill_that_advances_is_healthy_and_one_that_stopped_is_not() -> None:
    members = full_registry()
    for seq in range(2, 102):  # fifty seconds of one prompt, a chunk every nine seconds
        now_s = seq * 0.5
        age_s = now_s % 9.0
        for name, role in PLAN:
            busy = role is Role.PREFILL
            members.observe(
                beat(name, role, seq=seq, busy=busy, progress_age_s=age_s if busy else 0.0), now_s
            )
        assert state(members, "prefill-0", now_s) is MemberState.READY
        assert pairs(members, now_s) == 1
    members.observe(beat("prefill-0", Role.PREFILL, seq=200, busy=True, progress_age_s=10.5), 51.0)
    assert state(members, "prefill-0", 51.0) is MemberState.STALLED


def test_who_stopped_in_order_has_left_and_is_not_lacking_however_long_ago() -> None:
    members = full_registry()
    members.observe(beat("decode-0", Role.DECODE, seq=2, draining=True), 1.0)
    assert [r.instance for r in members.reports(1.0) if r.lacking] == ["decode-0"]
    members.observe(beat("decode-0", Role.DECODE, seq=3, draining=True, leaving=True), 2.0)
    for now_s in (2.0, 100.0):
        assert state(members, "decode-0", now_s) is MemberState.LEFT
    assert [r.instance for r in members.reports(2.0) if r.lacking] == []
    assert pairs(members, 2.0) == 0
    assert members.kv_capacity(2.0).total_tokens is None
    left, *_ = [peer for peer in members.newly_dead(5.1) if peer.instance == "decode-0"]
    assert members.has_left(left), "what it may still have is given up in time"
    assert not members.has_left(msgspec.structs.replace(left, incarnation="2"))
    assert members.forget_strangers(60.0, 1000.0) == []
    assert members.observe(beat("decode-0", Role.DECODE, incarnation="2"), 1000.0) == left
    assert state(members, "decode-0", 1000.0) is MemberState.READY


def test_killed_while_it_drained_is_dead_and_lacking() -> None:
    members = full_registry()
    members.observe(beat("decode-0", Role.DECODE, seq=2, draining=True), 1.0)
    assert state(members, "decode-0", 4.1) is MemberState.DEAD
    assert "decode-0" in [r.instance for r in members.reports(4.1) if r.lacking]


def test_stranger_that_is_silent_for_long_is_forgotten_and_one_of_ours_is_not() -> None:
    members = full_registry()
    members.observe(beat("decode-7", Role.DECODE), 0.0)
    members.observe(beat("decode-9", Role.DECODE, info=None), 0.0)
    assert members.forget_strangers(60.0, 60.0) == []
    by_name = {r.instance: r for r in members.reports(60.0)}
    assert by_name["decode-7"].lacking, "it served"
    assert not by_name["decode-9"].lacking, "it never did"
    assert by_name["decode-0"].lacking
    members.observe(beat("decode-7", Role.DECODE, seq=2, info=None), 60.0)
    assert [r.instance for r in members.forget_strangers(60.0, 60.1)] == ["decode-9"]
    (report,) = [r for r in members.reports(60.1) if r.instance == "decode-7"]
    assert (report.state, report.lacking) == (MemberState.LOADING, True)
    assert [r.instance for r in members.forget_strangers(60.0, 1000.0)] == ["decode-7"]
    assert {r.instance for r in members.reports(1000.0)} == {name for name, _ in PLAN}


def test_number_of_strangers_is_bounded() -> None:
    members = full_registry()
    for number in range(MAX_STRANGERS + 5):
        members.observe(beat(f"x-{number}", Role.DECODE), number / 1000)
    forgotten = [r.instance for r in members.forget_strangers(60.0, 1.0)]
    assert forgotten == [f"x-{number}" for number in range(5)]
    assert len(members.reports(1.0)) == len(PLAN) + MAX_STRANGERS


def test_health_is_lost_by_who_is_lacking_and_not_by_who_left_or_was_never_of_use() -> None:
    def healthy(members: Registry, now_s: float) -> bool:
        return HealthReport(
            gateway="gateway-0",
            members=members.reports(now_s),
            refused=(),
            missing={},
            stopping=False,
            recorded=True,
        ).healthy

    members = full_registry()
    members.observe(beat("stranger", Role.DECODE, info=None), 0.0)
    members.observe(beat("decode-0", Role.DECODE, seq=2, draining=True, leaving=True), 0.0)
    assert healthy(members, 2.0)
    assert not healthy(members, 4.0)
    for name, role in PLAN[:2]:
        members.observe(beat(name, role, seq=2), 4.0)
    assert healthy(members, 5.0)


def test_stranger_of_the_same_role_takes_nobodys_place() -> None:
    settings = Settings(model="fake", prefill=1, decode=2, transfer="shm")
    heard = {"prefill-0", "decode-1", "decode-of-another-run"}
    assert missing_processes(settings, heard) == {Role.DECODE: 1, Role.TRANSFER: 1}
    assert missing_processes(settings, {*heard, "decode-0", "transfer-0"}) == {}
    together = Settings(model="fake", mode=COLOCATED, workers=2)
    assert missing_processes(together, {"worker-0", "worker-9"}) == {Role.WORKER: 1}
