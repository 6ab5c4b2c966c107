"""The fault header and the arithmetic of holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.stages import CHAINS
from server.errors import InvalidRequest
from server.faults import FAULT_STAGES, MAX_DELAY_MS, FaultHolds, parse_faults

MS = 1_000_000


def test_every_chain_stage_and_the_gap_can_be_delayed() -> None:
    chain = {stage.name for stages in CHAINS.values() for stage in stages}
    assert chain | {"decode.gap"} == FAULT_STAGES


@pytest.mark.parametrize(
    ("header", "faults"),
    [
        ("", {}),
        ("  ", {}),
        ("transfer=250", {"transfer": 250}),
        (" decode.reserve = 800 ,transfer=0, ", {"decode.reserve": 800, "transfer": 0}),
        (f"hop.notice={MAX_DELAY_MS}", {"hop.notice": MAX_DELAY_MS}),
    ],
)
def test_header_is_stages_with_milliseconds(header: str, faults: dict[str, int]) -> None:
    assert parse_faults(header) == faults


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("transfer", "stage=milliseconds"),
        ("transfer=", "whole number"),
        ("transfer=-1", "whole number"),
        ("transfer=1.5", "whole number"),
        ("transfer=1e3", "whole number"),
        ("transfer=٣", "whole number"),
        ("transfer=" + "9" * 5000, "whole number"),
        (f"transfer={MAX_DELAY_MS + 1}", "limit is 60000"),
        ("prefill=5", "'prefill' is unknown"),
        ("transfer.copy=5", "unknown"),
        ("transfer=1,transfer=2", "twice"),
        ("transfer=1;hop.notice=2", "whole number"),
    ],
)
def test_bad_header_is_the_caller_s_fault(header: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse_faults(header)
    assert caught.value.http_status == 400
    assert caught.value.param == "x-pd-faults"
    assert len(str(caught.value)) < 1000


@given(st.text())
def test_any_text_is_parsed_or_refused(header: str) -> None:
    try:
        faults = parse_faults(header)
    except InvalidRequest:
        return
    assert set(faults) <= FAULT_STAGES


def test_hold_begins_when_first_asked_and_ends_once() -> None:
    holds = FaultHolds({"transfer": 10})
    assert holds.next_release_ns is None
    assert holds.held("transfer", 100 * MS)
    assert holds.held("transfer", 109 * MS)
    assert holds.next_release_ns == 110 * MS
    assert not holds.held("transfer", 110 * MS)
    holds.release_due(110 * MS)
    assert holds.next_release_ns is None
    assert not holds.held("transfer", 111 * MS)


def test_other_stages_and_zero_delays_are_not_held() -> None:
    holds = FaultHolds({"transfer": 10, "hop.notice": 0})
    assert not holds.held("decode.queue", 0)
    assert not holds.held("hop.notice", 0)
    assert holds.next_release_ns is None


def test_holds_of_several_stages_run_by_themselves() -> None:
    holds = FaultHolds({"prefill.queue": 10, "prefill.compute": 30})
    assert holds.held("prefill.queue", 0)
    assert holds.held("prefill.compute", 5 * MS)
    assert holds.next_release_ns == 10 * MS
    holds.release_due(10 * MS)
    assert holds.next_release_ns == 35 * MS
    assert not holds.held("prefill.queue", 10 * MS)
    assert holds.held("prefill.compute", 10 * MS)
