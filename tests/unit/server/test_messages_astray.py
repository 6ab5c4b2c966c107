"""Every message that processes send each other, once lost, late, twice, or behind the next one.

The model test (`test_control_plane_model`) chooses at random; here nobody is left to chance: each
type, on its way to each role, in requests that are served and in one whose client leaves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from server.config import COLOCATED
from server.injection.fault import Freeze
from server.wire.messages import AnyMessage
from tests.support.whole_server import Channel, Post, WholeServer, scarce_settings

SHAPES = {
    "pd": scarce_settings(prefill=1, decode=1),
    "pd, early": scarce_settings(prefill=1, decode=1, first_token="prefill"),
    "colocated": scarce_settings(mode=COLOCATED, workers=1),
}
EXPECTED = {
    "pd": {
        *("Heartbeat gateway", "Tokens gateway", "LegClosed gateway"),
        *("HeartbeatAck prefill", "HeartbeatAck decode", "HeartbeatAck transfer"),
        *("DecodeRequest decode", "PrefillRequest prefill", "PagesReserved prefill"),
        *("Handoff decode", "RegisterPool transfer", "CopyJob transfer"),
        *("CopyDone prefill", "CopyDone decode", "Cancel prefill", "Cancel decode"),
        *("Abort prefill", "Abort decode", "CancelCopies transfer", "CopiesDrained prefill"),
        *("CopiesDrained decode", "LegProbe prefill", "LegProbe decode"),
        *("LegReport prefill", "LegReport decode"),
    },
    "colocated": {
        *("Heartbeat gateway", "HeartbeatAck worker", "ColocatedRequest worker"),
        *("Tokens gateway", "LegClosed gateway", "Cancel worker"),
    },
}
EXPECTED["pd, early"] = EXPECTED["pd"]
MISHAPS = {
    "pd": ("lost", "late", "twice", "behind the next"),
    "pd, early": ("lost", "late"),
    "colocated": ("lost", "late", "twice", "behind the next"),
}
MAY_COST = {("pd, early", "CopyJob transfer"): {"200 and jobs_missing"}}
"""Endings of requests of which this message was lost, or came behind the next: here the first token
was sent before its KV, so that there is no second attempt."""
LATE_S = 0.7
"""Later than a beat, so that what is sent again comes first."""
LONG_S = 40.0


def kind_of(channel: Channel, message: AnyMessage) -> str:
    """`CopyDone decode`: the type, and the role of who gets it."""
    return f"{type(message).__name__} {channel[1].rpartition('-')[0]}"


@dataclass(slots=True)
class MeddledPost(Post):
    """Does `what` to message number `nth` of a kind, counted from `armed` on."""

    what: str = ""
    kind: str = ""
    nth: int = 1
    armed: bool = False
    seen: Counter[str] = field(default_factory=Counter[str])

    def put(self, channel: Channel, message: AnyMessage) -> bool:
        if not self.armed:
            return Post.put(self, channel, message)
        kind = kind_of(channel, message)
        self.seen[kind] += 1
        if kind == self.kind and self.seen[kind] == self.nth:
            match self.what:
                case "lost":
                    return True
                case "twice":
                    self.held.append((channel, message))
                case _:
                    self.held.append((channel, message))
                    return True
        put = Post.put(self, channel, message)
        if self.what == "behind the next":
            behind = [held for held in self.held if held[0] == channel]
            if behind and behind[0][1] is not message:
                self.release_held()
        return put


def served(directory: Path, shape: str, post: MeddledPost) -> list[str]:
    """Two clients are served, one after a wait, and one leaves while its KV moves. How the two
    ended; fails where something stays, or where the next request is not served."""
    server = WholeServer(directory, SHAPES[shape], post)
    try:
        post.armed = True
        for process in server.processes.values():
            process.injector.arm([Freeze(stage="prefill.compute", ms=500)])
        clients = [
            server.ask([(3 + 7 * i) % 200 for i in range(13)], 6, stream=True),
            server.ask([(5 + 7 * i) % 200 for i in range(5)], 9, stream=False),
        ]
        leaves = server.ask([(9 + 7 * i) % 200 for i in range(30)], 20, stream=True)
        late_ns = server.clock.monotonic_ns() + round(LATE_S * 1e9)
        for number in range(round(2 * LATE_S / 0.01)):
            server.turn(ms=10.0)
            server.check()
            if number == 3:
                leaves.left.set()
                server.loop.settle()
            if server.clock.monotonic_ns() >= late_ns:
                post.release_held()
        server.run(until=lambda: not server.what_is_open(), limit_s=LONG_S, turn_ms=50.0)
        server.check()
        post.armed = False
        probe = server.ask([9, 8, 7, 6, 5], 6, stream=True)
        server.run(until=lambda: probe.is_over, limit_s=10.0)
        assert (probe.status, probe.text) == (200, probe.right_text)
        server.run(until=lambda: not server.what_is_open(), limit_s=LONG_S, turn_ms=50.0)
        server.check()
        return [client.ending for client in clients]
    finally:
        server.close()


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_story_has_every_message_of_its_mode(tmp_path: Path, shape: str) -> None:
    post = MeddledPost()
    assert served(tmp_path, shape, post) == ["200", "200"]
    assert set(post.seen) == EXPECTED[shape]


@pytest.mark.parametrize(
    ("shape", "what", "kind"),
    [
        (shape, what, kind)
        for shape, mishaps in MISHAPS.items()
        for what in mishaps
        for kind in sorted(EXPECTED[shape])
    ],
)
def test_one_message_that_goes_astray_leaves_nothing_behind(
    tmp_path: Path, shape: str, what: str, kind: str
) -> None:
    post = MeddledPost(what=what, kind=kind)
    endings = served(tmp_path, shape, post)
    assert post.seen[kind], "it was never sent"
    assert set(endings) <= {"200", *MAY_COST.get((shape, kind), ())}
