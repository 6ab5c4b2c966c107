"""When a request counts as finished, and what becomes of records that fit none."""

from __future__ import annotations

import msgspec
import pytest

from pdtrace.assembly.tracker import (
    MAX_GRACES,
    MAX_HALTED_GRACES,
    MAX_MARKS,
    MAX_UNNAMED,
    RequestTracker,
)
from pdtrace.inflight import END_UNKNOWN
from pdtrace.propagation import RequestContext
from pdtrace.ring.records import (
    ClockRecord,
    EndRecord,
    LossRecord,
    MarkRecord,
    OpenRecord,
    Record,
)
from pdtrace.stages import MARKS, Mark, Role
from pdtrace.testing import SequentialIds
from tests.support.marked_requests import process

GRACE_NS = 1_000
GATEWAY, PREFILL, DECODE = "gateway.ring", "prefill.ring", "decode.ring"


def tracker_of(*, max_open: int = 100) -> RequestTracker:
    tracker = RequestTracker(grace_ns=GRACE_NS, max_open=max_open)
    for ring, role in ((GATEWAY, Role.GATEWAY), (PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
        tracker.add_ring(ring, process(role))
    return tracker


def contexts(count: int) -> list[RequestContext]:
    ids = SequentialIds()
    return [RequestContext.create(ids=ids) for _ in range(count)]


CONTEXT = contexts(1)[0]


def opened(context: RequestContext = CONTEXT, key: int = 1) -> OpenRecord:
    return OpenRecord(key=key, t_ns=0, context=context)


def mark(kind: Mark, key: int = 1, t_ns: int = 5) -> MarkRecord:
    return MarkRecord(mark=kind, key=key, attempt=1, t_ns=t_ns)


def ended(key: int = 1) -> EndRecord:
    return EndRecord(key=key, t_ns=9)


def routed(prefill: str = "prefill-0", decode: str = "decode-0") -> MarkRecord:
    values = (prefill, decode, *[None] * (len(MARKS[Mark.ROUTED].attrs) - 2))
    return MarkRecord(mark=Mark.ROUTED, key=1, attempt=1, t_ns=4, values=values)


WHOLE: list[Record] = [opened(), mark(Mark.RECEIVED), mark(Mark.COMPLETED), ended()]


def test_request_is_finished_when_the_gateway_completed_and_every_leg_let_go() -> None:
    tracker = tracker_of()
    assert tracker.feed(GATEWAY, WHOLE[:2], 0) == [CONTEXT.root_span_id]
    assert tracker.feed(DECODE, [opened(), mark(Mark.RESERVE_RECEIVED)], 0) == [
        CONTEXT.root_span_id
    ]
    assert tracker.finished(0) == []
    tracker.feed(GATEWAY, WHOLE[2:], 1)
    assert tracker.finished(1) == []
    tracker.feed(DECODE, [ended()], 2)
    [request] = tracker.finished(2)
    assert request.request_id == CONTEXT.request_id
    assert request.gave_up is None
    assert [[m.mark for m in leg.marks] for leg in request.legs] == [
        [Mark.RECEIVED, Mark.COMPLETED],
        [Mark.RESERVE_RECEIVED],
    ]
    assert request.attempts[1].span_id == CONTEXT.attempt_span_id
    assert tracker.finished(99_999) == []
    assert tracker.num_open == 0


def test_leg_that_does_not_let_go_is_waited_for_and_then_named() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE, 0)
    tracker.feed(DECODE, [opened()], 0)
    assert tracker.finished(MAX_GRACES * GRACE_NS - 1) == []
    [request] = tracker.finished(MAX_GRACES * GRACE_NS)
    assert request.gave_up == "decode-0 did not finish"


def stopped(ring: str) -> str | None:
    return "stopped, pid 7" if ring == DECODE else None


def test_worker_that_is_stopped_is_waited_for_longer_and_tells_itself() -> None:
    # It was sent the request and has not heard of it: silence alone would end the wait.
    tracker = tracker_of()
    tracker.feed(PREFILL, [opened(), ended()], 0)
    records = [opened(), routed(), mark(Mark.DISPATCHED), mark(Mark.COMPLETED), ended()]
    tracker.feed(GATEWAY, records, 0)
    for now_ns in range(0, 20 * GRACE_NS, GRACE_NS // 2):
        assert tracker.finished(now_ns, halted=stopped) == []
    now_ns = 21 * GRACE_NS - 1  # it goes on, and is given the time to say so
    assert tracker.finished(now_ns) == []
    tracker.feed(DECODE, [opened(), mark(Mark.RESERVE_RECEIVED), ended()], now_ns)
    [request] = tracker.finished(now_ns)
    assert request.gave_up is None
    assert tracker.counts.late == 0


@pytest.mark.parametrize("names_it", [True, False])
def test_worker_that_stays_stopped_is_named_as_stopped_and_nobody_else(names_it: bool) -> None:
    tracker = tracker_of()
    records = [opened(), routed(), mark(Mark.DISPATCHED), mark(Mark.COMPLETED), ended()]
    tracker.feed(PREFILL, [opened(), ended()], 0)
    tracker.feed(GATEWAY, records, 0)
    if names_it:
        tracker.feed(DECODE, [opened()], 0)
    last_ns = MAX_HALTED_GRACES * GRACE_NS
    for now_ns in range(0, last_ns, GRACE_NS):
        assert tracker.finished(now_ns, halted=stopped) == []
    [request] = tracker.finished(last_ns, halted=stopped)
    assert request.gave_up == "decode-0 did not finish: it is stopped, pid 7"


def test_worker_that_was_stopped_and_stays_silent_is_not_waited_for_as_long() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE, 0)
    tracker.feed(PREFILL, [opened()], 0)
    tracker.feed(DECODE, [opened()], 0)
    end_ns = MAX_GRACES * GRACE_NS
    assert tracker.finished(end_ns, halted=stopped) == []
    assert tracker.finished(end_ns + 2 * GRACE_NS - 1) == []
    [request] = tracker.finished(end_ns + 2 * GRACE_NS)
    assert request.gave_up == (
        "prefill-0 did not finish; decode-0 did not finish: it was stopped, pid 7"
    )


def test_agent_that_is_told_to_stop_says_who_is_stopped() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE, 0)
    tracker.feed(DECODE, [opened()], 0)
    [request] = tracker.finish_ended(1, halted=stopped)
    assert request.gave_up == "decode-0 did not finish: it is stopped, pid 7"


def test_worker_in_a_long_step_lets_go_late_and_nothing_is_missing() -> None:
    # It marks the release of its pages after the step, while the answer is out already.
    tracker = tracker_of()
    tracker.feed(PREFILL, [opened()], 0)
    tracker.feed(GATEWAY, WHOLE, 0)
    assert tracker.finished(3 * GRACE_NS) == []
    tracker.feed(PREFILL, [mark(Mark.SOURCE_RELEASED), ended()], 3 * GRACE_NS)
    [request] = tracker.finished(3 * GRACE_NS)
    assert request.gave_up is None


def test_leg_that_goes_on_recording_is_not_waited_for_without_end() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE, 0)
    tracker.feed(DECODE, [opened()], 0)
    for now_ns in range(0, MAX_GRACES * GRACE_NS, GRACE_NS // 2):
        tracker.feed(DECODE, [mark(Mark.TOKEN_GAP)], now_ns)
        assert tracker.finished(now_ns) == []
    assert len(tracker.finished(MAX_GRACES * GRACE_NS)) == 1


def test_worker_that_it_was_sent_to_is_waited_for_before_it_is_heard() -> None:
    tracker = tracker_of()
    records = [opened(), routed(), mark(Mark.DISPATCHED), mark(Mark.COMPLETED), ended()]
    tracker.feed(GATEWAY, records, 0)
    assert tracker.finished(0) == []
    for ring in (PREFILL, DECODE):
        tracker.feed(ring, [opened(), ended()], 1)
    assert [request.gave_up for request in tracker.finished(1)] == [None]


def test_request_of_two_hosts_waits_for_the_next_round_trip_between_their_clocks() -> None:
    tracker = RequestTracker(grace_ns=100, max_open=100)
    tracker.add_ring("gateway", process(Role.GATEWAY))
    tracker.add_ring("decode", process(Role.DECODE, clock_id="host-2"))

    def round_trip(t_ns: int) -> ClockRecord:
        return ClockRecord(
            t_ns=t_ns, peer="gateway-0", peer_clock_id="host-1", offset_ns=1, error_ns=1
        )

    def run(number: int, t_ns: int) -> None:
        context = contexts(number)[-1]
        tracker.feed("gateway", [opened(context, number), mark(Mark.RECEIVED, number)], now_ns=10)
        tracker.feed(
            "decode",
            [opened(context, number), mark(Mark.DECODE_RELEASED, number, t_ns), ended(number)],
            now_ns=11,
        )
        tracker.feed("gateway", [mark(Mark.COMPLETED, number), ended(number)], now_ns=12)

    run(1, 5)  # nothing was measured yet: there is nothing to wait for
    assert len(tracker.finished(12)) == 1
    tracker.feed("decode", [round_trip(6)], now_ns=13)
    run(2, 7)
    assert tracker.finished(14) == []
    tracker.feed("decode", [round_trip(8)], now_ns=15)
    assert len(tracker.finished(16)) == 1
    run(3, 9)
    assert tracker.finished(111) == []
    assert len(tracker.finished(112)) == 1  # it measures no more
    run(4, 10)
    tracker.ring_gone("decode", None, "stopped")
    assert len(tracker.finished(13)) == 1


def test_worker_that_was_only_chosen_is_not_waited_for() -> None:
    # The client left before the request was sent to anybody.
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened(), routed(), mark(Mark.COMPLETED), ended()], 0)
    assert [request.gave_up for request in tracker.finished(0)] == [None]


def test_worker_of_another_host_is_not_waited_for() -> None:
    tracker = tracker_of()
    chosen = routed("prefill-9", "decode-9")
    records = [opened(), chosen, mark(Mark.DISPATCHED), mark(Mark.COMPLETED), ended()]
    tracker.feed(GATEWAY, records, 0)
    assert len(tracker.finished(0)) == 1


def test_records_after_the_end_are_counted_as_late() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE, 0)
    tracker.feed(DECODE, [opened()], 0)
    tracker.finished(MAX_GRACES * GRACE_NS)
    tracker.feed(DECODE, [mark(Mark.DECODE_RELEASED), ended()], GRACE_NS)
    tracker.feed(PREFILL, [opened(), mark(Mark.SOURCE_RELEASED), ended()], GRACE_NS)
    assert tracker.counts.late == 2
    assert tracker.num_open == 0


def test_marks_before_their_open_record_are_kept_for_it() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, [mark(Mark.RECEIVED), opened(), mark(Mark.COMPLETED), ended()], 0)
    [request] = tracker.finished(0)
    assert [m.mark for m in request.legs[0].marks] == [Mark.RECEIVED, Mark.COMPLETED]
    assert tracker.counts.unnamed == 0


def test_marks_that_stay_without_open_record_are_counted() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, [mark(Mark.RECEIVED), ended()], 0)
    tracker.feed(DECODE, [mark(Mark.TOKEN_GAP, key=7) for _ in range(MAX_UNNAMED + 3)], 0)
    tracker.ring_gone(DECODE, None, "process_exited")
    assert tracker.counts.unnamed == 1 + 3 + MAX_UNNAMED


def test_marks_of_requests_handled_before_a_restart_are_not_lost_ones() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened(key=7), mark(Mark.RECEIVED, key=7)], 0)
    last_key = tracker.last_key(GATEWAY)
    tracker = RequestTracker(grace_ns=GRACE_NS)
    tracker.add_ring(GATEWAY, process(Role.GATEWAY), handled_key=last_key)
    tracker.feed(GATEWAY, [mark(Mark.COMPLETED, key=7), ended(7), mark(Mark.RECEIVED, key=8)], 0)
    tracker.ring_gone(GATEWAY, None, "process_exited")
    assert tracker.counts.unnamed == 1


def test_repeated_open_record_changes_nothing() -> None:
    tracker = tracker_of()
    assert len(tracker.feed(GATEWAY, [opened(), opened(), *WHOLE[1:]], 0)) == 1
    [request] = tracker.finished(0)
    assert len(request.legs) == 1


def test_second_attempt_is_the_same_request() -> None:
    second = CONTEXT.next_attempt(ids=SequentialIds(50))
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened(), mark(Mark.ABORTED), opened(second, 2), ended(1)], 0)
    assert tracker.finished(GRACE_NS) == []
    tracker.feed(GATEWAY, [mark(Mark.COMPLETED, key=2), ended(2)], GRACE_NS)
    [request] = tracker.finished(GRACE_NS)
    assert sorted(request.attempts) == [1, 2]
    assert request.attempts[2].handoff_id == second.handoff_id
    assert len(request.legs) == 1


def test_dead_worker_is_lost_and_no_longer_waited_for() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE[:2], 0)
    tracker.feed(DECODE, [opened(), mark(Mark.RESERVE_RECEIVED, t_ns=70)], 0)
    tracker.ring_gone(DECODE, 90, "process_lost")
    assert tracker.finished(1) == []
    tracker.feed(GATEWAY, WHOLE[2:], 2)
    [request] = tracker.finished(2)
    [leg] = [leg for leg in request.legs if leg.process.role is Role.DECODE]
    assert (leg.lost_at_ns, leg.lost_reason) == (90, "process_lost")
    assert request.gave_up is None


def test_death_that_nobody_saw_counts_from_the_last_record() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened(), mark(Mark.RECEIVED, t_ns=70)], 0)
    tracker.ring_gone(GATEWAY, None, "process_lost")
    [request] = tracker.finished(GRACE_NS)
    assert request.legs[0].lost_at_ns == 70


def test_next_attempt_may_come_a_moment_after_the_one_before_was_let_go() -> None:
    """Reading stops between the two records, and nobody holds the request meanwhile."""
    second = CONTEXT.next_attempt(ids=SequentialIds(500))
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened(), mark(Mark.RECEIVED), mark(Mark.ABORTED), ended()], 0)
    assert tracker.finished(GRACE_NS - 1) == []
    tracker.feed(GATEWAY, [opened(second, 2), mark(Mark.COMPLETED, 2), ended(2)], GRACE_NS - 1)
    [request] = tracker.finished(GRACE_NS - 1)
    assert sorted(request.attempts) == [1, 2]
    tracker.feed(GATEWAY, [opened(contexts(2)[1], 3), mark(Mark.RECEIVED, 3), ended(3)], 0)
    assert tracker.finished(GRACE_NS - 1) == []
    assert len(tracker.finished(GRACE_NS)) == 1, "no other attempt came"


def test_request_goes_on_in_its_workers_when_its_gateway_dies() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE[:2], 0)
    tracker.feed(DECODE, [opened()], 0)
    tracker.ring_gone(GATEWAY, None, "process_lost")
    [seen] = tracker.in_flight(1)
    assert seen.ended is None


def test_attempt_that_its_worker_gave_up_waits_for_the_gateway_to_hear_of_it() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE[:2], 0)
    tracker.feed(DECODE, [opened(), mark(Mark.RESERVE_RECEIVED), mark(Mark.ABORTED, t_ns=8)], 0)
    [seen] = tracker.in_flight(20)
    assert seen.stage == "decode.reserve", "it still clears up"
    tracker.feed(DECODE, [ended()], 0)
    [seen] = tracker.in_flight(20)
    assert (seen.stage, seen.worker) == ("gateway.finish", "gateway-0")
    assert seen.stage_age_s == pytest.approx(12e-9)
    second = CONTEXT.next_attempt(ids=SequentialIds(50))
    again = MarkRecord(mark=Mark.RESERVE_RECEIVED, key=2, attempt=2, t_ns=15)
    tracker.feed(DECODE, [opened(second, 2), again], 0)
    [seen] = tracker.in_flight(20)
    assert (seen.stage, seen.attempt) == ("decode.reserve", 2)


def test_leg_that_had_let_go_is_not_lost() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE[:2], 0)
    tracker.feed(DECODE, [opened(), mark(Mark.RESERVE_RECEIVED), ended()], 0)
    tracker.ring_gone(DECODE, 90, "process_lost")
    tracker.feed(GATEWAY, WHOLE[2:], 2)
    [request] = tracker.finished(2)
    assert all(leg.lost_at_ns is None for leg in request.legs)


def test_host_without_gateway_finishes_after_silence() -> None:
    tracker = tracker_of()
    tracker.feed(DECODE, [opened(), mark(Mark.RESERVE_RECEIVED), ended()], 0)
    assert tracker.finished(GRACE_NS - 1) == []
    assert len(tracker.finished(GRACE_NS)) == 1


def test_oldest_requests_are_given_up_when_there_are_too_many() -> None:
    tracker = tracker_of(max_open=3)
    for number, context in enumerate(contexts(5)):
        tracker.feed(GATEWAY, [opened(context, number + 1)], 0)
    evicted = tracker.finished(0)
    assert [request.request_id for request in evicted] == ["req-1", "req-2"]
    assert {request.gave_up for request in evicted} == {"too many requests in flight"}
    assert (tracker.num_open, tracker.counts.evicted) == (3, 2)


def test_marks_of_one_request_are_bounded_but_its_end_is_kept() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened()], 0)
    tracker.feed(GATEWAY, [mark(Mark.WAITING)] * (MAX_MARKS + 5), 0)
    tracker.feed(GATEWAY, [mark(Mark.COMPLETED), ended()], 0)
    [request] = tracker.finished(0)
    assert len(request.legs[0].marks) == MAX_MARKS + 1
    assert request.legs[0].records_missed == tracker.counts.overgrown == 5


def test_lost_records_are_told_to_the_requests_in_flight_there() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE[:2], 0)
    tracker.feed(PREFILL, [opened(), ended()], 0)
    tracker.feed(DECODE, [opened()], 0)
    for ring in (PREFILL, DECODE):  # prefill has let go of it before
        tracker.feed(ring, [LossRecord(count=7)], 0)
    tracker.feed(DECODE, [ended()], 0)
    tracker.feed(GATEWAY, WHOLE[2:], 0)
    [request] = tracker.finished(0)
    assert {leg.process.role: leg.records_missed for leg in request.legs} == {
        Role.GATEWAY: 0,
        Role.PREFILL: 0,
        Role.DECODE: 7,
    }


def test_losses_among_the_records_concern_who_was_open_there() -> None:
    tracker = tracker_of()
    before, within, across, after = contexts(4)
    tracker.feed(
        GATEWAY,
        [
            *(opened(before, 1), mark(Mark.COMPLETED, 1), ended(1)),
            *(opened(across, 2), mark(Mark.RECEIVED, 2, t_ns=10), LossRecord(count=7)),
            OpenRecord(key=3, t_ns=12, context=within, repeated=True),
            *(mark(Mark.COMPLETED, 2), ended(2), mark(Mark.COMPLETED, 3), ended(3)),
            *(opened(after, 4), mark(Mark.COMPLETED, 4), ended(4)),
        ],
        0,
    )
    found = {request.request_id: request.legs[0].records_missed for request in tracker.finished(0)}
    assert found == {
        before.request_id: 0,
        across.request_id: 7,
        within.request_id: 7,
        after.request_id: 0,
    }


LAPPED = LossRecord(count=123, overwritten=True)


def test_request_whose_end_was_overwritten_ends_and_says_so() -> None:
    tracker = tracker_of()
    gone, alive = contexts(2)
    tracker.feed(GATEWAY, [opened(gone, 1), mark(Mark.RECEIVED, 1), opened(alive, 2)], 0)
    tracker.feed(GATEWAY, [LAPPED, OpenRecord(key=2, t_ns=0, context=alive, repeated=True)], 1)
    assert tracker.finished(MAX_GRACES * GRACE_NS) == []  # more of the ring may name it
    tracker.read_to_end(GATEWAY, 2)
    [request] = tracker.finished(2)
    assert request.request_id == gone.request_id
    assert request.legs[0].records_missed == 123
    assert (tracker.open_ids(), tracker.held_in(GATEWAY)) == ([alive.request_id],) * 2
    tracker.feed(GATEWAY, [mark(Mark.COMPLETED, 2), ended(2)], 3)
    assert [request.request_id for request in tracker.finished(3)] == [alive.request_id]
    assert (tracker.counts.late, tracker.counts.unnamed) == (0, 0)


def test_request_whose_end_was_overwritten_waits_for_its_legs_like_an_ended_one() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE[:2], 0)
    tracker.feed(DECODE, [opened()], 0)
    tracker.feed(GATEWAY, [LAPPED], 1)
    tracker.read_to_end(GATEWAY, 1)
    [seen] = tracker.in_flight(MAX_GRACES * GRACE_NS)
    assert seen.ended == END_UNKNOWN, "nobody waits for it: it is not stuck"
    assert tracker.finished(MAX_GRACES * GRACE_NS) == []
    [request] = tracker.finished(MAX_GRACES * GRACE_NS + 1)
    assert request.gave_up == "decode-0 did not finish"


def test_worker_whose_end_was_overwritten_is_not_waited_for() -> None:
    tracker = tracker_of()
    tracker.feed(DECODE, [opened()], 0)
    tracker.feed(GATEWAY, WHOLE, 1)
    tracker.feed(DECODE, [LAPPED], 2)
    tracker.read_to_end(DECODE, 2)
    [request] = tracker.finished(2)
    assert {leg.process.role: leg.records_missed for leg in request.legs} == {
        Role.GATEWAY: 0,
        Role.DECODE: 123,
    }


def test_damaged_records_let_go_of_nothing() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, [*WHOLE[:2], LossRecord(count=1)], 0)
    tracker.read_to_end(GATEWAY, 1)
    assert tracker.finished(MAX_GRACES * GRACE_NS) == []
    tracker.feed(GATEWAY, WHOLE[2:], 2)
    assert len(tracker.finished(2)) == 1


def test_request_that_is_all_overwritten_at_the_gateway_says_so() -> None:
    tracker = tracker_of()
    before, within, after, elsewhere = contexts(4)
    first, second = contexts(6)[4:]
    tracker.feed(GATEWAY, [opened(first, 1), mark(Mark.RECEIVED, 1, t_ns=10)], 0)
    tracker.feed(GATEWAY, [LAPPED, opened(second, 9), mark(Mark.RECEIVED, 9, t_ns=20)], 0)
    tracker.read_to_end(GATEWAY, 0)
    tracker.ring_gone(GATEWAY, None, "process_exited")
    tracker.finished(0)
    for key, context, t_ns in ((1, before, 9), (2, within, 15), (3, after, 21)):
        tracker.feed(
            DECODE, [opened(context, key), mark(Mark.RESERVE_RECEIVED, key, t_ns), ended(key)], 0
        )
    tracker.add_ring("far", process(Role.DECODE, clock_id="host-2"))
    tracker.feed("far", [opened(elsewhere), mark(Mark.RESERVE_RECEIVED, t_ns=15), ended()], 0)
    seen = tracker.in_flight(30)
    assert {request.ended for request in seen} == {END_UNKNOWN}, "nobody holds them"
    told = {request.request_id: request.incomplete for request in seen}
    nothing, lost = "nothing from the gateway", "gateway-0 lost 123 records"
    assert told.pop(within.request_id) == lost
    assert told == dict.fromkeys([one.request_id for one in (before, after, elsewhere)], nothing)
    found = {request.request_id: request.gave_up for request in tracker.finished(GRACE_NS)}
    assert found.pop(within.request_id) == lost
    assert found == dict.fromkeys([one.request_id for one in (before, after, elsewhere)])


def test_keys_of_overwritten_ends_take_no_memory() -> None:
    tracker = tracker_of()
    for number, context in enumerate(contexts(50)):
        tracker.feed(DECODE, [opened(context, number + 1)], 0)
        tracker.feed(GATEWAY, [opened(context, number + 1), ended(number + 1)], 0)
    tracker.finished(MAX_GRACES * GRACE_NS)
    tracker.feed(DECODE, [LAPPED], 0)
    tracker.read_to_end(DECODE, 0)
    tracker.feed(DECODE, [mark(Mark.TOKEN_GAP, key=1)], 0)
    assert tracker.counts.late == 0  # it is no longer known


def test_request_that_began_in_a_gap_is_not_blamed_for_an_earlier_one() -> None:
    tracker = tracker_of()
    early, late = contexts(2)
    tracker.feed(
        GATEWAY,
        [
            *(LossRecord(count=5), mark(Mark.RECEIVED, 1, t_ns=10), LossRecord(count=2)),
            OpenRecord(key=1, t_ns=3, context=early, repeated=True),
            OpenRecord(key=2, t_ns=12, context=late, repeated=True),
            *(mark(Mark.COMPLETED, 1), ended(1), mark(Mark.COMPLETED, 2), ended(2)),
        ],
        0,
    )
    found = {request.request_id: request.legs[0].records_missed for request in tracker.finished(0)}
    assert found == {early.request_id: 7, late.request_id: 2}


def test_marks_that_say_where_a_request_is_have_room_beside_any_number_of_details() -> None:
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened()], 0)
    tracker.feed(DECODE, [opened(), *[mark(Mark.WAITING)] * (MAX_MARKS + 5)], 0)
    tracker.feed(DECODE, [mark(Mark.PAGES_RESERVED), mark(Mark.KV_NOTICED), ended()], 0)
    tracker.feed(GATEWAY, [mark(Mark.COMPLETED), ended()], 0)
    [request] = tracker.finished(0)
    [leg] = [leg for leg in request.legs if leg.process.role is Role.DECODE]
    assert [one.mark for one in leg.marks[-2:]] == [Mark.PAGES_RESERVED, Mark.KV_NOTICED]
    assert leg.records_missed == 5


def test_requests_exported_before_are_not_built_again() -> None:
    tracker = tracker_of()
    tracker.remember_finished([CONTEXT.root_span_id])
    tracker.feed(GATEWAY, WHOLE, 0)
    assert tracker.finished(GRACE_NS) == []
    assert tracker.counts.late == 0, "they are read again, and were in time"
    other = contexts(2)[1]
    tracker.remember_finished([other.attempt_span_id])
    assert tracker.feed(DECODE, [opened(other, 2)], 0) == []


def test_same_request_id_in_one_trace_is_two_requests() -> None:
    ids = SequentialIds(10)
    again = msgspec.structs.replace(
        RequestContext.create(ids=ids), request_id=CONTEXT.request_id, trace_id=CONTEXT.trace_id
    )
    tracker = tracker_of()
    tracker.feed(GATEWAY, WHOLE, 0)
    tracker.feed(GATEWAY, [opened(again, 2), mark(Mark.COMPLETED, key=2), ended(2)], 0)
    assert len(tracker.finished(0)) == 2


def test_blockers_are_resolved_to_their_spans() -> None:
    blocker, blocked = contexts(2)
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened(blocker, 1), opened(blocked, 2)], 0)
    values = ("gateway.queue", "concurrency", None, None, None, None, blocker.request_id)
    waiting = MarkRecord(mark=Mark.WAITING, key=2, attempt=1, t_ns=5, values=values)
    tracker.feed(GATEWAY, [waiting, mark(Mark.COMPLETED, key=2), ended(2)], 0)
    [request] = tracker.finished(0)
    assert request.blockers == {blocker.request_id: (blocker.trace_id, blocker.root_span_id)}


def test_ended_requests_can_be_had_without_waiting_and_others_stay() -> None:
    one, two = contexts(2)
    tracker = tracker_of()
    tracker.feed(GATEWAY, [opened(one, 1), mark(Mark.COMPLETED), ended(), opened(two, 2)], 0)
    tracker.feed(DECODE, [opened(one, 1)], 0)
    [request] = tracker.finish_ended(1)
    assert request.gave_up == "decode-0 did not finish"
    assert tracker.num_open == 1
