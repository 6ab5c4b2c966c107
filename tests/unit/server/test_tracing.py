"""State changes become the marks that the vocabulary knows, with values that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdtrace.stages import MARKS, Mark, Outcome, Role
from server.request import (
    COLOCATED_TRANSITIONS,
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    ColocatedState,
    DecodeState,
    PrefillState,
)
from server.tracing import MARKS_OF_CHANGES
from server.wire.messages import Cancel
from tests.support.scheduler_bus import Cluster, mark_names

MakeCluster = Callable[..., Cluster]
PROMPT = list(range(1, 11))


@pytest.mark.parametrize(
    ("states", "table", "role"),
    [
        (PrefillState, PREFILL_TRANSITIONS, Role.PREFILL),
        (DecodeState, DECODE_TRANSITIONS, Role.DECODE),
        (ColocatedState, COLOCATED_TRANSITIONS, Role.WORKER),
    ],
)
def test_every_change_on_the_way_to_completion_is_one_mark_of_that_role(
    states: Any, table: Any, role: Role
) -> None:
    changes = MARKS_OF_CHANGES[states]
    aborts = {states.CLOSED, getattr(states, "DRAINING", states.CLOSED)}
    for previous, allowed in table.items():
        for state in allowed:
            if state not in aborts:
                assert (previous, state) in changes
    for (previous, state), told in changes.items():
        assert state in table[previous]
        assert told is not None or "recomputing" in (previous, state)  # all of it is preempted
        assert told is None or role in MARKS[told[0]].roles


def test_marks_of_a_request_through_both_legs(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(PROMPT, max_tokens=3)
    cluster.settle()
    decode = [name for name in mark_names(cluster.marks(Role.DECODE)) if name != "WAITING"]
    assert decode == [
        "RESERVE_RECEIVED",
        "PAGES_RESERVED",
        "KV_NOTICED",
        "DECODE_ADMITTED",
        "FIRST_TOKEN_COMMITTED",
        "DECODE_FINISHED",
        "DECODE_RELEASED",
    ]
    prefill = [name for name in mark_names(cluster.marks(Role.PREFILL)) if name != "WAITING"]
    assert prefill == [
        "PREFILL_RECEIVED",
        "HANDSHAKE_DONE",
        "PREFILL_STARTED",
        "CHUNK_STARTED",
        "CHUNK_FINISHED",
        "CHUNK_STARTED",
        "CHUNK_FINISHED",
        "PREFILL_FINISHED",
        "SOURCE_RELEASED",
    ]


def test_values_of_marks_are_the_request_s(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.submit(PROMPT, max_tokens=3)
    cluster.settle()
    values = {record.mark: record.values for record in cluster.marks(Role.DECODE)}
    assert values[Mark.PAGES_RESERVED] == (3, 29)
    assert values[Mark.DECODE_ADMITTED] == (1,)
    assert values[Mark.DECODE_FINISHED] == (3, "length", 0)
    assert values[Mark.DECODE_RELEASED] == (3, 32)
    prefill = {record.mark: record.values for record in cluster.marks(Role.PREFILL)}
    assert prefill[Mark.HANDSHAKE_DONE] == (3,)
    assert prefill[Mark.PREFILL_STARTED] == (0, 1)
    assert prefill[Mark.CHUNK_STARTED] == (1, 2)
    assert prefill[Mark.SOURCE_RELEASED] == (3,)


def test_aborted_leg_marks_the_abort_once_and_no_later_stage(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    handoff_id = cluster.submit(PROMPT, faults={"prefill.queue": 5000})
    cluster.run_for(5)
    cluster.cancel(handoff_id)
    cluster.settle()
    decode = cluster.marks(Role.DECODE)
    names = [name for name in mark_names(decode) if name != "WAITING"]
    assert names == ["RESERVE_RECEIVED", "PAGES_RESERVED", "ABORTED"]
    assert decode[-1].values == (Outcome.CANCELLED, "client_disconnected", "client")
    prefill = cluster.marks(Role.PREFILL)
    names = [name for name in mark_names(prefill) if name != "WAITING"]
    assert names == ["PREFILL_RECEIVED", "HANDSHAKE_DONE", "ABORTED"]


@pytest.mark.parametrize("stage", ["prefill.queue", "transfer", "decode.generate"])
def test_leg_that_is_ended_as_completed_where_it_is_not_marks_that(
    make_cluster: MakeCluster, stage: str
) -> None:
    """The gateway does so at a stop string that a worker has overlooked."""
    cluster = make_cluster()
    handoff_id = cluster.submit(PROMPT, max_tokens=100, faults={stage: 5000})
    cluster.run_for(100)
    assert len(cluster.decode.legs) == 1
    for leg in ("prefill-0", "decode-0"):
        message = Cancel(
            handoff_id=handoff_id,
            outcome="completed",
            reason="stop",
            by="gateway",
            gateway=cluster.gateway,
        )
        cluster.channels.put("gateway", leg, message)
    cluster.settle()
    closed = cluster.results[handoff_id].closed["decode-0"]
    assert [(each.outcome, each.reason) for each in closed] == [("completed", "stop")]
    aborted = [record for record in cluster.marks(Role.DECODE) if record.mark is Mark.ABORTED]
    assert [record.values for record in aborted] == [(Outcome.COMPLETED, "stop", "gateway")]


def test_recording_switched_off_changes_nothing_for_the_request(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(record=False)
    handoff_id = cluster.submit(PROMPT, max_tokens=3)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(PROMPT, 3)
    assert cluster.marks(Role.DECODE) == []


def test_bug_in_the_recording_does_not_reach_the_request(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(record=False)
    monkeypatch.setattr("server.tracing.MARKS_OF_CHANGES", {})
    handoff_id = cluster.submit(PROMPT, max_tokens=3)
    cluster.settle()
    assert cluster.results[handoff_id].tokens == cluster.expected(PROMPT, 3)
    assert cluster.results[handoff_id].outcome("decode-0") == "completed"
