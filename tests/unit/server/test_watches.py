"""When somebody counts as gone: the gateway, the transfer process, the other leg's worker."""

from __future__ import annotations

import pytest

from server.counterparts import MAX_LEGS_PER_PROBE, Counterparts
from server.gateway_watch import GatewayWatch
from server.kv.layout import KvLayout
from server.kv.pool import PoolDescriptor
from server.registration import ASK_EVERY_NS, CHECK_EVERY_NS, Registration
from server.silence import MAX_LOOK_NS, Silence
from server.wire.messages import (
    AnyMessage,
    CancelCopies,
    CopiesDrained,
    LegProbe,
    LegStatus,
    Peer,
    RegisterPool,
)

S = 1_000_000_000
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=4, dtype="float32")
POOL = PoolDescriptor(owner="decode-0", path="/nowhere", num_pages=4, layout=LAYOUT)


def peer(incarnation: str, instance: str = "x-0") -> Peer:
    return Peer(instance=instance, endpoint=instance, incarnation=incarnation)


# -- silence --------------------------------------------------------------------------------------


def test_silence_adds_up_and_ends_with_an_answer() -> None:
    silence = Silence()
    assert [silence.look(t * S // 2) for t in range(4)] == [0, S // 2, S, 3 * S // 2]
    silence.end()
    assert [silence.look(9 * S), silence.look(9 * S + 1)] == [0, 1]


def test_time_in_which_nobody_looked_is_one_look_of_silence() -> None:
    silence = Silence()
    silence.look(0)
    assert silence.look(500 * S) == MAX_LOOK_NS


def test_clock_that_steps_back_takes_no_silence_away() -> None:
    silence = Silence()
    silence.look(10 * S)
    assert silence.look(9 * S) == 0


# -- the gateway ----------------------------------------------------------------------------------


def turn_until(watch: GatewayWatch, begin_s: float, end_s: float) -> list[tuple[float, Peer]]:
    told: list[tuple[float, Peer]] = []
    for tenth in range(round(begin_s * 10), round(end_s * 10)):
        gone = watch.silent(tenth * S // 10)
        if gone is not None:
            told.append((tenth / 10, gone))
    return told


def test_gateway_that_stops_answering_is_told_once() -> None:
    watch = GatewayWatch(dead_after_s=3.0)
    watch.answered(peer("a"), 1)
    assert turn_until(watch, 0, 20) == [(3.1, peer("a"))]


def test_gateway_that_never_answered_is_not_watched() -> None:
    watch = GatewayWatch(dead_after_s=3.0)
    watch.wrote(peer("a"))
    assert turn_until(watch, 0, 100) == []


def test_requests_of_a_gateway_show_that_it_lives() -> None:
    watch = GatewayWatch(dead_after_s=3.0)
    watch.answered(peer("a"), 1)
    for second in range(0, 20, 2):
        assert turn_until(watch, second, second + 2) == []
        watch.wrote(peer("a"))
        watch.wrote(peer("other"))


def test_gateway_that_comes_back_is_watched_again() -> None:
    watch = GatewayWatch(dead_after_s=3.0)
    watch.answered(peer("a"), 1)
    assert len(turn_until(watch, 0, 10)) == 1
    assert watch.answered(peer("a"), 2) is None
    assert turn_until(watch, 10, 20) == [(13.1, peer("a"))]


def test_another_incarnation_replaces_a_gateway_and_late_answers_do_not_bring_it_back() -> None:
    watch = GatewayWatch(dead_after_s=3.0)
    assert watch.answered(peer("a"), 1) is None
    assert watch.answered(peer("b"), 3) == peer("a")
    assert watch.is_retired(peer("a"))
    assert not watch.is_retired(peer("b"))
    assert watch.answered(peer("a"), 2) is None
    assert watch.answered(peer("b"), 4) is None
    assert watch.answered(peer("c"), 5) == peer("b")


@pytest.mark.parametrize("silent", [False, True])
def test_late_answer_of_one_that_nobody_had_heard_of_replaces_nobody(silent: bool) -> None:
    """Or all that the present one sends would be refused, for as long as it lives."""
    watch = GatewayWatch(dead_after_s=3.0)
    if silent:
        watch.answered(peer("a"), 1)
        assert len(turn_until(watch, 0, 10)) == 1
    assert watch.answered(peer("b"), 3) is None
    assert watch.answered(peer("a"), 2) is None
    assert not watch.is_retired(peer("b"))
    assert turn_until(watch, 10, 20) == [(13.1, peer("b"))]


def test_one_that_answers_while_its_successor_is_silent_takes_its_place_again() -> None:
    watch = GatewayWatch(dead_after_s=3.0)
    watch.answered(peer("a"), 1)
    assert watch.answered(peer("b"), 2) == peer("a")
    assert turn_until(watch, 0, 10) == [(3.1, peer("b"))]
    assert watch.answered(peer("a"), 3) is None
    assert not watch.is_retired(peer("a"))


# -- the transfer process -------------------------------------------------------------------------


class Asked:
    """A registration whose messages are kept."""

    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []
        self.reachable = True
        self.registration = Registration(peer("1", "decode-0"), POOL, self._send, dead_after_s=3.0)

    def _send(self, message: AnyMessage) -> bool:
        self.sent.append(message)
        return self.reachable

    def answer(self, transfer: str) -> tuple[bool, bool]:
        """Whether the transfer was replaced, and whether the answer was to the question."""
        question = next(m for m in reversed(self.sent) if isinstance(m, CancelCopies))
        message = CopiesDrained(
            handoff_id=question.handoff_id,
            transfer=peer(transfer),
            started_ns=int(transfer[1:]),
        )
        replaced = self.registration.replaced_by(message.transfer, message.started_ns)
        return replaced, self.registration.answered(message)


def test_registration_is_repeated_until_answered_and_then_checked_now_and_then() -> None:
    asked = Asked()
    for now_ns in (0, 1, ASK_EVERY_NS, ASK_EVERY_NS + 1):
        asked.registration.ask(now_ns)
    assert [type(message) for message in asked.sent] == [RegisterPool, CancelCopies] * 2
    assert asked.answer("t1") == (False, True)
    assert asked.registration.known
    asked.sent.clear()
    asked.registration.ask(ASK_EVERY_NS * 3)
    assert asked.sent == []
    asked.registration.ask(ASK_EVERY_NS + CHECK_EVERY_NS)
    assert len(asked.sent) == 2


def test_transfer_process_that_does_not_answer_is_of_no_use_until_it_does() -> None:
    asked = Asked()
    asked.registration.ask(0)
    asked.answer("t1")
    unknown_at: list[int] = []
    for tenth in range(1, 100):
        asked.registration.ask(tenth * S // 10)
        if not asked.registration.known:
            unknown_at.append(tenth)
    assert 35 <= unknown_at[0] <= 45  # three seconds after the first question left unanswered
    assert unknown_at == list(range(unknown_at[0], 100))
    assert asked.answer("t1") == (False, True)
    assert asked.registration.known


def test_transfer_process_that_cannot_be_reached_is_of_no_use_at_once() -> None:
    asked = Asked()
    asked.registration.ask(0)
    asked.answer("t1")
    asked.reachable = False
    asked.registration.ask(CHECK_EVERY_NS)
    assert not asked.registration.known


def test_answer_of_another_transfer_process_says_that_the_first_one_is_gone() -> None:
    asked = Asked()
    asked.registration.ask(0)
    assert asked.answer("t1") == (False, True)
    assert asked.registration.replaced_by(peer("t2"), 2)
    assert not asked.registration.known, "it was not asked yet"
    asked.registration.ask(1)
    assert asked.answer("t1") == (False, True)
    assert not asked.registration.known, "an answer of the dead one"
    assert asked.answer("t2") == (False, True)
    assert asked.registration.known


def test_late_words_of_a_transfer_process_never_heard_before_do_not_replace_the_live_one() -> None:
    asked = Asked()
    asked.registration.ask(0)
    assert asked.answer("t2") == (False, True)
    assert asked.answer("t1") == (False, True)
    assert asked.registration.known
    assert asked.answer("t2") == (False, True)
    assert asked.registration.known
    assert asked.answer("t3") == (True, True)


# -- the other leg's worker -----------------------------------------------------------------------


class Contacts:
    """Counterparts of a worker that asks every half second."""

    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []
        self.reachable = True
        self.counterparts = Counterparts(
            peer("me"), every_s=0.5, dead_after_s=3.0, silent_s=60.0, send=self._send
        )

    def _send(self, to: Peer, message: AnyMessage) -> bool:
        self.sent.append(message)
        return self.reachable

    def ask_until_gone(self, *, seconds: float, answers: bool = False) -> tuple[float, str] | None:
        other = peer("other")
        for half in range(round(seconds * 2)):
            now_ns = half * S // 2
            assert self.counterparts.is_due(now_ns)
            assert not self.counterparts.is_due(now_ns + 1)
            gone = self.counterparts.ask(other, [LegStatus(handoff_id="h")], now_ns)
            if gone is not None:
                return half / 2, gone
            if answers:
                self.counterparts.heard(other)
        return None


def test_worker_that_answers_is_asked_for_ever() -> None:
    contacts = Contacts()
    assert contacts.ask_until_gone(seconds=300, answers=True) is None
    assert len(contacts.sent) == 600


@pytest.mark.parametrize(
    ("reachable", "at_s", "why"),
    [(False, 3.5, "cannot be reached"), (True, 61.0, "has not answered for 60 s")],
)
def test_worker_counts_as_gone_when_it_is_unreachable_or_silent_for_too_long(
    reachable: bool, at_s: float, why: str
) -> None:
    contacts = Contacts()
    contacts.reachable = reachable
    assert contacts.ask_until_gone(seconds=300) == (at_s, why)


def test_worker_that_nothing_waits_for_is_forgotten_and_begins_anew() -> None:
    contacts = Contacts()
    assert contacts.ask_until_gone(seconds=50) is None
    contacts.counterparts.keep(set())
    for half in range(100, 200):
        assert contacts.counterparts.ask(peer("other"), [], half * S // 2) is None


def test_many_legs_are_asked_about_in_several_messages() -> None:
    contacts = Contacts()
    legs = [LegStatus(handoff_id=f"h{i}") for i in range(2 * MAX_LEGS_PER_PROBE + 1)]
    assert contacts.counterparts.ask(peer("other"), legs, 0) is None
    probes = [message for message in contacts.sent if isinstance(message, LegProbe)]
    assert [len(probe.legs) for probe in probes] == [MAX_LEGS_PER_PROBE, MAX_LEGS_PER_PROBE, 1]
    assert [status for probe in probes for status in probe.legs] == legs
