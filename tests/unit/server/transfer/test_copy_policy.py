"""Which copy jobs start, and what is said of those that wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import WaitReason
from server.kv.transfer.policy import JobView, JobWait, plan_copies

NOW_NS = 1_000


def job(handoff: str, index: int = 0, route: str | None = None, held_until_ns: int = 0) -> JobView:
    return JobView(f"h-{handoff}", f"r-{handoff}", index, route, held_until_ns)


def test_an_idle_transfer_starts_the_first_job() -> None:
    plan = plan_copies([job("a"), job("b")], [], NOW_NS)
    assert plan.start == (job("a"),)
    assert plan.waits == (JobWait("h-b", WaitReason.BANDWIDTH, 1, ("r-a",)),)
    assert plan.wake_ns is None


def test_position_counts_the_jobs_of_others_ahead() -> None:
    plan = plan_copies([job("b"), job("b", 1), job("c")], [job("a", 4)], NOW_NS)
    assert plan.start == ()
    assert plan.waits == (
        JobWait("h-b", WaitReason.BANDWIDTH, 1, ("r-a",)),
        JobWait("h-c", WaitReason.COPY_QUEUE, 3, ("r-a", "r-b")),
    )


def test_a_job_behind_its_own_copy_waits_for_the_path_and_for_nobody() -> None:
    plan = plan_copies([job("a", 1), job("b")], [job("a", 0)], NOW_NS)
    assert plan.start == ()
    assert plan.waits == (
        JobWait("h-a", WaitReason.BANDWIDTH, 0),
        JobWait("h-b", WaitReason.COPY_QUEUE, 2, ("r-a",)),
    )


def test_a_busy_route_does_not_stop_another() -> None:
    plan = plan_copies([job("b", route="x"), job("c", route="y")], [job("a", route="x")], NOW_NS)
    assert plan.start == (job("c", route="y"),)
    assert plan.waits == (JobWait("h-b", WaitReason.BANDWIDTH, 1, ("r-a",)),)


def test_a_held_job_lets_others_pass_and_says_when_it_is_due() -> None:
    held = job("a", 2, held_until_ns=NOW_NS + 5)
    plan = plan_copies([held, job("b")], [], NOW_NS)
    assert plan.start == (job("b"),)
    assert plan.waits == (JobWait("h-a", WaitReason.INJECTED),)
    assert plan.wake_ns == NOW_NS + 5
    assert plan_copies([held], [], NOW_NS + 5).start == (held,)


def test_a_job_behind_a_held_one_of_its_handoff_waits_for_it() -> None:
    plan = plan_copies([job("a", held_until_ns=NOW_NS + 5), job("a", 1), job("b")], [], NOW_NS)
    assert plan.start == (job("b"),)
    assert plan.waits == (JobWait("h-a", WaitReason.INJECTED),)


JOBS = st.lists(
    st.builds(
        job,
        handoff=st.sampled_from("abcd"),
        route=st.sampled_from([None, "x"]),
        held_until_ns=st.sampled_from([0, NOW_NS + 1]),
    ),
    max_size=8,
)


@given(waiting=JOBS, running=JOBS.map(lambda jobs: jobs[:2]))
def test_starts_never_share_a_route_or_a_handoff_and_work_is_never_left_idle(
    waiting: list[JobView], running: list[JobView]
) -> None:
    waiting = [view._replace(job_index=number) for number, view in enumerate(waiting)]
    plan = plan_copies(waiting, running, NOW_NS)
    busy = [*running, *plan.start]
    for view in plan.start:
        assert view.held_until_ns <= NOW_NS
        assert [other.route for other in busy].count(view.route) == 1
        assert [other.handoff_id for other in busy].count(view.handoff_id) == 1
        earlier = waiting[: waiting.index(view)]
        assert view.handoff_id not in {other.handoff_id for other in earlier}, "in order"
    first = {view.handoff_id: view for view in reversed(waiting)}
    running_handoffs = {other.handoff_id for other in running}
    for view in first.values():
        if view.held_until_ns <= NOW_NS and view.handoff_id not in running_handoffs:
            assert view.route in {other.route for other in busy}
        if view not in plan.start:
            assert view.handoff_id in {wait.handoff_id for wait in plan.waits}, "told why"
    named = [wait.handoff_id for wait in plan.waits]
    assert len(named) == len(set(named))
