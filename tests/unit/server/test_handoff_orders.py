"""Whatever the order, repetition and lateness of messages: one outcome, right tokens, no leak."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtrace.stages import Mark, Outcome, Role
from server.config import Settings
from tests.support.scheduler_bus import PAGE, Cluster

SMALL = Settings(
    page_size=PAGE,
    prefill_pages=10,
    decode_pages=12,
    prefill_budget=6,
    reserve_output_tokens=2,
    max_running=2,
    allow_faults=True,
)
OUTCOMES = {str(outcome) for outcome in Outcome}
PROMPTS = st.integers(1, 24).flatmap(
    # Few distinct tokens, so that prompts share prefixes and hit the cache.
    lambda n: st.lists(st.sampled_from([7, 8]), min_size=n, max_size=n)
)
REQUESTS = st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.booleans()), min_size=1, max_size=5)


def play(
    cluster: Cluster,
    data: st.DataObject,
    *,
    cancels: bool,
    sleeps: bool,
    num_actions: int,
) -> None:
    """Random turns, deliveries, repetitions and mishaps."""
    kinds = ["deliver"] * 6 + ["turn"] * 4 + ["transfer"] * 2 + ["replay"]
    kinds += ["cancel", "fail", "hang", "lose", "start anew"] * cancels + ["sleep"] * sleeps
    for _ in range(data.draw(st.integers(0, num_actions))):
        kind = data.draw(st.sampled_from(kinds))
        names = cluster.channels.names()
        if kind == "deliver" and names:
            cluster.deliver(data.draw(st.sampled_from(names)))
        elif kind == "turn":
            cluster.workers[data.draw(st.sampled_from(sorted(cluster.workers)))].step(0)
        elif kind == "transfer":
            cluster.transfer.step()
        elif kind == "replay":
            past = [entry for entry in cluster.delivered if entry[0] != "gateway"]
            if past:
                cluster.hand(*data.draw(st.sampled_from(past)))
        elif kind == "cancel":
            cluster.cancel(data.draw(st.sampled_from(sorted(cluster.results))))
        elif kind == "fail":
            cluster.transfer.fail_next = "peer_lost"
        elif kind == "hang":
            cluster.transfer.silent = not cluster.transfer.silent
        elif kind == "lose":
            between = [name for name in names if "gateway" not in name]
            if between:
                cluster.channels.waiting[data.draw(st.sampled_from(between))].popleft()
        elif kind == "start anew":
            cluster.transfer.restart()
        elif kind == "sleep":
            cluster.clock.advance(s=data.draw(st.sampled_from([0.1, 9.0, 40.0])))
    cluster.transfer.silent = False
    cluster.transfer.fail_next = None


def check_records(cluster: Cluster, role: Role) -> None:
    """Each leg's trace ends in completion or in one abort, never both, and never twice."""
    for records in cluster.marks_by_leg(role).values():
        marks = [record.mark for record in records]
        last = Mark.SOURCE_RELEASED if role is Role.PREFILL else Mark.DECODE_RELEASED
        assert marks.count(last) + marks.count(Mark.ABORTED) == 1
        times = [record.t_ns for record in records]
        assert times == sorted(times)


@given(data=st.data(), requests=REQUESTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_order_without_cancel_completes_every_request_with_its_tokens(
    data: st.DataObject, requests: list[tuple[list[int], int, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory), settings=SMALL)
        submitted = {
            cluster.submit(prompt, max_tokens=max_tokens, early=early): (prompt, max_tokens)
            for prompt, max_tokens, early in requests
        }
        play(cluster, data, cancels=False, sleeps=False, num_actions=60)
        cluster.settle()
        for handoff_id, (prompt, max_tokens) in submitted.items():
            result = cluster.results[handoff_id]
            assert result.tokens == cluster.expected(prompt, max_tokens)
            assert result.finish_reasons == ["length"]
            assert {result.outcome("decode-0"), result.outcome("prefill-0")} == {"completed"}
        check_records(cluster, Role.PREFILL)
        check_records(cluster, Role.DECODE)
        cluster.check()
        cluster.close()


@given(data=st.data(), requests=REQUESTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_order_with_losses_cancels_and_deadlines_gives_one_outcome_and_leaks_nothing(
    data: st.DataObject, requests: list[tuple[list[int], int, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(Path(directory), settings=SMALL)
        submitted = {
            cluster.submit(prompt, max_tokens=max_tokens, early=early): (prompt, max_tokens)
            for prompt, max_tokens, early in requests
        }
        play(cluster, data, cancels=True, sleeps=True, num_actions=60)
        cluster.settle()
        for _ in range(100):  # pages kept from the transfer are asked for now and then
            if not cluster.prefill.quarantine.owners | cluster.decode.quarantine.owners:
                break
            cluster.run_for(250, turn_ms=250)
        for handoff_id, (prompt, max_tokens) in submitted.items():
            result = cluster.results[handoff_id]
            for instance in ("prefill-0", "decode-0"):
                outcomes = {closed.outcome for closed in result.closed[instance]}
                assert len(outcomes) == 1
                assert outcomes <= OUTCOMES
            expected = cluster.expected(prompt, max_tokens)
            assert {*result.token_at.items()} <= {*enumerate(expected)}
            if result.closed["decode-0"][0].outcome == "completed":
                assert result.tokens == expected
        check_records(cluster, Role.PREFILL)
        check_records(cluster, Role.DECODE)
        assert cluster.prefill.quarantine.num_pages == 0
        assert cluster.decode.quarantine.num_pages == 0
        cluster.check()
        cluster.close()
