"""The table of legs, its memory of past ones, and pages kept out of use."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder
from pdtrace.stages import Outcome
from server.config import Deadlines
from server.engine.base import SamplingParams
from server.errors import IntegrityError
from server.faults import FaultHolds
from server.legs import LegTable
from server.prefill.leg import PrefillLeg
from server.quarantine import Quarantine
from server.request import Ending, Leg, PrefillState
from server.wire.messages import Peer

PEER = Peer(instance="x-0", endpoint="x", incarnation="1")
ENDING = Ending(outcome=Outcome.CANCELLED, reason="test", message="", by="client")
S = 1_000_000_000


class Nobody:
    """Observer that does not care."""

    def changed(self, leg: Leg[Any], previous: Any, at_ns: int) -> None:
        pass


def leg(handoff_id: str, *, created_s: int = 0, faults: dict[str, int] | None = None) -> PrefillLeg:
    context = RequestContext(
        request_id=f"r-{handoff_id}",
        trace_id="0" * 31 + "1",
        root_span_id="0" * 15 + "1",
        attempt_span_id="0" * 15 + "2",
        handoff_id=handoff_id,
    )
    return PrefillLeg(
        context=context,
        trace=Recorder.disabled().begin(context),
        gateway=PEER,
        observer=Nobody(),
        deadlines=Deadlines(),
        holds=FaultHolds(faults or {}),
        created_ns=created_s * S,
        state=PrefillState.ARRIVED,
        prompt_ids=(1,),
        prompt_digest="d",
        max_tokens=1,
        sampling=SamplingParams(),
        early=False,
        ignore_eos=False,
        decode=PEER,
        faults={},
    )


def test_legs_come_in_order_of_arrival_and_may_leave_meanwhile() -> None:
    table: LegTable[PrefillLeg] = LegTable()
    for name in ("b", "a", "c"):
        table.add(leg(name))
    seen: list[str] = []
    for entry in table:
        seen.append(entry.handoff_id)
        entry.ending = ENDING
        table.close(entry)
    assert seen == ["b", "a", "c"]
    assert len(table) == 0


def test_same_handoff_twice_is_a_bug() -> None:
    table: LegTable[PrefillLeg] = LegTable()
    table.add(leg("a"))
    with pytest.raises(IntegrityError, match="a is in the table already"):
        table.add(leg("a"))


def test_past_legs_are_remembered_up_to_a_limit_the_latest_longest() -> None:
    table: LegTable[PrefillLeg] = LegTable(max_remembered=2)
    table.remember("a", ENDING, arrived=False)
    table.remember("b", ENDING, arrived=False)
    table.remember("a", ENDING, arrived=True)
    table.remember("c", ENDING, arrived=False)
    assert table.past("b") is None
    past = table.past("a")
    assert past is not None
    assert past.arrived
    assert past.ending is ENDING


def test_table_wakes_for_the_earliest_deadline_or_end_of_a_hold() -> None:
    table: LegTable[PrefillLeg] = LegTable()
    assert table.next_wake_ns() is None
    table.add(leg("late", created_s=50))
    table.add(leg("early", created_s=10, faults={"hop.publish": 1000}))
    assert table.next_wake_ns() == 610 * S
    assert table["early"].holds.held("hop.publish", 20 * S)
    assert table.next_wake_ns() == 21 * S
    assert [entry.handoff_id for entry in table.due(21 * S)] == ["early"]
    assert table.due(20 * S) == []


def test_kept_pages_are_freed_once_and_counted() -> None:
    freed: list[str] = []
    quarantine = Quarantine()
    quarantine.keep("a", 3, lambda: freed.append("a"))
    quarantine.keep("b", 4, lambda: freed.append("b"))
    assert (quarantine.num_pages, set(quarantine.owners)) == (7, {"a", "b"})
    assert quarantine.release("a")
    assert not quarantine.release("a")
    assert not quarantine.release("unknown")
    assert (freed, quarantine.num_pages, quarantine.num_handoffs_ever) == (["a"], 4, 2)


def test_transfer_is_asked_about_kept_pages_now_and_then() -> None:
    quarantine = Quarantine()
    assert quarantine.to_ask(100 * S, 10 * S) == ()
    quarantine.keep("a", 3, lambda: None)
    assert quarantine.to_ask(100 * S, 10 * S) == ("a",)
    assert quarantine.to_ask(109 * S, 10 * S) == ()
    assert quarantine.to_ask(110 * S, 10 * S) == ("a",)
