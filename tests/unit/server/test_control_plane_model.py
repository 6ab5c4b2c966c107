"""Whatever happens to messages and processes, in whatever order: every request ends once, with its
own text or an error, and nothing is held once all deadlines have passed.

A model-based test over the real gateway, workers and transfer process. The model is small: what may
be true of a request and of a pool at any moment, and what must be once things go well again.
PDTRACE_MODEL_EXAMPLES=2000 searches longer than the tests do.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from server.config import COLOCATED, Settings
from server.gateway import cluster, pipeline
from tests.support.whole_server import GATEWAY, Client, WholeServer, scarce_settings

EXAMPLES = int(os.environ.get("PDTRACE_MODEL_EXAMPLES", "60"))
STEPS = 30
LONG_S = 40.0
"""Longer than all deadlines that may follow each other."""
SHAPES: dict[str, Settings] = {
    "pd": scarce_settings(),
    "pd, one pair": scarce_settings(prefill=1, decode=1),
    "pd, early": scarce_settings(first_token="prefill"),
    "colocated": scarce_settings(mode=COLOCATED, workers=2),
}
LENGTHS = (1, 3, 4, 5, 8, 13, 30)
numbers = st.integers(0, 1 << 16)


class ControlPlane(RuleBasedStateMachine):
    """A server, and what is done to it. `numbers` choose among what is there."""

    server: WholeServer

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="pdtrace-model-"))
        self._patch = pytest.MonkeyPatch()

    @initialize(shape=st.sampled_from(sorted(SHAPES)))
    def begin(self, shape: str) -> None:
        self.server = WholeServer(self._directory, SHAPES[shape], self._patch_time)

    def _patch_time(self, fake: Any) -> None:
        for module in (cluster, pipeline):
            self._patch.setattr(module, "time", fake)

    # -- clients ------------------------------------------------------------------------------

    @precondition(lambda self: self.server.gateway is not None)
    @rule(
        length=st.sampled_from(LENGTHS),
        first=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
        stream=st.booleans(),
    )
    def ask(self, length: int, first: int, max_tokens: int, stream: bool) -> None:
        prompt = [(first + 7 * i) % 200 for i in range(length)]
        self.server.ask(prompt, max_tokens, stream=stream)

    @precondition(lambda self: self._open())
    @rule(which=numbers)
    def leave(self, which: int) -> None:
        clients = self._open()
        clients[which % len(clients)].left.set()
        self.server.loop.settle()

    def _open(self) -> list[Client]:
        return [client for client in self.server.clients if not client.is_over]

    # -- messages -----------------------------------------------------------------------------

    @precondition(lambda self: self.server.post.channels())
    @rule(which=numbers)
    def deliver_one(self, which: int) -> None:
        self.server.deliver(self._channel(which))

    @precondition(lambda self: self.server.post.channels())
    @rule(which=numbers)
    def lose(self, which: int) -> None:
        self.server.post.take(self._channel(which))

    @precondition(lambda self: self.server.post.channels())
    @rule(which=numbers)
    def hold_back(self, which: int) -> None:
        channel = self._channel(which)
        self.server.post.held.append((channel, self.server.post.take(channel)))

    @precondition(lambda self: self.server.post.channels())
    @rule(which=numbers)
    def repeat_later(self, which: int) -> None:
        channel = self._channel(which)
        self.server.post.held.append((channel, self.server.post.waiting[channel][0]))

    @precondition(lambda self: self.server.post.channels())
    @rule(which=numbers)
    def reorder(self, which: int) -> None:
        self.server.post.waiting[self._channel(which)].rotate(-1)

    @rule()
    def release_held(self) -> None:
        self.server.post.release_held()

    def _channel(self, which: int) -> tuple[str, str]:
        channels = self.server.post.channels()
        return channels[which % len(channels)]

    # -- processes ----------------------------------------------------------------------------

    @rule(which=numbers, noticed=st.booleans(), again=st.booleans())
    def kill(self, which: int, noticed: bool, again: bool) -> None:
        alive = [name for name in (GATEWAY, *self.server.workers) if self.server.is_up(name)]
        if alive:
            instance = alive[which % len(alive)]
            self.server.kill(instance, noticed=noticed)
            if again:
                self.server.start(instance)

    @precondition(lambda self: self.server.post.down)
    @rule()
    def start(self) -> None:
        self.server.start(min(self.server.post.down))

    @rule(which=numbers)
    def freeze_or_thaw(self, which: int) -> None:
        processes = sorted(self.server.processes.items())
        if processes:
            _, process = processes[which % len(processes)]
            process.frozen = not process.frozen

    # -- time ---------------------------------------------------------------------------------

    @rule(which=numbers)
    def one_turns(self, which: int) -> None:
        """A process goes on with what it has, while nothing is delivered."""
        processes = sorted(self.server.processes.items())
        if processes:
            _, process = processes[which % len(processes)]
            if not process.frozen:
                process.step()

    @rule(turns=st.integers(1, 6))
    def all_turn(self, turns: int) -> None:
        for _ in range(turns):
            self.server.turn(ms=2.0)

    @rule(ms=st.sampled_from((100, 600, 1500, 4000)))
    def wait(self, ms: int) -> None:
        for _ in range(ms // 50):
            self.server.turn(ms=50.0)

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "server"):
            self.server.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "server"):
                self._must_recover()
        finally:
            if hasattr(self, "server"):
                self.server.close()
            self._patch.undo()
            shutil.rmtree(self._directory)

    def _must_recover(self) -> None:
        """From here on nothing goes wrong: all ends by itself, and the next request is served."""
        server = self.server
        for process in server.processes.values():
            process.frozen = False
        for instance in sorted(server.post.down):
            server.start(instance)
        server.post.release_held()
        for _ in range(20):  # a second: everybody hears of everybody
            server.turn(ms=50.0)
        server.run(until=lambda: not server.what_is_open(), limit_s=LONG_S, turn_ms=50.0)
        server.check()
        probe = server.ask([9, 8, 7, 6, 5], 6, stream=True)
        server.run(until=lambda: probe.is_over, limit_s=10.0)
        assert (probe.status, probe.text) == (200, probe.right_text)
        server.run(until=lambda: not server.what_is_open(), limit_s=LONG_S, turn_ms=50.0)
        server.check()


ControlPlane.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize="PDTRACE_MODEL_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TestControlPlane = ControlPlane.TestCase
