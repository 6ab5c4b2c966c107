"""Every pair of states of every leg; deadlines of each state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import product
from typing import Any

import pytest

from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder
from pdtrace.stages import STAGE_BY_NAME
from server.colocated.leg import ColocatedLeg
from server.config import Deadlines
from server.decode.leg import DecodeLeg
from server.engine.base import SamplingParams
from server.faults import FaultHolds
from server.output import Generation, StopRules
from server.prefill.leg import PrefillLeg
from server.request import (
    COLOCATED_INFO,
    COLOCATED_TRANSITIONS,
    DECODE_INFO,
    DECODE_TRANSITIONS,
    PREFILL_INFO,
    PREFILL_TRANSITIONS,
    ColocatedState,
    DecodeState,
    IllegalTransition,
    Leg,
    PrefillState,
    StateInfo,
    stage_deadlines,
)
from server.wire.messages import Peer

PEER = Peer(instance="x-0", endpoint="x", incarnation="1")
GREEDY = SamplingParams()
S = 1_000_000_000


class Changes:
    """Observer that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    def changed(self, leg: Leg[Any], previous: Any, at_ns: int) -> None:
        self.seen.append((previous, leg.state, at_ns))


def common(state: Any, observer: Changes, faults: Mapping[str, int]) -> dict[str, Any]:
    context = RequestContext(
        request_id="r1",
        trace_id="0" * 31 + "1",
        root_span_id="0" * 15 + "1",
        attempt_span_id="0" * 15 + "2",
        handoff_id="h1",
    )
    return {
        "context": context,
        "trace": Recorder.disabled().begin(context),
        "gateway": PEER,
        "observer": observer,
        "deadlines": Deadlines(),
        "holds": FaultHolds(faults),
        "created_ns": 0,
        "state": state,
    }


def generation() -> Generation:
    rules = StopRules(max_tokens=4, eos_token_ids=(), ignore_eos=False)
    return Generation(prompt_len=3, sampling=GREEDY, rules=rules)


def prefill_leg(state: Any, observer: Changes, faults: Mapping[str, int]) -> Leg[Any]:
    return PrefillLeg(
        **common(state, observer, faults),
        prompt_ids=(1, 2, 3),
        prompt_digest="d",
        max_tokens=4,
        sampling=GREEDY,
        early=False,
        ignore_eos=False,
        decode=PEER,
        faults={},
    )


def decode_leg(state: Any, observer: Changes, faults: Mapping[str, int]) -> Leg[Any]:
    return DecodeLeg(
        **common(state, observer, faults),
        generation=generation(),
        max_tokens=4,
        prompt_digest="d",
        prefill=PEER,
    )


def colocated_leg(state: Any, observer: Changes, faults: Mapping[str, int]) -> Leg[Any]:
    return ColocatedLeg(
        **common(state, observer, faults),
        generation=generation(),
        max_tokens=4,
        prompt_ids=(1, 2, 3),
    )


MakeLeg = Callable[[Any, Changes, Mapping[str, int]], Leg[Any]]
MACHINES: list[tuple[MakeLeg, type[StrEnum], Mapping[Any, frozenset[Any]]]] = [
    (prefill_leg, PrefillState, PREFILL_TRANSITIONS),
    (decode_leg, DecodeState, DECODE_TRANSITIONS),
    (colocated_leg, ColocatedState, COLOCATED_TRANSITIONS),
]
PAIRS = [
    pytest.param(make, table, a, b, id=f"{states.__name__}-{a}-{b}")
    for make, states, table in MACHINES
    for a, b in product(states, states)
]


@pytest.mark.parametrize(("make", "table", "start", "to"), PAIRS)
def test_every_pair_of_states_is_allowed_or_refused_as_the_table_says(
    make: MakeLeg, table: Mapping[Any, frozenset[Any]], start: Any, to: Any
) -> None:
    observer = Changes()
    leg = make(start, observer, {})
    if to in table[start]:
        leg.advance(to, 7)
        assert (leg.state, leg.entered_ns) == (to, 7)
        assert observer.seen == [(start, to, 7)]
    else:
        with pytest.raises(IllegalTransition, match=f"{start} to {to}"):
            leg.advance(to, 7)
        assert (leg.state, observer.seen) == (start, [])


@pytest.mark.parametrize(("_", "states", "table"), MACHINES)
def test_closed_is_the_one_terminal_state_and_can_be_reached_from_all(
    _: MakeLeg, states: type[StrEnum], table: Mapping[Any, frozenset[Any]]
) -> None:
    assert set(table) == set(states)
    assert [state for state in states if not table[state]] == [states("closed")]
    for state in states:
        reached, front = {state}, [state]
        while front:
            more = table[front.pop()] - reached
            reached |= more
            front += more
        assert states("closed") in reached


@pytest.mark.parametrize(
    ("states", "infos"),
    [(PrefillState, PREFILL_INFO), (DecodeState, DECODE_INFO), (ColocatedState, COLOCATED_INFO)],
)
def test_every_non_terminal_state_has_a_known_stage_and_a_deadline_that_exists(
    states: type[StrEnum], infos: Mapping[Any, StateInfo]
) -> None:
    assert set(infos) == set(states) - {states("closed")}
    for info in infos.values():
        assert info.stage in STAGE_BY_NAME
        assert info.deadline is None or hasattr(Deadlines(), info.deadline)


def test_deadline_is_the_state_s_own_until_the_request_s_comes_first() -> None:
    leg = decode_leg(DecodeState.ARRIVED, Changes(), {})
    assert leg.deadline_ns == 600 * S
    leg.advance(DecodeState.RESERVING, 5 * S)
    assert leg.deadline_ns == 65 * S
    leg.advance(DecodeState.AWAITING_KV, 580 * S)
    assert leg.deadline_ns == 600 * S


def test_wait_for_decode_s_pages_is_bounded_by_the_request_alone_until_they_are_known() -> None:
    leg = prefill_leg(PrefillState.ARRIVED, Changes(), {})
    leg.advance(PrefillState.BOOTSTRAP, 5 * S)
    assert leg.deadline_ns == 600 * S
    leg.limit("handshake_s", 100 * S)
    assert leg.deadline_ns == 130 * S
    leg.limit("handshake_s", 590 * S)
    assert leg.deadline_ns == 600 * S, "the request's comes first"
    leg.advance(PrefillState.QUEUED, 110 * S)
    assert leg.deadline_ns == 230 * S


def test_wait_for_kv_is_in_the_stage_in_which_prefill_said_it_has_the_request() -> None:
    leg = decode_leg(DecodeState.AWAITING_KV, Changes(), {})
    assert leg.waits_in == "transfer"
    for state, stage in (("queued", "prefill.queue"), ("running", "prefill.compute")):
        leg.other = state
        assert (leg.waits_in, leg.stage) == (stage, "transfer")
    leg.other = "a state of another build"
    assert leg.waits_in == "transfer"
    leg.advance(DecodeState.LANDED, S)
    assert leg.waits_in == "decode.queue"


def test_waiting_for_kv_takes_longer_than_all_of_prefill_s_deadlines_together() -> None:
    """So that the one who was late says so."""
    d = Deadlines()
    assert d.await_kv_s > d.prefill_queue_s + d.prefill_compute_s + d.transfer_s + d.drain_s
    assert d.request_s > d.await_kv_s


def test_drain_has_its_time_even_after_the_request_s_deadline() -> None:
    leg = decode_leg(DecodeState.AWAITING_KV, Changes(), {})
    leg.advance(DecodeState.DRAINING, 600 * S)
    assert leg.deadline_ns == 610 * S


def test_each_stage_has_the_shortest_deadline_of_its_states_for_those_who_watch() -> None:
    deadlines = Deadlines(transfer_s=30.0, await_kv_s=300.0, drain_s=10.0, request_s=600.0)
    stages = stage_deadlines(deadlines)
    assert set(stages) <= set(STAGE_BY_NAME)
    assert stages["transfer"] == 30.0
    assert stages["decode.generate"] == stages["hop.dispatch"] == 600.0
    assert stages["gateway.queue"] == stages["gateway.route"] == deadlines.gateway_queue_s
    assert stages["decode.reserve"] == deadlines.reserve_s
    assert "prefill.hold" not in stages


def test_closed_leg_has_no_deadline() -> None:
    leg = decode_leg(DecodeState.FINISHED, Changes(), {})
    leg.advance(DecodeState.CLOSED, S)
    assert leg.deadline_ns is None
    assert leg.wake_ns is None


def test_leg_wakes_for_the_end_of_a_hold_before_its_deadline() -> None:
    leg = decode_leg(DecodeState.LANDED, Changes(), {"decode.queue": 500})
    assert leg.holds.held("decode.queue", S)
    assert leg.wake_ns == S + 500_000_000
    leg.holds.release_due(S + 500_000_000)
    assert leg.wake_ns == 120 * S
