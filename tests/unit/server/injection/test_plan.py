"""Which message, call or instant an armed fault hits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.injection.fault import (
    Corrupt,
    Damage,
    Delay,
    Direction,
    Drop,
    Fault,
    Freeze,
    MessageFault,
    Pause,
    Place,
    Raise,
    ShiftClock,
    Shrink,
)
from server.injection.plan import FaultPlan

MS = 1_000_000
SENT, RECEIVED = Direction.SENT, Direction.RECEIVED


def armed(*faults: Fault, instance: str = "decode-0", role: str = "decode") -> FaultPlan:
    plan = FaultPlan(instance=instance, role=role)
    plan.arm(faults, now_ns=0)
    return plan


def fates(plan: FaultPlan, name: str, times: int) -> list[MessageFault | None]:
    hits = [plan.message(RECEIVED, name) for _ in range(times)]
    return [None if hit is None else hit.fault for hit in hits]


@given(
    nth=st.integers(1, 5), count=st.one_of(st.none(), st.integers(1, 5)), seen=st.integers(0, 15)
)
def test_messages_from_the_nth_on_are_hit_count_times(
    nth: int, count: int | None, seen: int
) -> None:
    plan = armed(Drop(message="Handoff", nth=nth, count=count))
    hit = [fate is not None for fate in fates(plan, "Handoff", seen)]
    last = seen if count is None else nth + count - 1
    assert hit == [nth <= number <= last for number in range(1, seen + 1)]
    assert plan.num_armed == (1 if count is None or seen < last else 0)


def test_only_messages_of_the_type_and_the_direction_count() -> None:
    fault = Drop(message="Handoff", nth=2)
    plan = armed(fault)
    assert plan.message(RECEIVED, "Handoff") is None
    assert plan.message(SENT, "Handoff") is None
    assert plan.message(RECEIVED, "CopyDone") is None
    hit = plan.message(RECEIVED, "Handoff")
    assert hit is not None
    assert (hit.fault, hit.number) == (fault, 2)


def test_the_fault_armed_first_acts_and_all_count() -> None:
    drop, delay = Drop(message="Handoff"), Delay(message="Handoff", ms=1, count=2)
    assert fates(armed(drop, delay), "Handoff", 3) == [drop, delay, None]


def test_faults_of_other_processes_are_not_armed() -> None:
    faults = [Pause(at=at, ms=1) for at in ("", "decode", "decode-0", "decode-1", "prefill")]
    assert armed(*faults).num_armed == 3


def test_a_fault_counts_from_the_instant_at_which_it_was_armed() -> None:
    plan = armed()
    assert fates(plan, "Handoff", 4) == [None] * 4
    fault = Drop(message="Handoff", nth=2)
    plan.arm((fault,), now_ns=0)
    assert fates(plan, "Handoff", 2) == [None, fault]


def test_calls_count_by_place_and_by_what_they_deal_with() -> None:
    plan = armed(Raise(place=Place.MESSAGE, message="Abort", nth=2), Raise(place=Place.STEP))
    assert plan.call(Place.MESSAGE, "Abort") is None
    assert plan.call(Place.MESSAGE, "Handoff") is None
    assert plan.call(Place.STEP) is not None
    assert plan.call(Place.STEP) is None
    assert plan.call(Place.MESSAGE, "Abort") is not None
    assert plan.num_armed == 0


def test_stages_count_requests_whose_ids_begin_as_said() -> None:
    plan = armed(Freeze(stage="decode.queue", ms=7, nth=2, request="slow-"))
    seen = (
        ("decode.queue", "slow-1"),
        ("decode.queue", "fast-1"),
        ("decode.first", "slow-1"),
        ("decode.queue", "slow-2"),
        ("decode.queue", "slow-3"),
    )
    assert [plan.stage(*what) is not None for what in seen] == [False, False, False, True, False]
    assert not plan.hits_stages


def test_copies_count_in_the_order_of_their_start() -> None:
    faults = (Corrupt(copy=Damage.SHORT, nth=2), Corrupt(copy=Damage.ALTERED, nth=2, count=2))
    plan = armed(*faults, instance="transfer-0", role="transfer")
    hits = [plan.copy() for _ in range(4)]
    assert [hit and hit.fault for hit in hits] == [None, *faults, None]
    assert plan.num_armed == 0


def test_a_fault_is_armed_only_where_it_can_act() -> None:
    faults = (Corrupt(copy=Damage.NEVER), ShiftClock(seconds=1), Shrink(pages=1), Pause(ms=1))
    num_armed = {
        role: armed(*faults, instance=f"{role}-0", role=role).num_armed
        for role in ("gateway", "prefill", "transfer", "decode", "worker")
    }
    assert num_armed == {"gateway": 1, "prefill": 3, "transfer": 3, "decode": 3, "worker": 3}


def test_timed_faults_are_due_once_in_the_order_of_their_instants() -> None:
    late, early = Pause(ms=1, after_ms=20), Pause(ms=2, after_ms=10)
    plan = armed(late, early)
    assert plan.next_due_ns == 10 * MS
    assert plan.due(10 * MS - 1) == []
    assert plan.due(10 * MS) == [early]
    assert plan.next_due_ns == 20 * MS
    assert plan.due(100 * MS) == [late]
    assert plan.due(100 * MS) == []
    assert plan.next_due_ns is None


def test_clearing_disarms_everything() -> None:
    plan = armed(
        Drop(message="Handoff"),
        Raise(place=Place.STEP),
        Pause(ms=1),
        Freeze(stage="decode.queue", ms=1),
    )
    assert plan.num_armed == 4
    plan.clear()
    assert plan.num_armed == 0
    assert plan.message(RECEIVED, "Handoff") is None
    assert plan.call(Place.STEP) is None
    assert plan.due(MS) == []
