"""What a request in flight shows: its stage, since when, who has to end it, and why it waits."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import pytest

from pdtrace import semconv as a
from pdtrace.assembly.collected import Stuck
from pdtrace.assembly.evidence import BEGIN_MARKS
from pdtrace.assembly.open_requests import OpenRequest
from pdtrace.assembly.request_spans import assemble
from pdtrace.assembly.tracker import Halted, RequestTracker
from pdtrace.clock import ClockAnchor
from pdtrace.inflight import InFlight
from pdtrace.propagation import RequestContext
from pdtrace.ring.codec import ID_SEPARATOR
from pdtrace.ring.records import ClockRecord, EndRecord, LossRecord, OpenRecord, StepRecord
from pdtrace.stages import CHAINS, Mark, Mode, Role, StepKind
from pdtrace.testing import SequentialIds
from tests.support.marked_requests import (
    DECODE,
    GATEWAY,
    MS,
    PREFILL,
    START_NS,
    TRANSFER,
    US,
    WORKER,
    Moment,
    aborted,
    colocated_moments,
    completed,
    pd_moments,
    process,
    record,
    until,
)

Verdict = tuple[bool, str | None, int | None]

HEALTHY = {
    Mode.PD: pd_moments(),
    Mode.PD_EARLY: pd_moments(Mode.PD_EARLY),
    Mode.COLOCATED: colocated_moments(),
}
WORKERS = {
    "gateway": "gateway-0",
    "prefill": "prefill-0",
    "transfer": "transfer-0",
    "decode": "decode-0",
}


class Watched:
    """One request fed mark by mark, each process's OPEN before its first."""

    def __init__(self, mode: Mode = Mode.PD, *, roles: Iterable[Role] = tuple(Role)) -> None:
        self.tracker = RequestTracker()
        self.context = RequestContext.create(ids=SequentialIds(), mode=mode)
        self._opened: set[Role] = set()
        for role in roles:
            self.tracker.add_ring(role.value, process(role))

    def feed(self, moments: Iterable[Moment], *, attempt: int = 1, key: int = 1) -> Watched:
        for role, mark, at_us, values in moments:
            t_ns = START_NS + at_us * US
            if role not in self._opened:
                self._opened.add(role)
                opened = OpenRecord(key=key, t_ns=t_ns, context=self.context)
                self.tracker.feed(role.value, [opened], t_ns)
            marked = msgspec.structs.replace(record(mark, t_ns, values, attempt=attempt), key=key)
            self.tracker.feed(role.value, [marked], t_ns)
        return self

    def at(self, at_us: int) -> InFlight:
        [request] = self.tracker.in_flight(START_NS + at_us * US)
        return request


def stage_at(moments: Sequence[Moment], mode: Mode, at_us: int) -> tuple[str, int] | None:
    """The chain stage at an instant and when it began, told from the whole of a healthy request.

    The first in the chain that has begun and not ended; nothing before and after.
    """
    times = {mark: t for _, mark, t, _ in reversed(moments)}
    for stage in CHAINS[mode]:
        begins = [times[m] for m in BEGIN_MARKS[mode, stage.name] if m in times]
        if begins and begins[0] <= at_us < times[stage.end]:
            return stage.name, begins[0]
    return None


@pytest.mark.parametrize("mode", list(Mode))
def test_stage_and_its_age_follow_the_marks(mode: Mode) -> None:
    moments = HEALTHY[mode]
    watched = Watched()  # the mode of the context is the default's: TOKENIZED corrects it
    told: list[str] = []
    for moment, following in itertools.pairwise(sorted(moments, key=lambda m: m[2])):
        watched.feed([moment])
        if moment[2] == following[2]:
            continue  # more marks of the same instant
        now_us = following[2] - 1
        expected = stage_at(moments, mode, now_us)
        assert expected is not None
        seen = watched.at(now_us)
        name, begun_us = expected
        assert seen.stage == name
        assert seen.stage_age_s == pytest.approx((now_us - begun_us) / 1e6)
        assert seen.age_s == pytest.approx(now_us / 1e6)
        assert (seen.mode, seen.ended) == (mode.value if now_us >= 400 else "pd", None)
        if mode is not Mode.COLOCATED:
            owner = next(s for s in CHAINS[mode] if s.name == name).roles
            assert seen.worker in {WORKERS[role.value] for role in owner if role is not WORKER}
        else:
            assert seen.worker in ("gateway-0", "worker-0")
        told.append(name)
    assert set(told) == {stage.name for stage in CHAINS[mode]}
    watched.feed(moments[-1:])
    assert (watched.at(20_001).stage, watched.at(20_001).ended) == (None, "completed")


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seed", range(5))
def test_order_of_reading_does_not_matter(mode: Mode, seed: int) -> None:
    for at_us in (500, 1_000, 1_950, 5_000, 6_300, 7_200, 15_000, 19_500):
        seen = until(HEALTHY[mode], at_us)
        shuffled = list(seen)
        random.Random(seed).shuffle(shuffled)
        assert Watched().feed(shuffled).at(at_us) == Watched().feed(seen).at(at_us)


@pytest.mark.parametrize("mode", list(Mode))
def test_missing_marks_leave_the_stage_after_the_furthest_that_is_known(mode: Mode) -> None:
    for at_us in (1_950, 5_000, 15_000):
        seen = until(HEALTHY[mode], at_us)
        ends = {stage.end for stage in CHAINS[mode]}
        last = max((m for m in seen if m[1] in ends), key=lambda m: m[2])
        few = [m for m in seen if m[1] in (Mark.TOKENIZED, last[1])]
        assert Watched().feed(few).at(at_us).stage == Watched().feed(seen).at(at_us).stage


def test_marks_inside_a_stage_show_that_it_has_begun() -> None:
    chunk = [m for m in pd_moments() if m[1] is Mark.CHUNK_STARTED][:1]
    assert Watched().feed(chunk).at(2_500).stage == "prefill.compute"
    gap = [m for m in pd_moments() if m[1] is Mark.TOKEN_GAP]
    assert Watched().feed(gap).at(13_000).stage == "decode.generate"


def test_request_whose_gateway_records_are_gone_is_still_placed() -> None:
    moments = [m for m in pd_moments() if m[0] is not GATEWAY]
    watched = Watched().feed(until(moments, 1_000))
    seen = watched.at(1_000)
    assert (seen.stage, seen.worker) == ("decode.reserve", "decode-0")
    assert seen.incomplete == "nothing from the gateway"
    watched.feed([m for m in until(moments, 8_000) if m[2] >= 1_000])
    # Nobody would say that the first token was sent, so it is not waited for.
    assert watched.at(8_000).stage == "decode.generate"
    assert watched.at(8_000).stage_age_s == pytest.approx(0.00065)


def test_dead_gateway_is_told_and_the_stage_stays() -> None:
    watched = Watched().feed(until(pd_moments(), 5_000))
    watched.tracker.ring_gone(GATEWAY.value, START_NS + 5_000 * US, "process_lost")
    seen = watched.at(6_000)
    assert (seen.stage, seen.worker) == ("prefill.compute", "prefill-0")
    assert (seen.incomplete, seen.ended) == ("gateway-0: process_lost", None)


def test_gateway_that_lost_records_may_have_said_that_the_token_was_sent() -> None:
    watched = Watched().feed(until(pd_moments(), 7_500))
    assert watched.at(7_500).stage == "hop.token"
    watched.tracker.feed(GATEWAY.value, [LossRecord(count=3)], 0)
    seen = watched.at(7_500)
    assert (seen.stage, seen.incomplete) == ("decode.generate", "gateway-0 lost 3 records")


def test_answer_in_one_piece_does_not_wait_for_its_first_token() -> None:
    moments = [m for m in pd_moments(stream=False) if m[1] is not Mark.FIRST_TOKEN_SENT]
    assert Watched().feed(until(moments, 7_500)).at(7_500).stage == "decode.generate"


def test_who_has_to_end_a_stage_is_known_before_it_is_heard() -> None:
    watched = Watched().feed(until(pd_moments(), 600))
    seen = watched.at(600)
    assert (seen.stage, seen.worker) == ("hop.dispatch", "decode-0")
    assert (seen.prefill_worker, seen.decode_worker) == ("prefill-0", "decode-0")
    assert seen.prompt_tokens == 96


def test_copy_that_no_transfer_process_has_taken_up_is_the_only_ones_to_end() -> None:
    """A transfer process that was stopped before it heard of the copy is the one to look at."""
    silent = [m for m in pd_moments() if m[0] is not Role.TRANSFER]
    begins = BEGIN_MARKS[Mode.PD, "transfer"]
    begin_us = min(at_us for _, mark, at_us, _ in silent if mark in begins)
    watched = Watched().feed(until(silent, begin_us + 10))
    seen = watched.at(begin_us + 10)
    assert (seen.stage, seen.worker) == ("transfer", "transfer-0")
    second = dataclasses.replace(process(TRANSFER), instance="transfer-1")
    watched.tracker.add_ring("transfer-1", second)
    assert watched.at(begin_us + 10).worker is None


def waiting(
    at_us: int, reason: str, *, stage: str = "decode.reserve", blockers: Sequence[str] = ()
) -> Moment:
    values = {
        a.WAIT_STAGE: stage,
        a.WAIT_REASON: reason,
        a.WAIT_NEEDED: 7,
        a.WAIT_FREE: 2,
        a.WAIT_LIMIT: 64,
        a.WAIT_POSITION: 1,
        a.WAIT_BLOCKER: blockers[0] if blockers else None,
        a.WAIT_BLOCKERS: ID_SEPARATOR.join(blockers) if len(blockers) > 1 else None,
    }
    return (DECODE, Mark.WAITING, at_us, values)


def test_wait_of_the_stage_is_shown_with_its_numbers_and_all_blockers() -> None:
    watched = Watched().feed(until(pd_moments(), 725))
    assert watched.at(725).wait is None
    watched.feed([waiting(800, "kv_pages", blockers=["req-7", "req-8"])])
    wait = watched.at(1_000).wait
    assert wait is not None
    assert (wait.reason, wait.needed, wait.free, wait.limit, wait.position) == (
        "kv_pages",
        7,
        2,
        64,
        1,
    )
    assert wait.stage is None
    assert wait.blockers == ("req-7", "req-8")
    assert wait.age_s == pytest.approx(0.0002)


def test_wait_is_as_old_as_its_reason_and_not_as_its_latest_numbers() -> None:
    watched = Watched().feed(until(pd_moments(), 725))
    watched.feed([waiting(800, "slots"), waiting(900, "kv_pages"), waiting(1_100, "kv_pages")])
    wait = watched.at(1_200).wait
    assert wait is not None
    assert (wait.reason, wait.age_s) == ("kv_pages", pytest.approx(0.0003))


def test_wait_of_a_stage_that_is_over_is_not_shown() -> None:
    watched = Watched().feed(until(pd_moments(), 1_800))
    assert (watched.at(1_800).stage, watched.at(1_800).wait) == ("hop.publish", None)


def test_preempted_request_is_in_generation_and_waits_until_it_resumes() -> None:
    watched = Watched().feed(until(pd_moments(), 13_500))
    watched.feed([waiting(13_500, "preempted", stage="decode.preempted")])
    seen = watched.at(13_600)
    assert seen.stage == "decode.generate"
    assert seen.wait is not None
    assert (seen.wait.reason, seen.wait.stage) == ("preempted", "decode.preempted")
    watched.feed([m for m in pd_moments() if m[1] is Mark.RESUMED])
    assert watched.at(14_100).wait is None


def test_second_attempt_starts_over_behind_admission() -> None:
    watched = Watched().feed(until(pd_moments(), 5_000))
    second = watched.context.next_attempt(ids=SequentialIds(50))
    t_ns = START_NS + 5_000 * US
    watched.tracker.feed(GATEWAY.value, [OpenRecord(key=2, t_ns=t_ns, context=second)], t_ns)
    seen = watched.at(5_100)
    assert (seen.attempt, seen.stage, seen.stage_age_s) == (2, "gateway.route", 0.0001)
    late = (PREFILL, Mark.PREFILL_FINISHED, 5_150, {})
    watched.feed([late])  # of the first attempt
    assert watched.at(5_200).stage == "gateway.route"
    routed = (GATEWAY, Mark.ROUTED, 5_200, {a.DECODE_WORKER: "decode-1"})
    watched.feed([routed], attempt=2, key=2)
    seen = watched.at(5_300)
    assert (seen.stage, seen.decode_worker, seen.prefill_worker) == (
        "gateway.dispatch",
        "decode-1",
        None,
    )


def test_age_of_another_hosts_stage_counts_on_the_gateways_clock() -> None:
    shift = 3_600_000 * MS
    tracker = RequestTracker()
    far = dataclasses.replace(
        process(DECODE),
        clock_id="host-2",
        anchor=ClockAnchor(monotonic_ns=START_NS + shift, wall_ns=0),  # a wall clock far off
    )
    tracker.add_ring("decode", far)
    tracker.add_ring("gateway", process(GATEWAY))
    sample = ClockRecord(
        t_ns=START_NS + shift,
        peer="gateway-0",
        peer_clock_id="host-1",
        offset_ns=-shift,
        error_ns=1_000,
    )
    context = RequestContext.create(ids=SequentialIds())
    tracker.feed("gateway", [OpenRecord(key=1, t_ns=START_NS, context=context)], 0)
    reserved = record(Mark.RESERVE_RECEIVED, START_NS + shift + MS)
    opened = OpenRecord(key=1, t_ns=START_NS + shift + MS, context=context)
    tracker.feed("decode", [sample, opened, reserved], 0)
    [seen] = tracker.in_flight(START_NS + 3 * MS)
    assert (seen.stage, seen.stage_age_s) == ("decode.reserve", pytest.approx(0.002, abs=1e-5))
    assert seen.age_s == pytest.approx(0.003)


def test_peek_shows_a_request_without_finishing_it() -> None:
    watched = Watched().feed(until(pd_moments(), 5_000))
    now_ns = START_NS + 5_500 * US
    [request] = watched.tracker.peek(watched.context.request_id, now_ns)
    assert request.open_at_ns == now_ns
    spans = {span.name: span for span in assemble(request)}
    assert spans["prefill.compute"].attributes[a.OPEN.key] is True
    assert watched.tracker.open_ids() == [watched.context.request_id]
    request.legs[0].marks.clear()  # a snapshot: nothing of it is the tracker's
    [again] = watched.tracker.peek(watched.context.request_id, now_ns)
    assert again.legs[0].marks
    assert watched.tracker.peek("req-unknown", now_ns) == []


def test_stuck_report_is_handed_on_and_shown_while_the_stage_lasts() -> None:
    watched = Watched().feed(until(pd_moments(), 1_000))
    root = watched.context.root_span_id
    report = Stuck(
        stage="decode.reserve", attempt=1, at_ns=START_NS + MS, age_ns=280 * US, threshold_ns=100
    )
    watched.tracker.mark_stuck(root, report)
    watched.tracker.mark_stuck("f" * 16, report)  # not in flight: nothing to keep it for
    assert watched.at(1_100).stuck
    [request] = watched.tracker.peek(watched.context.request_id, START_NS + MS)
    assert request.stuck == (report,)
    watched.feed([m for m in pd_moments() if m[1] is Mark.PAGES_RESERVED])
    assert not watched.at(1_800).stuck


def test_steps_are_summed_for_each_attempt_and_kind() -> None:
    watched = Watched().feed(until(pd_moments(), 8_000))
    steps = [
        StepRecord(
            number=number,
            kind=kind,
            begin_ns=0,
            end_ns=length_ns,
            tokens=1,
            size=2,
            members=members,
        )
        for number, kind, length_ns, members in [
            (1, StepKind.DECODE, 500, (1, 99)),
            (2, StepKind.DECODE, 900, (1,)),
            (3, StepKind.DECODE, 700, (1,)),
            (4, StepKind.DECODE, 9_000, (98,)),
            (5, StepKind.PREFILL, 50, (1,)),
        ]
    ]
    watched.tracker.feed(DECODE.value, steps, 0)
    [request] = watched.tracker.peek(watched.context.request_id, 0)
    [leg] = [leg for leg in request.legs if leg.process.role is DECODE]
    decode, prefill = leg.steps
    assert (decode.kind, decode.count, decode.total_ns) == (StepKind.DECODE, 3, 2_100)
    assert (decode.slowest_ns, decode.slowest_number) == (900, 2)
    assert (prefill.kind, prefill.count, prefill.attempt) == (StepKind.PREFILL, 1, 1)


def test_clock_samples_reach_the_legs_of_their_ring() -> None:
    watched = Watched().feed(until(pd_moments(), 8_000))
    sample = ClockRecord(t_ns=5, peer="p", peer_clock_id="host-9", offset_ns=40, error_ns=3)
    watched.tracker.feed(DECODE.value, [sample], 0)
    [request] = watched.tracker.peek(watched.context.request_id, 0)
    clocks = {leg.process.role: leg.clock for leg in request.legs}
    assert clocks[TRANSFER] is clocks[GATEWAY] is None
    clock = clocks[DECODE]
    assert clock is not None
    offset = clock.at("host-9", 5)
    assert offset is not None and abs(offset.offset_ns - 40) <= offset.error_ns


def test_outcome_is_shown_while_the_legs_still_finish() -> None:
    watched = Watched().feed(until(pd_moments(), 5_000))
    watched.feed(
        [
            aborted(GATEWAY, 5_000, "cancelled", "client_gone", "client"),
            completed(5_100, "cancelled", "client_gone", "client", 499),
        ]
    )
    watched.tracker.feed(GATEWAY.value, [EndRecord(key=1, t_ns=0)], START_NS)
    assert watched.tracker.finished(START_NS) == []
    seen = watched.at(5_200)
    assert (seen.stage, seen.ended) == (None, "cancelled")


def test_asking_what_is_finished_looks_only_at_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = RequestTracker(grace_ns=1_000)
    for role in Role:
        tracker.add_ring(role.value, process(role))
    ids = SequentialIds()
    opened = [
        OpenRecord(key=key, t_ns=0, context=RequestContext.create(ids=ids))
        for key in range(1, 1_001)
    ]
    tracker.feed(GATEWAY.value, opened, 0)
    assert tracker.finished(0) == []
    looked: list[OpenRequest] = []
    judge = tracker._verdict  # pyright: ignore[reportPrivateUsage]

    def watched(
        request: OpenRequest, instances: Mapping[str, str], now_ns: int, halted: Halted
    ) -> Verdict:
        looked.append(request)
        return judge(request, instances, now_ns, halted)

    monkeypatch.setattr(tracker, "_verdict", watched)
    assert tracker.finished(10_000_000) == []
    assert looked == []
    done = msgspec.structs.replace(record(Mark.COMPLETED, 5), key=17)
    tracker.feed(GATEWAY.value, [done, EndRecord(key=17, t_ns=6)], 10_000_000)
    assert len(tracker.finished(10_000_000)) == 1
    assert len(looked) == 1
