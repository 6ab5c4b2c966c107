"""The transfer process's loop: order, marks, answers, and what it forgets."""

from __future__ import annotations

from typing import Any

import msgspec.structs
import pytest

from pdtrace.ring.records import ClockRecord, MarkRecord
from pdtrace.stages import Mark, Outcome, WaitReason
from server.config import Settings
from server.kv.pool import PoolDescriptor
from server.kv.transfer import worker as worker_module
from server.kv.transfer.base import PageCopy, Reason, TransferError
from server.kv.transfer.memory import Abort, Delay, Fate, copy_all
from server.wire.messages import (
    AnyMessage,
    CancelCopies,
    CopiesDrained,
    CopyDone,
    CopyFailed,
    Handoff,
    HeartbeatAck,
    Peer,
    PoolRef,
)
from tests.support.transfer_rig import (
    DECODE,
    DESTINATION,
    PAGE,
    PREFILL,
    SOURCE,
    MakeRig,
    cancel,
    done,
    drained,
    job,
    register,
)


def test_a_handoff_is_copied_job_by_job_and_both_legs_are_told(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.transfer.memory(SOURCE)[:] = bytes(range(8 * PAGE // 2)) * 2
    rig.step(job(0, pages=(0, 1)), job(1, pages=(2,)), job(2, pages=(3,), last=True), times=3)
    answers = [done(0, last=False, num_pages=2), done(1, last=False), done(2, last=True)]
    assert rig.mail.to(DECODE) == answers
    assert rig.mail.to(PREFILL) == answers
    assert rig.transfer.memory(DESTINATION)[: 4 * PAGE] == rig.transfer.memory(SOURCE)[: 4 * PAGE]
    assert rig.worker.copied_bytes == 4 * PAGE


def test_marks_tell_what_was_queued_copied_and_landed(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.step(job(0, pages=(0, 1)), job(1, pages=(2,), last=True), times=2)
    queued, started, finished = Mark.COPY_QUEUED, Mark.COPY_STARTED, Mark.COPY_FINISHED
    assert rig.marks() == [
        (queued, (0, 2, 2 * PAGE, 1)),
        (queued, (1, 1, PAGE, 2)),
        (started, (0,)),
        (finished, (0, 2 * PAGE)),
        (started, (1,)),
        (finished, (1, PAGE)),
        (Mark.KV_LANDED, (3 * PAGE,)),
    ]
    assert rig.traces_are_ended()
    assert rig.worker.jobs.num_handoffs == 0


def test_times_are_those_of_arrival_start_and_observed_end(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Delay(2.0))
    rig.mail.put(job(last=True))
    arrived_ns = rig.clock.monotonic_ns()
    rig.clock.advance(s=1)
    rig.step()
    rig.clock.advance(s=2)
    rig.step()
    by_mark = {r.mark: r.t_ns - arrived_ns for r in rig.read() if isinstance(r, MarkRecord)}
    assert by_mark == {
        Mark.COPY_QUEUED: 0,
        Mark.COPY_STARTED: 1_000_000_000,
        Mark.COPY_FINISHED: 3_000_000_000,
        Mark.KV_LANDED: 3_000_000_000,
    }


def test_decode_is_told_only_after_the_landing_was_recorded(make_rig: MakeRig) -> None:
    rig = make_rig()
    seen: list[list[Mark]] = []
    send = rig.mail.send

    def spying_send(endpoint: str, message: AnyMessage) -> bool:
        seen.append([mark for mark, _ in rig.marks()])
        return send(endpoint, message)

    rig.mail.send = spying_send  # type: ignore[method-assign]
    rig.step(job(last=True))
    assert len(seen) == 2
    assert all(Mark.KV_LANDED in marks for marks in seen)


def test_handoffs_take_turns_in_order_of_arrival_and_say_who_is_ahead(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Delay(1.0))
    rig.step(
        job(0, handoff="a"),
        job(0, handoff="b", last=True, pages=(1,)),
        job(1, handoff="a", last=True, pages=(2,)),
        job(0, handoff="c", last=True, pages=(3,)),
    )
    waits = [values for mark, values in rig.marks() if mark is Mark.WAITING]
    assert waits == [
        ("transfer.queue", WaitReason.BANDWIDTH, 1, 0, 1, 1, "req-a", None),
        ("transfer.queue", WaitReason.COPY_QUEUE, 1, 0, 1, 3, "req-a", "req-a\x1freq-b"),
    ]
    for _ in range(4):
        rig.clock.advance(s=1)
        rig.step(times=2)
    order = [
        (message.handoff_id, message.index)
        for message in rig.mail.to(DECODE)
        if isinstance(message, CopyDone)
    ]
    assert order == [("a", 0), ("b", 0), ("a", 1), ("c", 0)]
    assert rig.worker.jobs.is_idle
    assert rig.traces_are_ended()


def test_another_route_is_served_while_one_is_stuck(make_rig: MakeRig) -> None:
    rig = make_rig(lambda copy: Fate.LOSE if copy.address else Fate.COPY)
    rig.step(job(handoff="stuck", last=True, address="10.0.0.9:1"), job(last=True), times=2)
    assert rig.mail.to(DECODE) == [done(0, last=True)]
    assert rig.worker.jobs.num_handoffs == 1
    assert rig.progress.state.busy


def test_an_injected_delay_holds_the_last_job_alone(make_rig: MakeRig) -> None:
    rig = make_rig(allow_faults=True)
    faults = {"transfer": 250, "decode.queue": 10_000}
    rig.step(job(0, faults=faults), job(1, last=True, faults=faults), times=2)
    rig.step(job(0, handoff="b", last=True), times=2)
    assert rig.mail.to(DECODE) == [done(0, last=False), done(0, last=True, handoff="b")]
    waits = [values for mark, values in rig.marks() if mark is Mark.WAITING]
    assert [values[:2] for values in waits] == [("transfer.queue", WaitReason.INJECTED)]
    rig.clock.advance(ms=249)
    rig.step(times=2)
    assert len(rig.mail.to(DECODE)) == 2
    rig.clock.advance(ms=1)
    rig.step(times=2)
    assert rig.mail.to(DECODE)[2:] == [done(1, last=True)]


def test_faults_do_nothing_in_a_server_that_does_not_allow_them(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.step(job(last=True, faults={"transfer": 60_000}))
    assert rig.mail.to(DECODE) == [done(0, last=True)]


def test_a_failed_copy_ends_its_handoff_on_both_sides(make_rig: MakeRig) -> None:
    rig = make_rig(lambda copy: Abort(Reason.PEER_LOST) if copy.index == 1 else Fate.COPY)
    rig.step(job(0), job(1, pages=(1,)), job(2, pages=(2,), last=True), times=4)
    failed = CopyFailed(
        handoff_id="a", index=1, reason="peer_lost", message="scripted abort", settled=True
    )
    assert rig.mail.to(PREFILL) == [done(0, last=False), failed]
    assert rig.mail.to(DECODE) == [done(0, last=False), failed]
    assert rig.marks()[-1] == (Mark.ABORTED, (Outcome.FAILED, "peer_lost", "transfer-0"))
    assert Mark.KV_LANDED not in [mark for mark, _ in rig.marks()]
    assert rig.traces_are_ended()
    assert (rig.worker.jobs.num_handoffs, rig.worker.jobs.num_waiting) == (0, 0)
    rig.step(job(3), times=2)
    assert rig.worker.ignored["late"] == 1


def test_decode_is_not_told_while_its_pages_may_still_be_written(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Abort(Reason.TRANSFER_TIMEOUT, settled=False))
    rig.step(job(last=True))
    assert rig.mail.to(DECODE) == []
    assert [type(message) for message in rig.mail.to(PREFILL)] == [CopyFailed]
    assert rig.marks()[-1] == (
        Mark.ABORTED,
        (Outcome.TIMED_OUT, "transfer_timeout", "transfer-0"),
    )


def test_an_unknown_pool_fails_the_copy_with_a_clear_message(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.step(job(last=True, source=PoolRef(owner="prefill-9", incarnation="p")))
    [failed] = rig.mail.to(DECODE)
    assert isinstance(failed, CopyFailed)
    assert failed.reason == "unknown_pool"
    assert "prefill-9" in failed.message


def test_corrupt_bytes_are_a_failure(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Fate.CORRUPT)
    rig.step(job(last=True))
    [failed] = rig.mail.to(DECODE)
    assert isinstance(failed, CopyFailed)
    assert failed.reason == "checksum_mismatch"


def test_a_pool_of_a_restarted_worker_replaces_the_old_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    reborn = Peer(instance="prefill-0", endpoint="ipc:///p0", incarnation="p2")
    rig.step(register(reborn), job(handoff="old", last=True))
    [failed] = rig.mail.to(PREFILL)
    assert isinstance(failed, CopyFailed)
    rig.step(job(last=True, source=PoolRef(owner="prefill-0", incarnation="p2")))
    assert rig.mail.to(DECODE)[-1] == done(0, last=True)


def test_a_pool_that_cannot_be_mapped_is_logged_once_and_harms_nobody(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()

    def refuse(_ref: PoolRef, _pool: PoolDescriptor) -> None:
        raise TransferError(Reason.UNKNOWN_POOL, "pool of prefill-7 cannot be mapped: gone")

    monkeypatch.setattr(rig.transfer, "register", refuse)
    other = Peer(instance="prefill-7", endpoint="ipc:///p7", incarnation="x")
    for _ in range(3):
        rig.step(register(other))
    assert [r.message for r in caplog.records] == ["pool of prefill-7 cannot be mapped: gone"]
    rig.step(job(last=True))
    assert rig.mail.to(DECODE) == [done(0, last=True)]


def test_a_cancelled_handoff_is_drained_and_nothing_is_copied_afterwards(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(lambda _copy: Fate.LOSE)
    before = bytes(rig.transfer.memory(DESTINATION))
    rig.step(job(0), job(1, pages=(1,), last=True))
    rig.step(cancel("a", DECODE))
    assert rig.mail.sent == [(DECODE.endpoint, drained("a"))]
    assert rig.marks()[-1] == (Mark.ABORTED, (Outcome.CANCELLED, "cancelled", "decode-0"))
    assert rig.traces_are_ended()
    rig.transfer.script = copy_all
    rig.step(job(2), times=3)
    assert rig.worker.ignored["late"] == 1
    assert rig.transfer.memory(DESTINATION) == before
    assert rig.worker.jobs.num_handoffs == 0


def test_both_legs_may_ask_for_the_drain_and_ask_again(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Fate.LOSE)
    rig.step(job(last=True))
    rig.step(cancel("a", DECODE), cancel("a", PREFILL))
    rig.step(cancel("a", DECODE))
    assert rig.mail.to(PREFILL) == [drained("a")]
    assert rig.mail.to(DECODE) == [drained("a")] * 2


def test_a_drain_before_the_first_job_keeps_it_from_ever_running(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.step(cancel("a", DECODE))
    assert rig.mail.to(DECODE) == [drained("a")]
    rig.step(job(last=True), times=2)
    assert rig.worker.ignored["late"] == 1
    assert ("submit", "a", 0) not in rig.transfer.log


def test_a_cancel_after_the_landing_is_answered(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.step(job(last=True))
    rig.step(cancel("a", PREFILL))
    assert rig.mail.to(PREFILL) == [done(0, last=True), drained("a")]
    assert Mark.ABORTED not in [mark for mark, _ in rig.marks()]


def test_repeated_jobs_are_ignored_and_counted(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.step(job(0), job(0), times=2)
    rig.step(job(1, last=True, pages=(1,)), times=2)
    rig.step(job(1, last=True, pages=(1,)), times=2)
    assert rig.mail.to(DECODE) == [done(0, last=False), done(1, last=True)]
    assert rig.worker.ignored == {"duplicate": 1, "late": 1}


def test_a_prefill_worker_that_asks_hears_how_many_of_its_own_jobs_have_come(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(lambda _copy: Fate.LOSE)
    rig.step(job(0), job(1), job(0, handoff="b"), job(0, last=True, handoff="over"))
    rig.step(cancel("over", DECODE), times=2)
    for asker, jobs in ((PREFILL, {"a": 2, "b": 1}), (DECODE, {})):
        rig.mail.sent.clear()
        rig.step(CancelCopies(handoff_id="known?", reply_to=asker, ask_jobs=True))
        [answer] = rig.mail.to(asker)
        assert isinstance(answer, CopiesDrained)
        assert answer.jobs == jobs
    rig.mail.sent.clear()
    rig.step(cancel("known?", PREFILL))
    assert rig.mail.to(PREFILL) == [drained("known?")]  # who does not ask is not told


def test_a_job_sent_again_is_run_by_the_process_that_lacked_it_alone(make_rig: MakeRig) -> None:
    rig = make_rig()
    again = msgspec.structs.replace(job(0, last=True), again_to="the one before")
    rig.step(again, times=2)
    assert rig.worker.ignored == {"stale": 1}
    assert rig.worker.jobs.num_handoffs == 0
    rig.step(msgspec.structs.replace(again, again_to="t"), times=2)
    assert rig.mail.to(DECODE) == [done(0, last=True)]


@pytest.mark.parametrize("running", [False, True])
def test_a_missing_job_fails_the_handoff_once_nothing_runs(
    make_rig: MakeRig, running: bool
) -> None:
    rig = make_rig(lambda _copy: Fate.LOSE)
    if running:
        rig.step(job(0))
    rig.step(job(2, last=True), times=2)
    for peer in (PREFILL, DECODE):
        [failed] = rig.mail.to(peer)
        assert isinstance(failed, CopyFailed)
        assert failed.reason == "jobs_missing"
        assert f"job {int(running)} was expected" in failed.message
    assert (("cancel", "a", None) in rig.transfer.log) == running
    assert rig.traces_are_ended()
    assert rig.worker.jobs.is_idle


def test_messages_that_do_not_belong_here_are_counted(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.step(Handoff(handoff_id="a", token_id=1, prompt_len=1, prompt_digest="", cached_tokens=0))
    assert rig.worker.ignored["unexpected"] == 1


def test_an_unreachable_leg_is_counted_and_the_other_one_told(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.mail.gone.add(PREFILL.endpoint)
    rig.step(job(last=True))
    assert rig.worker.undelivered == 1
    assert rig.mail.to(DECODE) == [done(0, last=True)]


def test_a_handoff_whose_prefill_is_gone_is_forgotten_in_the_end(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.step(job(0))
    deadlines = Settings().deadlines
    rig.clock.advance(s=deadlines.prefill_compute_s + deadlines.transfer_s - 1)
    rig.step()
    assert rig.worker.jobs.num_handoffs == 1
    rig.clock.advance(s=2)
    rig.step()
    assert rig.worker.jobs.num_handoffs == 0
    assert rig.marks()[-1] == (Mark.ABORTED, (Outcome.LOST, "abandoned", "prefill-0"))
    assert rig.traces_are_ended()
    rig.step(job(1, last=True))
    assert rig.worker.ignored["late"] == 1


def test_memory_of_handoffs_is_bounded(make_rig: MakeRig) -> None:
    rig = make_rig()
    for number in range(300):
        rig.step(job(handoff=f"h-{number}", last=True))
    assert rig.worker.jobs.num_handoffs == 0
    assert rig.worker.jobs.is_idle
    assert len(rig.mail.to(DECODE)) == 300
    assert rig.traces_are_ended()


def test_giving_up_drains_what_runs_before_the_legs_are_told(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Fate.LOSE)
    rig.step(job(handoff="runs"), job(handoff="waits"))
    rig.worker.give_up_rest()
    assert [m.handoff_id for m in rig.mail.to(DECODE) if isinstance(m, CopyFailed)] == ["waits"]
    rig.step()
    failed = [m for m in rig.mail.to(DECODE) if isinstance(m, CopyFailed)]
    assert [(m.handoff_id, m.reason) for m in failed] == [
        ("waits", "transfer_stopping"),
        ("runs", "transfer_stopping"),
    ]
    assert rig.traces_are_ended()
    assert rig.worker.jobs.is_idle


def test_a_stopping_process_goes_on_with_open_handoffs_and_refuses_new_ones(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.step(job(handoff="begun"))
    rig.worker.stop_accepting()
    assert not rig.worker.is_finished
    rig.step(job(handoff="new"), job(1, handoff="begun", last=True))
    for peer in (PREFILL, DECODE):
        [failed] = [m for m in rig.mail.to(peer) if isinstance(m, CopyFailed)]
        assert (failed.handoff_id, failed.reason) == ("new", "transfer_stopping")
        assert failed.settled
        done = [m for m in rig.mail.to(peer) if isinstance(m, CopyDone)]
        assert [(m.handoff_id, m.index) for m in done] == [("begun", 0), ("begun", 1)]
    assert rig.worker.is_finished
    assert rig.traces_are_ended()


def test_a_turn_that_raises_fails_what_is_at_hand_and_the_next_one_is_served(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    poll = rig.transfer.poll

    def broken_poll(_timeout_s: float) -> list[Any]:
        monkeypatch.setattr(rig.transfer, "poll", poll)
        raise RuntimeError("scripted")

    monkeypatch.setattr(rig.transfer, "poll", broken_poll)
    rig.mail.put(job(last=True))
    worker_module.take_step(rig.worker, 0.0)
    rig.step()
    [failed] = rig.mail.to(DECODE)
    assert isinstance(failed, CopyFailed)
    assert failed.reason == "internal"
    rig.step(job(handoff="b", last=True))
    assert rig.mail.to(DECODE)[1:] == [done(0, last=True, handoff="b")]


@pytest.mark.case("XFER-01")
def test_a_copy_that_never_ends_times_out_by_itself_and_both_legs_are_told(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(lambda copy: Fate.LOSE if copy.index == 2 else Fate.COPY)
    rig.step(*(job(index, pages=(index,), last=index == 7) for index in range(8)), times=4)
    rig.clock.advance(s=19.9)
    rig.step(times=2)
    assert rig.mail.to(DECODE) == [done(0, last=False), done(1, last=False)]
    rig.clock.advance(s=0.2)
    rig.step(times=2)
    for leg in (PREFILL, DECODE):
        [failed] = rig.mail.to(leg)[2:]
        assert failed == CopyFailed(
            handoff_id="a",
            index=2,
            reason="transfer_timeout",
            message="copy job 2 did not end in 20 s",
            settled=True,
        )
    assert rig.marks()[-1] == (
        Mark.ABORTED,
        (Outcome.TIMED_OUT, "transfer_timeout", "transfer-0"),
    )
    assert rig.traces_are_ended()
    rig.step(job(handoff="b", last=True), times=2)
    assert rig.mail.to(DECODE)[3:] == [done(0, last=True, handoff="b")]


def test_time_in_the_queue_is_not_charged_to_the_copy(make_rig: MakeRig) -> None:
    rig = make_rig(lambda copy: Delay(15.0) if copy.handoff_id == "a" else Delay(10.0))
    rig.step(job(last=True), job(handoff="b", last=True))
    rig.clock.advance(s=15)
    rig.step(times=2)
    rig.clock.advance(s=10)
    rig.step(times=2)
    assert rig.mail.to(DECODE) == [done(0, last=True), done(0, last=True, handoff="b")]


def test_a_copy_that_arrives_short_fails_both_legs(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Fate.SHORT)
    rig.step(job(pages=(0, 1, 2), last=True))
    for leg in (PREFILL, DECODE):
        [failed] = rig.mail.to(leg)
        assert failed == CopyFailed(
            handoff_id="a",
            index=0,
            reason="transfer_incomplete",
            message=f"{2 * PAGE} of {3 * PAGE} bytes of copy job 0 arrived",
            settled=True,
        )
    assert rig.marks()[-1][1] == (Outcome.FAILED, "transfer_incomplete", "transfer-0")
    assert rig.worker.copied_bytes == 0
    assert rig.traces_are_ended()


@pytest.mark.case("XFER-01", "XFER-07")
def test_a_job_that_cannot_be_started_fails_its_handoff_with_the_type_of_what_was_raised(
    make_rig: MakeRig,
) -> None:
    def script(copy: PageCopy) -> Fate:
        if copy.handoff_id == "a" and copy.index == 2:
            raise OverflowError("scripted")
        return Fate.COPY

    rig = make_rig(script)
    jobs = [job(index, pages=(index,), last=index == 7) for index in range(8)]
    rig.step(*jobs, job(handoff="b", last=True), times=6)
    for leg in (PREFILL, DECODE):
        messages = [m for m in rig.mail.to(leg) if getattr(m, "handoff_id", "") == "a"]
        assert messages[:2] == [done(0, last=False), done(1, last=False)]
        assert messages[2:] == [
            CopyFailed(
                handoff_id="a",
                index=2,
                reason="internal",
                message="the transfer failed: OverflowError: scripted",
                settled=True,
            )
        ]
    assert done(0, last=True, handoff="b") in rig.mail.to(DECODE)
    aborts = [values for mark, values in rig.marks() if mark is Mark.ABORTED]
    assert aborts == [(Outcome.FAILED, "OverflowError", "transfer-0")]
    assert rig.traces_are_ended()


def test_progress_says_busy_only_while_there_are_jobs(make_rig: MakeRig) -> None:
    rig = make_rig(lambda _copy: Delay(1.0))
    assert not rig.progress.state.busy
    rig.step(job(last=True), job(handoff="b", last=True))
    state = rig.progress.state
    assert (state.busy, state.load.running, state.load.waiting) == (True, 1, 1)
    for _ in range(2):
        rig.clock.advance(s=1)
        rig.step(times=2)
    assert not rig.progress.state.busy


def test_answers_to_its_beats_become_clock_samples(make_rig: MakeRig) -> None:
    rig = make_rig()
    sent_ns = rig.clock.monotonic_ns()
    rig.round_trips.sending(1, sent_ns)
    rig.clock.advance(ms=2)
    answer = HeartbeatAck(
        incarnation="t",
        seq=1,
        sent_ns=sent_ns,
        received_ns=sent_ns + 5_000_000_000,
        answered_ns=sent_ns + 5_000_000_000,
        clock_id="host-a/boot-1",
        gateway=Peer(instance="gateway-0", endpoint="ipc:///g", incarnation="g"),
    )
    rig.step(answer, answer)
    samples = [record for record in rig.read() if isinstance(record, ClockRecord)]
    assert [(s.peer_clock_id, s.t_ns - sent_ns) for s in samples] == [("host-a/boot-1", 1_000_000)]
    assert abs(samples[0].offset_ns - 5_000_000_000) <= samples[0].error_ns
    assert rig.round_trips.ignored == {"unknown": 1}
    assert not rig.worker.ignored
