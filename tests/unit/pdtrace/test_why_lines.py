"""Which of many waits are told, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from pdtrace.analysis.facts import Wait
from pdtrace.analysis.timeline import Timeline
from pdtrace.stages import Mode
from pdtrace.terminal.why_lines import MAX_WAITS, wait_lines


@dataclass
class _Visit:
    name: str
    waits: tuple[Wait, ...]
    open: bool = False


@dataclass
class _Timeline:
    visits: tuple[_Visit, ...]
    mode: Mode = Mode.PD


def wait(at_s: float, for_s: float, blocker: str, **numbers: Any) -> Wait:
    return Wait(
        stage="decode.reserve",
        reason="kv_pages",
        at_ns=round(at_s * 1e9),
        for_ns=round(for_s * 1e9),
        blocker=blocker,
        blockers=(blocker,),
        **numbers,
    )


def lines(*waits: Wait, is_open: bool = False) -> list[str]:
    timeline = _Timeline((_Visit("decode.reserve", waits, is_open),))
    return list(wait_lines(cast("Timeline", timeline)))


def test_numbers_that_change_are_one_wait_as_long_as_all() -> None:
    [line] = lines(
        wait(1, 2, "a", needed=9, free=1),
        wait(3, 4, "a", needed=9, free=2),
        wait(7, 1, "a", needed=9, free=3),
    )
    assert line == ("decode.reserve from 1.00 s for 7.00 s: needed 9 KV pages, 2 free; behind a")


def test_of_many_waits_the_longest_and_the_one_that_goes_on_are_told_in_order() -> None:
    short = [wait(i, 0.1, f"r-{i}") for i in range(1, 30)]
    told = lines(*short[:15], wait(20, 9, "long"), *short[15:], wait(50, 0.01, "now"), is_open=True)
    assert len(told) == MAX_WAITS + 1
    assert told[-1] == "… and 19 shorter ones"
    assert told[-2] == (
        "decode.reserve from 50.0 s for 10.0 ms so far: waited for KV pages; behind now"
    )
    assert [line for line in told if "behind long" in line]


def test_wait_that_goes_on_shows_the_latest_numbers() -> None:
    [line] = lines(
        wait(1, 9, "a", needed=9, free=1), wait(10, 1, "a", needed=9, free=7), is_open=True
    )
    assert "for 10.0 s so far: needed 9 KV pages, 7 free" in line
