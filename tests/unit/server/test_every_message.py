"""Each type of message is once lost, late, repeated or out of order: the request ends as the table
says, its trace says so too, nothing stays taken, and the next request is served.

The server is whole: gateway, two pairs and a transfer process, under a fake clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest

from pdtrace import semconv as a
from pdtrace.spans import Span
from pdtrace.stages import Role
from server.config import COLOCATED, Settings
from server.kv.transfer.base import Copied, Failed, Reason, TransferEvent
from server.wire.messages import (
    Abort,
    AnyMessage,
    Cancel,
    CancelCopies,
    ColocatedRequest,
    CopiesDrained,
    CopyDone,
    CopyFailed,
    CopyJob,
    DecodeRequest,
    FaultReport,
    Handoff,
    Heartbeat,
    HeartbeatAck,
    InjectFaults,
    LegClosed,
    LegProbe,
    LegReport,
    PagesReserved,
    PrefillRequest,
    RegisterPool,
    Tokens,
)
from tests.support.memory_traces import spans_by_request
from tests.support.whole_server import Channel, Client, Post, WholeServer, scarce_settings

TURN_MS = 20.0
DELAY_MS = 300
BY_TESTS_ALONE = {InjectFaults, FaultReport}
"""Sent by who injects faults, and answered to it: no part of serving."""
WAYS = ("lose", "delay", "repeat", "reorder")

Kind = type[AnyMessage]


@dataclass
class Meddler:
    """Meddles with the first message of a type that is sent after it was made."""

    server: WholeServer
    kind: Kind
    way: str
    usual: Callable[[Post, Channel, AnyMessage], bool]
    done: bool = False
    late: list[tuple[int, Channel, AnyMessage]] = field(
        default_factory=list[tuple[int, Channel, AnyMessage]]
    )
    behind: tuple[Channel, AnyMessage] | None = None

    def _put(self, channel: Channel, message: AnyMessage) -> bool:
        return self.usual(self.server.post, channel, message)

    def put(self, channel: Channel, message: AnyMessage) -> bool:
        if self.done or type(message) is not self.kind:
            taken = self._put(channel, message)
            if self.behind is not None and self.behind[0] == channel:
                self._put(*self.behind)
                self.behind = None
            return taken
        self.done = True
        now_ns = self.server.clock.monotonic_ns()
        match self.way:
            case "delay":
                self.late.append((now_ns + DELAY_MS * 1_000_000, channel, message))
            case "repeat":
                self._put(channel, message)
                self.late.append((now_ns + DELAY_MS * 1_000_000, channel, message))
            case "reorder":
                self.behind = (channel, message)
                self.late.append((now_ns + DELAY_MS * 1_000_000, channel, message))
            case _:
                pass
        return True

    def turn(self) -> None:
        now_ns = self.server.clock.monotonic_ns()
        for entry in [entry for entry in self.late if entry[0] <= now_ns]:
            self.late.remove(entry)
            if self.way == "reorder":
                if self.behind is None:
                    continue  # it came behind another one
                self.behind = None
            self._put(*entry[1:])


@dataclass(frozen=True, kw_only=True)
class End:
    """How a request ends.

    status   of the response
    failed   reason and stage of the attempt that failed, if another one followed
    within_s how long it takes at most
    """

    status: int = 200
    failed: tuple[str, str] | None = None
    outcome: str = "completed"
    stage: str | None = None
    within_s: float = 2.5


SERVED = End()
LEFT = End(outcome="cancelled", stage="decode.generate")
COPY_FAILED = End(failed=("checksum_mismatch", "transfer"))

PLAIN: tuple[Kind, ...] = (
    *(Heartbeat, HeartbeatAck, RegisterPool, CancelCopies, CopiesDrained, LegProbe, LegReport),
    *(DecodeRequest, PrefillRequest, PagesReserved, Handoff, CopyJob, CopyDone, Tokens, LegClosed),
)
"""Types that a request which goes well makes somebody send; of a pair."""
ENDS: Mapping[tuple[Kind, str], End] = {
    (DecodeRequest, "lose"): End(failed=("request_lost", "hop.dispatch")),
    (PrefillRequest, "lose"): End(failed=("request_lost", "hop.publish")),
    (ColocatedRequest, "lose"): End(failed=("request_lost", "hop.dispatch")),
    # Its answer lacked the first token when both legs were over, and nothing was written.
    (Tokens, "lose"): End(failed=("stream_incomplete", "hop.token")),
    (Tokens, "delay"): End(failed=("stream_incomplete", "hop.token")),
}
"""What is not made good without anybody's noticing."""


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Generator[WholeServer]:
    settings: Settings = getattr(request, "param", scarce_settings())
    server = WholeServer(tmp_path, settings)
    yield server
    server.close()


def meddle(server: WholeServer, kind: Kind, way: str, monkeypatch: pytest.MonkeyPatch) -> Meddler:
    meddler = Meddler(server, kind, way, Post.put)

    def put(_post: Post, channel: Channel, message: AnyMessage) -> bool:
        return meddler.put(channel, message)

    monkeypatch.setattr(Post, "put", put)
    return meddler


def run(server: WholeServer, meddler: Meddler, *, limit_s: float) -> None:
    """Until nobody holds anything any more and nothing is late."""

    def over() -> bool:
        meddler.turn()
        return not server.what_is_open() and not meddler.late

    server.run(until=over, limit_s=limit_s, turn_ms=TURN_MS)


def attr(span: Span, wanted: a.Attr) -> object:
    return span.attributes.get(wanted.key)


def check(server: WholeServer, client: Client, expected: End) -> None:
    spans = spans_by_request(server.rings)
    assert set(spans) == {other.request_id for other in server.clients}
    trace = spans[client.request_id]
    assert client.status == expected.status
    if expected.outcome == "completed":
        assert client.text == client.right_text
    (root,) = [span for span in trace if span.parent_id is None]
    assert (attr(root, a.OUTCOME), attr(root, a.OUTCOME_STAGE)) == (
        expected.outcome,
        expected.stage,
    )
    attempts = [span for span in trace if span.name == "attempt"]
    ends = [(attr(span, a.OUTCOME_REASON), attr(span, a.OUTCOME_STAGE)) for span in attempts]
    assert ends[:-1] == ([] if expected.failed is None else [expected.failed])
    assert attr(attempts[-1], a.OUTCOME) == expected.outcome
    assert len({attr(span, a.HANDOFF_ID) for span in attempts}) == len(attempts)
    assert not [span.name for span in trace if attr(span, a.VIOLATION)]
    assert not [span.name for span in trace if attr(span, a.OUTCOME) == "lost"]
    server.check()


def check_probe(server: WholeServer) -> None:
    """The next request is served as if nothing had been."""
    probe = server.ask([9, 8, 7, 6, 5], 6, stream=True)
    server.run(until=lambda: not server.what_is_open(), limit_s=5.0)
    assert (probe.status, probe.text) == (200, probe.right_text)
    server.check()


def stand_still(server: WholeServer, meddler: Meddler, role: Role, *, ms: int) -> None:
    """Processes of a role are in a long step: the legs ask for each other."""
    processes = [process for process in server.processes.values() if process.role is role]
    for process in processes:
        process.frozen = True
    for _ in range(0, ms, round(TURN_MS)):
        meddler.turn()
        server.turn(ms=TURN_MS)
    for process in processes:
        process.frozen = False


def serve_one(server: WholeServer, meddler: Meddler, expected: End) -> None:
    begun_ns = server.clock.monotonic_ns()
    client = server.ask([3, 1, 4, 1, 5, 9], 6, stream=True)
    if meddler.kind in (LegProbe, LegReport):
        stand_still(server, meddler, Role.PREFILL, ms=500)
    run(server, meddler, limit_s=30.0)
    # What a heartbeat or a question makes somebody send comes within two of them.
    server.run(until=lambda: meddler.done, limit_s=2.0)
    run(server, meddler, limit_s=30.0)
    took_s = (server.clock.monotonic_ns() - begun_ns) / 1e9
    assert took_s < expected.within_s
    check(server, client, expected)
    check_probe(server)


def test_every_type_has_a_row() -> None:
    rows = {*PLAIN, ColocatedRequest, Cancel, Abort, CopyFailed}
    assert rows | BY_TESTS_ALONE == set(get_args(AnyMessage))
    assert {kind for kind, _ in ENDS} <= rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_request_is_served_or_ends_as_the_table_says(
    server: WholeServer, kind: Kind, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meddler = meddle(server, kind, way, monkeypatch)
    serve_one(server, meddler, ENDS.get((kind, way), SERVED))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ColocatedRequest, Tokens, LegClosed], ids=lambda k: k.__name__)
@pytest.mark.parametrize(
    "server", [scarce_settings(mode=COLOCATED, workers=2)], indirect=True, ids=["colocated"]
)
def test_the_same_without_a_pair(
    server: WholeServer, kind: Kind, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meddler = meddle(server, kind, way, monkeypatch)
    serve_one(server, meddler, ENDS.get((kind, way), SERVED))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind",
    [DecodeRequest, PrefillRequest, PagesReserved, Handoff, CopyJob, CopyDone, Tokens, LegClosed],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize(
    "server", [scarce_settings(first_token="prefill")], indirect=True, ids=["early"]
)
def test_the_same_where_prefill_sends_the_first_token(
    server: WholeServer, kind: Kind, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meddler = meddle(server, kind, way, monkeypatch)
    serve_one(server, meddler, ENDS.get((kind, way), SERVED))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Cancel, LegClosed], ids=lambda kind: kind.__name__)
def test_client_that_leaves_frees_everything_all_the_same(
    server: WholeServer, kind: Kind, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.ask([3, 1, 4, 1, 5, 9], 24, stream=True)
    server.run(until=lambda: bool(client.text), limit_s=5.0)
    meddler = meddle(server, kind, way, monkeypatch)
    begun_ns = server.clock.monotonic_ns()
    client.left.set()
    run(server, meddler, limit_s=10.0)
    assert meddler.done
    assert server.clock.monotonic_ns() - begun_ns < 1_000_000_000
    check(server, client, LEFT)
    check_probe(server)


def _failed(copied: Copied) -> Failed:
    return Failed(
        handoff_id=copied.handoff_id,
        index=copied.index,
        reason=Reason.CHECKSUM_MISMATCH,
        message="altered on the way",
        settled=True,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Abort, CopyFailed], ids=lambda kind: kind.__name__)
def test_copy_that_fails_is_tried_again_whoever_hears_of_it_first(
    server: WholeServer, kind: Kind, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = server.processes["transfer-0"].transfer
    assert transfer is not None
    poll = transfer.poll

    def fail_once(timeout_s: float) -> list[TransferEvent]:
        events = poll(timeout_s)
        if not any(isinstance(event, Copied) for event in events):
            return events
        monkeypatch.setattr(transfer, "poll", poll)
        return [_failed(event) if isinstance(event, Copied) else event for event in events]

    monkeypatch.setattr(transfer, "poll", fail_once)
    meddler = meddle(server, kind, way, monkeypatch)
    client = server.ask([3, 1, 4, 1, 5, 9], 6, stream=True)
    run(server, meddler, limit_s=30.0)
    assert meddler.done
    check(server, client, COPY_FAILED)
    check_probe(server)
