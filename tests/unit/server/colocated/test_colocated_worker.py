"""The colocated worker: the same tokens as PD, chunked or not, and who makes whose tokens late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtrace.stages import GapCause, Mark, Role
from server.config import Deadlines, Settings
from server.engine.base import SamplingParams
from server.wire.messages import Abort
from tests.support.scheduler_bus import PAGE, Cluster

MakeCluster = Callable[..., Cluster]
BUDGET = 8


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 200 for i in range(length)]


def config(**changes: object) -> Settings:
    values: dict[str, object] = {
        "model": "fake",
        "page_size": PAGE,
        "decode_pages": 40,
        "prefill_budget": BUDGET,
        "reserve_output_tokens": 2,
        "max_running": 4,
        "allow_faults": True,
        **changes,
    }
    return Settings(**values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    "length", [1, PAGE - 1, PAGE, PAGE + 1, BUDGET - 1, BUDGET, BUDGET + 1, 10 * BUDGET]
)
def test_prompts_around_page_and_budget_edges_give_the_right_tokens(
    make_cluster: MakeCluster, length: int, chunked: bool
) -> None:
    cluster = make_cluster(settings=config(chunked=chunked), colocated=True)
    handoff_id = cluster.submit(prompt(length), max_tokens=6)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(length), 6)
    started = [r for r in cluster.marks(Role.WORKER) if r.mark is Mark.CHUNK_STARTED]
    chunks = [tokens for r in started if isinstance(tokens := r.values[1], int)]
    assert sum(chunks) == length
    assert len(chunks) == (-(-length // BUDGET) if chunked else 1)


def test_marks_of_a_request(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), colocated=True)
    cluster.submit(prompt(5), max_tokens=3)
    cluster.settle()
    assert [r.mark for r in cluster.marks(Role.WORKER) if r.mark is not Mark.WAITING] == [
        Mark.RESERVE_RECEIVED,
        Mark.PREFILL_STARTED,
        Mark.CHUNK_STARTED,
        Mark.CHUNK_FINISHED,
        Mark.PREFILL_FINISHED,
        Mark.FIRST_TOKEN_COMMITTED,
        Mark.DECODE_FINISHED,
        Mark.DECODE_RELEASED,
    ]


def test_sampled_tokens_are_those_of_pd(make_cluster: MakeCluster) -> None:
    sampling = SamplingParams(temperature=0.8, seed=11)
    cluster = make_cluster(settings=config(), colocated=True)
    handoff_id = cluster.submit(prompt(9), max_tokens=6, sampling=sampling)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(prompt(9), 6, sampling)


def test_cached_prefix_is_not_computed_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), colocated=True)
    cluster.submit(prompt(12))
    cluster.settle()
    longer = [*prompt(12), 5]
    handoff_id = cluster.submit(longer)
    cluster.settle()
    assert cluster.results[handoff_id].cached_tokens == 12
    assert cluster.results[handoff_id].tokens == cluster.expected(longer, 4)


def test_preempted_sequences_come_back_with_the_right_tokens(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(decode_pages=12), colocated=True)
    prompts = [prompt(8, first=i) for i in range(4)]
    handoffs = [cluster.submit(p, max_tokens=24) for p in prompts]
    cluster.settle()
    for p, handoff_id in zip(prompts, handoffs, strict=True):
        assert cluster.results[handoff_id].tokens == cluster.expected(p, 24)
    marks = [record.mark for record in cluster.marks(Role.WORKER)]
    assert marks.count(Mark.PREEMPTED) == marks.count(Mark.RESUMED) >= 1


def test_unchunked_prompt_delays_running_sequences_and_is_named(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(
        settings=config(chunked=False, gap_threshold_s=0.15), colocated=True, step_ms=100
    )
    cluster.submit(prompt(3), max_tokens=8)
    for _ in range(3):
        cluster.step()
    cluster.submit(prompt(30, first=9), max_tokens=2)
    cluster.settle()
    records = [record for record in cluster.marks(Role.WORKER) if record.key == 1]
    gaps = [r.values for r in records if r.mark is Mark.TOKEN_GAP]
    assert [(gap[1], gap[2], gap[3], gap[6]) for gap in gaps] == [
        (0.2, GapCause.INTERFERING_PREFILL, 0.1, "r2")
    ]


@pytest.mark.parametrize("chunked", [True, False])
def test_stop_strings_and_single_tokens_finish(make_cluster: MakeCluster, chunked: bool) -> None:
    cluster = make_cluster(settings=config(chunked=chunked), colocated=True)
    text = "".join(map(chr, cluster.expected(prompt(6), 8)))
    stopped = cluster.submit(prompt(6), max_tokens=8, stop=(text[3:5],))
    single = cluster.submit(prompt(7), max_tokens=1)
    cluster.settle()
    assert cluster.results[stopped].finish_reasons == ["stop"]
    assert len(cluster.results[stopped].tokens) == text.find(text[3:5]) + 2
    assert cluster.results[single].tokens == cluster.expected(prompt(7), 1)
    assert cluster.results[single].finish_reasons == ["length"]


@pytest.mark.parametrize(
    ("length", "max_tokens", "reason"),
    [(0, 1, "invalid_request"), (10, 400, "kv_capacity"), (10, 9000, "context_length")],
)
def test_request_that_can_never_be_served_is_refused(
    make_cluster: MakeCluster, length: int, max_tokens: int, reason: str
) -> None:
    cluster = make_cluster(settings=config(), colocated=True)
    handoff_id = cluster.submit(prompt(length), max_tokens=max_tokens)
    cluster.settle()
    assert cluster.results[handoff_id].outcome("worker-0") == "rejected"
    assert cluster.results[handoff_id].reason("worker-0") == reason


def test_queue_deadline_passes_without_traffic(make_cluster: MakeCluster) -> None:
    deadlines = Deadlines(prefill_queue_s=2)
    cluster = make_cluster(settings=config(deadlines=deadlines), colocated=True)
    handoff_id = cluster.submit(prompt(6), faults={"prefill.queue": 50_000})
    cluster.settle()
    assert cluster.results[handoff_id].outcome("worker-0") == "timed_out"


def test_message_of_another_role_is_counted(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(settings=config(), colocated=True)
    abort = Abort(handoff_id="x", outcome="failed", reason="r", message="", by="decode-0")
    cluster.hand("worker-0", abort)
    cluster.step()
    assert cluster.colocated.ignored == {"unexpected.Abort": 1}


@given(
    data=st.data(),
    chunked=st.booleans(),
    requests=st.lists(
        st.tuples(
            st.integers(1, 24).flatmap(
                lambda n: st.lists(st.sampled_from([7, 8]), min_size=n, max_size=n)
            ),
            st.integers(1, 12),
        ),
        min_size=1,
        max_size=5,
    ),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_arrivals_and_cancels_give_one_outcome_the_right_tokens_and_no_leak(
    make_cluster: MakeCluster,
    data: st.DataObject,
    chunked: bool,
    requests: list[tuple[list[int], int]],
) -> None:
    cluster = make_cluster(
        settings=config(chunked=chunked, decode_pages=10, max_running=3), colocated=True
    )
    for token_ids, max_tokens in requests:
        handoff_id = cluster.submit(token_ids, max_tokens=max_tokens)
        for _ in range(data.draw(st.integers(0, 6))):
            cluster.step()
        if data.draw(st.booleans()):
            cluster.cancel(data.draw(st.sampled_from(sorted(cluster.results))))
        assert handoff_id in cluster.results
    cluster.settle()
    for (token_ids, max_tokens), result in zip(requests, cluster.results.values(), strict=True):
        outcomes = {closed.outcome for closed in result.closed["worker-0"]}
        assert outcomes in ({"completed"}, {"cancelled"})
        expected = cluster.expected(token_ids, max_tokens)
        assert {*result.token_at.items()} <= {*enumerate(expected)}
        if outcomes == {"completed"}:
            assert result.tokens == expected
    cluster.check()
    cluster.close()
