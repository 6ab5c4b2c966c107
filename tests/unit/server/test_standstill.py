"""Each pause of the process is told once, and to whom it kept waiting."""

from __future__ import annotations

from server.pauses import FLOOR_NS
from server.standstill import WAKING_NS, Pause, Standstill

S = 1_000_000_000


class Host:
    """A process whose pauses the test says; counts how often it was asked."""

    def __init__(self) -> None:
        self.pauses: list[Pause] = []
        self.asked = 0
        self.standstill = Standstill(self._within, 0)

    def _within(self, begin_ns: int, end_ns: int) -> list[Pause]:
        self.asked += 1
        return [pause for pause in self.pauses if pause[0] < end_ns and pause[1] > begin_ns]


def test_loop_that_comes_round_in_time_asks_nobody() -> None:
    host = Host()
    for turn in range(1, 50):
        assert host.standstill.news(turn * (FLOOR_NS - 1)) == ()
    assert host.asked == 0
    assert host.standstill.before(50 * FLOOR_NS) is None


def test_pause_is_told_once_though_it_is_noticed_twice() -> None:
    host = Host()
    host.pauses = [(1 * S, 5 * S)]
    assert host.standstill.news(5 * S + 1) == [(1 * S, 5 * S)]
    host.pauses.append((1 * S + 5, 5 * S + FLOOR_NS // 2))  # the thread noticed it later
    assert host.standstill.news(6 * S) == []
    host.pauses.append((7 * S, 8 * S))
    assert host.standstill.news(9 * S) == [(7 * S, 8 * S)]


def test_pauses_that_overlap_are_told_without_what_they_share() -> None:
    host = Host()
    host.pauses = [(2 * S, 6 * S), (1 * S, 4 * S), (3 * S, 6 * S)]
    assert host.standstill.news(7 * S) == [(1 * S, 4 * S), (4 * S, 6 * S)]


def test_only_messages_just_behind_a_pause_were_kept_waiting_by_it() -> None:
    host = Host()
    host.pauses = [(1 * S, 5 * S)]
    host.standstill.news(5 * S)
    assert host.standstill.before(5 * S + WAKING_NS) == (1 * S, 5 * S)
    assert host.standstill.before(5 * S + WAKING_NS + 1) is None
    assert host.standstill.before(1 * S - 1) is None
