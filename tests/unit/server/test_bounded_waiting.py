"""What waits in a worker is bounded: in number, in memory, and in how often others go first; and a
worker that stops refuses what only waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import GapCause, Mark, Outcome, Role
from server.admission import MAX_PASSES, Candidate, FifoAdmission, PageBudget
from server.colocated.policy import MAX_WAITED
from server.config import Deadlines, Settings
from server.engine.fake import StepShape
from server.preemption import SavedSequence, dropped_for
from server.request import DecodeState, PrefillState
from server.serve import stop_worker
from tests.support.scheduler_bus import PAGE, Cluster, Result, by_kind

MakeCluster = Callable[..., Cluster]
LEGS = ("prefill-0", "decode-0")


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "model": "fake",
        "page_size": PAGE,
        "prefill_pages": 64,
        "decode_pages": 64,
        "prefill_budget": 8,
        "reserve_output_tokens": 4,
        "max_running": 4,
        "allow_faults": True,
        **changes,
    }
    return Settings(**values)  # pyright: ignore[reportArgumentType]


def serves(cluster: Cluster) -> None:
    """One more request is served."""
    served = cluster.submit(prompt(7, first=90))
    cluster.settle()
    assert cluster.results[served].tokens == cluster.expected(prompt(7, first=90), 4)


# -- the number of those that wait ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "by"), [("decode.reserve", "decode-0"), ("prefill.queue", "prefill-0")]
)
def test_worker_refuses_more_than_may_wait_at_once_on_both_legs(
    make_cluster: MakeCluster, stage: str, by: str
) -> None:
    cluster = make_cluster(settings=settings(max_waiting=3))
    handoffs = [cluster.submit(prompt(6, first=i), faults={stage: 2000}) for i in range(5)]
    cluster.run_for(20)
    refused = [h for h in handoffs if cluster.results[h].closed]
    assert refused == handoffs[3:]
    for handoff_id in refused:
        for leg in LEGS:
            (closed,) = cluster.results[handoff_id].closed[leg]
            assert (closed.outcome, closed.reason) == ("rejected", "overloaded")
    message = cluster.results[refused[0]].closed["decode-0"][0].message
    assert message.endswith("3 requests wait, the limit is 3")
    aborted = [r.values[:2] for r in cluster.marks(Role.DECODE) if r.mark is Mark.ABORTED]
    assert set(aborted) == {(Outcome.REJECTED, "overloaded")}
    cluster.settle()
    for number, handoff_id in enumerate(handoffs[:3]):
        expected = cluster.expected(prompt(6, first=number), 4)
        assert cluster.results[handoff_id].tokens == expected, by
    serves(cluster)


def test_colocated_worker_refuses_more_than_may_wait(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(colocated=True, settings=settings(max_waiting=2, max_running=1))
    handoffs = [cluster.submit(prompt(6), max_tokens=8) for _ in range(6)]
    cluster.settle()
    outcomes = [cluster.results[handoff_id].outcome("worker-0") for handoff_id in handoffs]
    assert outcomes == ["completed"] * 2 + ["rejected"] * 4
    serves(cluster)


@pytest.mark.parametrize("colocated", [True, False])
def test_requests_that_come_during_a_step_and_are_refused_are_recorded_to_their_end_alone(
    make_cluster: MakeCluster, colocated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What kept a message waiting is said of a request that goes on."""
    worker = "worker-0" if colocated else "decode-0"
    came: list[str] = []

    def step_s(shape: StepShape) -> float:
        if not came and shape.num_tokens == shape.num_seqs:  # of a batch
            came.extend(cluster.submit(prompt(6, first=i), max_tokens=4) for i in range(4))
            cluster.clock.advance(ms=5)
            for _ in came:
                cluster.deliver(("gateway", worker))
        return 0.1

    cluster = make_cluster(
        colocated=colocated, settings=settings(max_waiting=1, max_running=1), step_time=step_s
    )
    cluster.submit(prompt(5), max_tokens=8)
    cluster.settle()
    outcomes = [cluster.results[handoff_id].outcome(worker) for handoff_id in came]
    assert outcomes.count("rejected") >= 2
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    serves(cluster)


@pytest.mark.case("SCH-07")
def test_flood_over_a_small_queue_ends_every_request_once(make_cluster: MakeCluster) -> None:
    """Sent = finished + refused, and nobody waits at the end."""
    cluster = make_cluster(settings=settings(max_waiting=2), step_ms=1)
    handoffs: list[str] = []
    for burst in range(100):
        handoffs += [cluster.submit(prompt(3 + i, first=burst), max_tokens=2) for i in range(20)]
        cluster.run_for(4)
    cluster.settle()
    outcomes = [
        frozenset(cluster.results[handoff_id].outcome(leg) for leg in LEGS)
        for handoff_id in handoffs
    ]
    assert len(outcomes) == 2000
    finished = outcomes.count(frozenset({"completed"}))
    assert finished >= 100
    assert finished + outcomes.count(frozenset({"rejected"})) == 2000
    for worker in (cluster.prefill, cluster.decode):
        assert worker.report().waiting == 0
    serves(cluster)


# -- who goes first -------------------------------------------------------------------------------


@dataclass(slots=True)
class Queued:
    candidate: Candidate
    stays: int
    passed_by: int = 0


@given(
    rows=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 6)), min_size=1, max_size=40),
    per_turn=st.integers(1, 4),
)
def test_every_request_that_fits_the_pool_gets_its_pages_however_many_small_ones_come(
    rows: list[tuple[int, int]], per_turn: int
) -> None:
    """Requests of 1 to 10 of 10 pages arrive and leave; small ones keep coming until all are in."""
    total = 10
    arriving = [(f"r{i}", needed, stays) for i, (needed, stays) in enumerate(rows)]
    waiting: list[Queued] = []
    holding: list[tuple[int, int]] = []  # pages and the turn in which they come free
    served: set[str] = set()
    passed_small = 0
    for turn in range(2000):
        for _ in range(per_turn):
            name, needed, stays = arriving.pop(0) if arriving else (f"s{turn}", 1, 3)
            candidate = Candidate(handoff_id=name, request_id=name, needed=needed)
            waiting.append(Queued(candidate, stays))
        holding = [(pages, until) for pages, until in holding if until > turn]
        admission = FifoAdmission(PageBudget(free=total - sum(p for p, _ in holding), total=total))
        left: list[Queued] = []
        for entry in waiting:
            if admission.offer(entry.candidate, len(left)):
                served.add(entry.candidate.request_id)
                holding.append((entry.candidate.needed, turn + entry.stays))
                for other in left:
                    other.passed_by += 1
                passed_small += bool(left)
            else:
                left.append(entry)
        for entry in left:
            passes = admission.passes.get(entry.candidate.handoff_id, entry.candidate.passes)
            entry.candidate = replace(entry.candidate, passes=passes)
            assert passes <= MAX_PASSES
        waiting = left
        assert sum(p for p, _ in holding) <= total
        if not arriving and {f"r{i}" for i in range(len(rows))} <= served:
            return
    raise AssertionError(f"never served: {sorted({f'r{i}' for i in range(len(rows))} - served)}")


def test_small_reservation_goes_past_a_big_one_and_the_big_one_is_not_starved(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings(decode_pages=12, max_running=2), step_ms=1)
    cluster.submit(prompt(20), max_tokens=20)
    cluster.run_for(20)
    big = cluster.submit(prompt(40), max_tokens=2)  # 11 of 12 pages
    order: list[str] = []
    small: list[str] = []
    for number in range(200):
        small.append(cluster.submit(prompt(3, first=number), max_tokens=2))
        cluster.run_for(3)
        order += [h for h in (big, *small) if cluster.results[h].closed and h not in order]
        if big in order:
            break
    assert 1 <= order.index(big) <= 1 + 2 * MAX_PASSES
    cluster.settle()
    assert cluster.results[big].tokens == cluster.expected(prompt(40), 2)
    for number, handoff_id in enumerate(small):
        assert cluster.results[handoff_id].tokens == cluster.expected(prompt(3, first=number), 2)


@pytest.mark.case("SCH-01")
@pytest.mark.parametrize(
    ("chunked", "bound_ms"), [(True, 8 + 1), (False, (MAX_WAITED + 1) * 24 + 1)]
)
def test_running_streams_go_on_however_many_prompts_keep_coming(
    make_cluster: MakeCluster, chunked: bool, bound_ms: int
) -> None:
    """A step takes 1 ms for the batch and 1 ms for each prompt token: 8 of a chunk, 24 of a prompt.
    The time that prompts take from a stream is called theirs, and no decode step's."""
    cluster = make_cluster(
        colocated=True,
        settings=settings(chunked=chunked, gap_threshold_s=0.002, max_running=40),
        step_time=by_kind(decode=0.001, prompt_token=0.001),
    )
    streams = [cluster.submit(prompt(5, first=i), max_tokens=60) for i in range(2)]
    cluster.run_for(20)
    number = 0
    while any(cluster.colocated.legs.get(handoff_id) for handoff_id in streams):
        number += 1
        cluster.submit(prompt(24, first=number), max_tokens=1)
        cluster.step()
        assert number < 2000, "the streams stand still"
    cluster.settle()
    for records in cluster.marks_by_leg(Role.WORKER).values():
        gaps = [r.values for r in records if r.mark is Mark.TOKEN_GAP]
        if not gaps:
            continue
        assert max(round(1000 * float(str(gap[1])), 3) for gap in gaps) <= bound_ms
        assert {gap[2] for gap in gaps} == {GapCause.INTERFERING_PREFILL}
        assert len(gaps) >= 10
    serves(cluster)


# -- host memory ----------------------------------------------------------------------------------


def saved(name: str, admitted: int, pages: int) -> SavedSequence:
    return SavedSequence(handoff_id=name, admitted=admitted, pages=pages)


def test_what_fits_into_memory_is_kept() -> None:
    others = [saved("a", 1, 3), saved("b", 2, 3)]
    assert dropped_for(saved("c", 3, 4), others, max_pages=10) == ()


def test_youngest_is_dropped_first_be_it_the_one_that_comes_or_one_that_is_there() -> None:
    others = [saved("old", 1, 3), saved("young", 9, 3)]
    assert dropped_for(saved("new", 5, 4), others, max_pages=9) == ("young",)
    assert dropped_for(saved("new", 10, 4), others, max_pages=9) == ("new",)
    assert dropped_for(saved("new", 5, 4), others, max_pages=3) == ("young", "new")
    assert dropped_for(saved("new", 5, 4), [], max_pages=0) == ("new",)


@given(
    rows=st.lists(st.integers(1, 9), max_size=8),
    pages=st.integers(1, 9),
    at=st.integers(0, 8),
    limit=st.integers(0, 40),
)
def test_memory_is_never_exceeded_and_nobody_older_goes_before_a_younger_one(
    rows: list[int], pages: int, at: int, limit: int
) -> None:
    others = [saved(f"s{i}", 2 * i, n) for i, n in enumerate(rows)]
    victim = saved("victim", 2 * at + 1, pages)
    gone = dropped_for(victim, others, max_pages=limit)
    stay = [s for s in (*others, victim) if s.handoff_id not in gone]
    assert sum(s.pages for s in stay) <= limit
    left = {s.handoff_id: s.admitted for s in (*others, victim)}
    assert all(left[g] > s.admitted for g in gone for s in stay)
    if gone:  # one less would not have been enough
        last = next(s for s in (*others, victim) if s.handoff_id == gone[-1])
        assert sum(s.pages for s in stay) + last.pages > limit


def crowd(cluster: Cluster, name: str) -> tuple[list[Result], int, int]:
    """Four requests that want more pages than there are: what came of them, the most pages that
    were in host memory, and the most times that one's KV was computed again."""
    worker = cluster.workers[name]
    handoffs = [cluster.submit(prompt(8, first=i), max_tokens=24) for i in range(4)]
    most = again = 0
    for _ in range(2000):
        cluster.step()
        cluster.clock.advance(ms=1)
        kept = [leg.saved for leg in worker.legs if leg.saved is not None]
        most = max(most, sum(len(data) for data in kept) // worker.engine.layout.page_bytes)
        again = max([again, *(leg.recomputes for leg in worker.legs)])
        if not len(worker.legs):
            break
    cluster.settle()
    return [cluster.results[handoff_id] for handoff_id in handoffs], most, again


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("memory", [0, 4, 100])
def test_preempted_requests_beyond_host_memory_are_computed_again(
    make_cluster: MakeCluster, colocated: bool, memory: int
) -> None:
    """They end as if nothing had happened; the trace says how much was computed twice."""
    cluster = make_cluster(
        colocated=colocated,
        settings=settings(decode_pages=12, preempted_pages=memory, reserve_output_tokens=1),
    )
    name, role = ("worker-0", Role.WORKER) if colocated else ("decode-0", Role.DECODE)
    results, most, again = crowd(cluster, name)
    assert most <= memory
    assert {(r.outcome(name), r.reason(name)) for r in results} == {("completed", "completed")}
    for number, result in enumerate(results):
        assert result.tokens == cluster.expected(prompt(8, first=number), 24)
    legs = cluster.marks_by_leg(role).values()
    names = [[Mark(record.mark).name for record in records] for records in legs]
    resumed = [r.values for records in legs for r in records if r.mark is Mark.RESUMED]
    assert resumed
    for found in names:
        assert found.count("PREEMPTED") == found.count("RESUMED")
        assert found[-2:] == ["DECODE_FINISHED", "DECODE_RELEASED"]
    recomputed = [tokens for _, tokens in resumed if tokens is not None]
    assert all(isinstance(tokens, int) and tokens >= 8 for tokens in recomputed)
    assert bool(recomputed) == (again > 0) == (memory < 100)
    serves(cluster)


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("limit", [0, 1])
def test_kv_is_computed_again_a_bounded_number_of_times(
    make_cluster: MakeCluster, colocated: bool, limit: int
) -> None:
    cluster = make_cluster(
        colocated=colocated,
        settings=settings(
            decode_pages=12, preempted_pages=0, reserve_output_tokens=1, max_recomputes=limit
        ),
    )
    name = "worker-0" if colocated else "decode-0"
    results, _, again = crowd(cluster, name)
    assert again <= limit
    reasons = [(r.outcome(name), r.reason(name)) for r in results]
    assert reasons[0] == ("completed", "completed"), "the oldest is never preempted"
    assert set(reasons[1:]) <= {("completed", "completed"), ("failed", "host_memory")}
    assert limit or ("failed", "host_memory") in reasons
    for number, result in enumerate(results):
        assert result.tokens == cluster.expected(prompt(8, first=number), 24)[: len(result.tokens)]
    serves(cluster)


def test_recomputation_shares_the_steps_with_the_batch(make_cluster: MakeCluster) -> None:
    """A long one is computed in parts of the prompts' budget, and the others go on meanwhile."""
    cluster = make_cluster(
        settings=settings(decode_pages=24, preempted_pages=0, reserve_output_tokens=1)
    )
    cluster.submit(prompt(8), max_tokens=60)
    cluster.submit(prompt(28, first=5), max_tokens=24)
    last = cluster.submit(prompt(30, first=3), max_tokens=40)
    seen: dict[int, int] = {}  # positions computed again → tokens of the others
    for _ in range(3000):
        cluster.step()
        cluster.clock.advance(ms=1)
        leg = cluster.decode.legs.get(last)
        if leg is not None and (leg.state, leg.recomputes) == (DecodeState.RECOMPUTING, 1):
            others = [other.generation.num_tokens for other in cluster.decode.legs]
            seen[leg.recomputed] = sum(others) - leg.generation.num_tokens
    parts = sorted(seen)
    assert len(parts) >= 3
    assert max(b - a for a, b in pairwise([0, *parts])) <= 8, "more than the prompts' budget"
    assert seen[parts[-1]] > seen[parts[0]], "the others stand still"
    assert cluster.results[last].tokens == cluster.expected(prompt(30, first=3), 40)


# -- a worker that stops --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "stage"), [("decode-0", "decode.reserve"), ("prefill-0", "prefill.queue")]
)
def test_worker_that_stops_refuses_what_only_waits_at_once_and_finishes_the_rest(
    make_cluster: MakeCluster, stops: str, stage: str
) -> None:
    cluster = make_cluster(settings=settings())
    worker = cluster.workers[stops]
    waits = cluster.submit(prompt(6), faults={stage: 60_000})
    cluster.run_for(20)
    worker.stop_accepting()
    later = cluster.submit(prompt(6, first=3))
    cluster.run_for(20)
    for handoff_id in (waits, later):
        for leg in LEGS:
            (closed,) = cluster.results[handoff_id].closed[leg]
            assert (closed.outcome, closed.reason, closed.by) == ("rejected", "draining", stops)
    assert len(worker.legs) == 0


def test_prompt_that_is_under_way_is_finished_by_a_worker_that_stops(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings(), step_ms=1)
    under_way = cluster.submit(prompt(60))
    for _ in range(50):
        if any(leg.state is PrefillState.RUNNING for leg in cluster.prefill.legs):
            break
        cluster.step()
    cluster.prefill.stop_accepting()
    cluster.decode.stop_accepting()
    cluster.settle()
    assert cluster.results[under_way].tokens == cluster.expected(prompt(60), 4)


def test_worker_that_stops_waits_for_copies_that_read_its_memory(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(settings=settings(deadlines=Deadlines(drain_s=2)))
    cluster.transfer.silent = True
    copied = cluster.submit(prompt(9))
    cluster.run_for(20)
    assert [leg.state for leg in cluster.prefill.legs] == [PrefillState.SENDING]
    stop_worker(cluster.prefill, grace_s=0.05, drain_s=0.05)
    (leg,) = cluster.prefill.legs
    assert leg.state is PrefillState.DRAINING
    assert cluster.prefill.pages_held(leg) == 3
    cluster.transfer.silent = False
    cluster.run_for(20)
    assert len(cluster.prefill.legs) == 0
    for name in LEGS:
        assert cluster.results[copied].reason(name) == "draining"
    assert {leg.state for leg in cluster.decode.legs} <= {DecodeState.DRAINING}
    cluster.settle()
