"""What the ends of attempts teach the gateway about its workers, without sockets."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from pdtrace.propagation import RequestContext
from pdtrace.stages import Mode, Outcome, Role
from pdtrace.testing import FakeClock
from server.config import Settings
from server.engine.fake import FakeModel
from server.gateway.attempts import Attempt, Event
from server.gateway.cluster import FORGET_AFTER, Cluster
from server.gateway.errors import AttemptFailure, LegFailed, NoPair, WorkerVanished
from server.gateway.mailbox import Mailbox
from server.gateway.now import Now
from server.gateway.registry import MemberState
from server.gateway.routing import PairChoice, RouteRequest
from server.wire.messages import AnyMessage, Cancel, LegClosed, Peer
from tests.unit.server.gateway.test_gateway_registry import beat

pytestmark = pytest.mark.anyio

REQUEST = RouteRequest(prompt_ids=(1, 2, 3), max_tokens=4)
PLAN = [
    ("transfer-0", Role.TRANSFER),
    ("prefill-0", Role.PREFILL),
    ("prefill-1", Role.PREFILL),
    ("decode-0", Role.DECODE),
    ("decode-1", Role.DECODE),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class MailDouble:
    """Keeps what is sent. `lost`: endpoints whose connection broke."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, AnyMessage]] = []
        self.lost: set[str] = set()

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        if endpoint in self.lost:
            return False
        self.sent.append((endpoint, message))
        return True

    def forget(self, endpoint: str) -> None:
        self.lost.discard(endpoint)

    def is_lost(self, endpoint: str) -> bool:
        return endpoint in self.lost


class Bench:
    """A cluster of two pairs, all of them heard of."""

    def __init__(self, **settings: Any) -> None:
        self.mail = MailDouble()
        self.ignored: Counter[str] = Counter()
        self.cluster = Cluster(
            settings=Settings(prefill=2, decode=2, policy="round_robin", **settings),
            me=Peer(instance="gateway-0", endpoint="ipc://g", incarnation="g"),
            fingerprint=FakeModel().info.fingerprint,
            mail=self.mail,
            ignored=lambda kind: self.ignored.update([kind]),
        )
        self._seq = 0
        self.beat(*(name for name, _ in PLAN))

    def beat(self, *names: str) -> None:
        self._seq += 1
        for name in names:
            role = dict(PLAN)[name]
            self.cluster.deliver(beat(name, role, incarnation=f"{name}/1", seq=self._seq))

    def attempt(self) -> Attempt:
        """An attempt on the pair whose turn it is."""
        choice = self.cluster.choose(REQUEST)
        assert choice is not None
        return self.cluster.attempts.open(
            RequestContext.create(request_id="r", mode=Mode.PD),
            choice,
            prompt_len=3,
            promised_tokens=7,
            mailbox=Mailbox[Event](),
            on_closed=lambda: None,
        )

    def close(
        self, attempt: Attempt, instance: str, reason: str, *, by: str | None = None
    ) -> AttemptFailure:
        closed = LegClosed(
            handoff_id=attempt.handoff_id,
            instance=instance,
            outcome=Outcome.FAILED,
            reason=reason,
            message=f"{reason} of {instance}",
            by=by or instance,
        )
        self.cluster.deliver(closed)
        return LegFailed.of(closed)

    def states(self) -> dict[str, MemberState]:
        return {report.instance: report.state for report in self.cluster.reports()}

    def not_ready(self) -> dict[str, MemberState]:
        return {name: s for name, s in self.states().items() if s is not MemberState.READY}


def pair(choice: PairChoice | None) -> tuple[str, str]:
    assert choice is not None
    return choice.prefill.peer.instance, choice.decode.peer.instance


@pytest.mark.parametrize(("by", "refused"), [("prefill-0", True), ("decode-0", False)])
async def test_only_the_handshake_itself_makes_a_pairing_refused(by: str, refused: bool) -> None:
    """Decode uses the same word when one handoff speaks of another prompt."""
    bench = Bench()
    attempt = bench.attempt()
    bench.close(attempt, by, "handshake_mismatch")
    assert bench.cluster.num_pairs() == (3 if refused else 4)
    found = [(r.prefill, r.decode, r.reason) for r in bench.cluster.refusals()]
    expected = [("prefill-0", "decode-0", f"handshake_mismatch of {by}")]
    assert found == (expected if refused else [])


@pytest.mark.parametrize("reason", ["worker_lost", "peer_unreachable"])
async def test_worker_that_another_cannot_reach_must_be_heard_of_first(reason: str) -> None:
    bench = Bench()
    failure = bench.close(bench.attempt(), "prefill-0", reason)
    assert bench.not_ready() == {"decode-0": MemberState.SUSPECT}
    assert bench.cluster.num_pairs() == 2
    bench.beat("prefill-0")
    assert bench.cluster.num_pairs() == 2
    bench.beat("decode-0")
    assert bench.cluster.num_pairs() == 4
    assert failure.by == "prefill-0"


async def test_worker_that_leaves_is_doubted_itself_and_only_if_nobody_told_it_to_end() -> None:
    bench = Bench()
    attempt = bench.attempt()
    bench.cluster.attempts.cancel(attempt, Outcome.FAILED, "shutting_down", by="decode-0")
    bench.close(attempt, "decode-0", "shutting_down")
    assert bench.not_ready() == {}
    bench.close(bench.attempt(), "decode-1", "shutting_down")
    assert bench.not_ready() == {"decode-1": MemberState.SUSPECT}


@pytest.mark.parametrize(
    ("by", "reason"), [("decode-0", "transfer_lost"), ("prefill-0", "transfer_unreachable")]
)
async def test_without_a_transfer_process_nobody_is_paired_until_it_is_heard_of(
    by: str, reason: str
) -> None:
    bench = Bench()
    bench.close(bench.attempt(), by, reason)
    assert bench.not_ready() == {"transfer-0": MemberState.SUSPECT}
    assert bench.cluster.choose(REQUEST) is None
    bench.beat("transfer-0")
    assert bench.cluster.num_pairs() == 4


async def test_attempt_after_a_failure_avoids_whom_it_blames() -> None:
    bench = Bench()
    choice = bench.attempt().choice
    closed = {
        reason: LegFailed("x", code=reason, outcome=Outcome.FAILED, by="prefill-0")
        for reason in ("overloaded", "checksum_mismatch", "worker_lost", "gateway_lost")
    }
    avoided = {
        reason: bench.cluster.after(choice, REQUEST, failure).avoid
        for reason, failure in closed.items()
    }
    assert avoided == {
        "overloaded": {"prefill-0/1"},
        "checksum_mismatch": {"prefill-0/1", "decode-0/1"},
        "worker_lost": {"decode-0/1"},  # prefill-0 says so of its partner
        "gateway_lost": set(),
    }
    gone = WorkerVanished("x", by="prefill-0")
    following = bench.cluster.after(choice, REQUEST, gone)
    assert following.avoid == {"prefill-0/1"}
    assert bench.cluster.after(choice, following, closed["worker_lost"]).avoid == {
        "prefill-0/1",
        "decode-0/1",
    }


async def test_full_worker_without_another_ends_the_request_as_it_said() -> None:
    bench = Bench()
    attempt = bench.attempt()
    bench.mail.lost = {"ipc://prefill-1"}
    failure = bench.close(attempt, "prefill-0", "overloaded")
    with pytest.raises(LegFailed) as refusal:
        bench.cluster.after(attempt.choice, REQUEST, failure)
    assert (refusal.value.http_status, refusal.value.code) == (503, "overloaded")


async def test_no_pair_left_says_why_and_one_restart_mends_it() -> None:
    bench = Bench()
    bench.mail.lost = {"ipc://prefill-1", "ipc://decode-1"}
    attempt = bench.attempt()
    failure = bench.close(attempt, "prefill-0", "handshake_mismatch")
    for ask in (
        lambda: bench.cluster.after(attempt.choice, REQUEST, failure),
        lambda: bench.cluster.choose(REQUEST),
        lambda: bench.cluster.has_pair(REQUEST),
    ):
        with pytest.raises(NoPair) as refusal:
            ask()
        assert refusal.value.http_status == 503
        assert refusal.value.code == "handshake_mismatch"
        assert "prefill-0 with decode-0: handshake_mismatch of prefill-0" in str(refusal.value)
    assert bench.states()["prefill-0"] is MemberState.INCOMPATIBLE
    bench.cluster.deliver(beat("decode-0", Role.DECODE, incarnation="decode-0/2"))
    assert pair(bench.cluster.choose(REQUEST)) == ("prefill-0", "decode-0")


async def test_lost_connection_keeps_work_away_before_anybody_is_dead() -> None:
    bench = Bench()
    bench.mail.lost = {"ipc://decode-0"}
    for _ in range(4):
        assert pair(bench.cluster.choose(REQUEST))[1] == "decode-1"
    bench.mail.lost.clear()
    bench.beat("decode-0")
    assert {pair(bench.cluster.choose(REQUEST))[1] for _ in range(4)} == {"decode-0", "decode-1"}


async def test_leg_behind_one_that_was_refused_is_not_asked_to_begin() -> None:
    bench = Bench()
    attempt = bench.attempt()
    prefill, decode = attempt.choice.prefill.peer, attempt.choice.decode.peer
    word = Cancel(handoff_id="h", outcome="x", reason="x", by="x", gateway=prefill)
    bench.mail.sent.clear()
    bench.mail.lost = {decode.endpoint}
    assert bench.cluster.dispatch(attempt, [(decode, word), (prefill, word)]) == decode
    assert bench.mail.sent == []
    assert attempt.closed.is_set()
    assert bench.not_ready() == {"decode-0": MemberState.SUSPECT}


async def test_process_that_stopped_in_order_is_no_loss_and_a_stranger_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, forgotten = FakeClock(), list[bool]()
    cluster = Cluster(
        settings=Settings(),
        me=Peer(instance="gateway-0", endpoint="ipc://g", incarnation="g"),
        fingerprint=FakeModel().info.fingerprint,
        mail=MailDouble(),
        ignored=lambda _kind: None,
        forgotten=lambda: forgotten.append(True),
        now=Now(clock),
    )
    cluster.deliver(beat("prefill-0", Role.PREFILL, draining=True, leaving=True))
    cluster.deliver(beat("prefill-9\nERROR all is lost", Role.PREFILL, incarnation="9"))
    seconds = Settings().dead_after_s
    with caplog.at_level(logging.INFO, logger="server.gateway.cluster"):
        for _ in range(FORGET_AFTER * round(seconds) + 2):
            clock.advance(s=1)
            cluster.bury_dead()
    assert forgotten == [True]
    assert [report.instance for report in cluster.reports()] == ["prefill-0"]
    told = [(r.levelname, r.getMessage()) for r in caplog.records if "stood" not in r.getMessage()]
    assert told == [
        ("INFO", "prefill-0 is gone: it stopped when it was told to"),
        ("WARNING", '"prefill-9\\nERROR all is lost" is gone: it sent no heartbeat in time'),
        (
            "WARNING",
            '"prefill-9\\nERROR all is lost", which this server did not start, is forgotten: '
            "dead, silent for 61 s",
        ),
    ]
