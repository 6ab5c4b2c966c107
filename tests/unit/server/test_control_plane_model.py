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
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from server.config import COLOCATED, Settings
from server.faults import FAULT_STAGES
from server.injection.fault import Corrupt, Damage, Fault, Freeze, Place, Raise, Shrink
from server.scheduler import Scheduler
from tests.support.whole_server import GATEWAY, Process, WholeServer, scarce_settings

EXAMPLES = int(os.environ.get("PDTRACE_MODEL_EXAMPLES", "60"))
pytestmark = pytest.mark.timeout(0 if "PDTRACE_MODEL_EXAMPLES" in os.environ else 900)
STEPS = 30
LONG_S = 40.0
"""Longer than all deadlines that may follow each other."""
SHAPES: dict[str, Settings] = {
    "pd": scarce_settings(),
    "pd, one pair": scarce_settings(prefill=1, decode=1),
    "pd, early": scarce_settings(first_token="prefill"),
    "colocated": scarce_settings(mode=COLOCATED, workers=2),
}
MAX_KILLS = 3
NUMBERS = st.integers(0, 1 << 16)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for. Few beginnings, so that prefixes are shared."""

    length: int
    first: int
    max_tokens: int
    stream: bool

    @property
    def prompt(self) -> list[int]:
        return [(self.first + 7 * i) % 200 for i in range(self.length)]


WISHES = st.lists(
    st.builds(
        Wish,
        length=st.sampled_from((1, 3, 4, 5, 8, 13, 30)),
        first=st.integers(1, 3),
        max_tokens=st.integers(1, 24),
        stream=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


FAULTS: st.SearchStrategy[Fault] = st.one_of(
    st.builds(Shrink, pages=st.integers(1, 20)),
    st.builds(
        Raise,
        place=st.sampled_from((Place.ENGINE, Place.MESSAGE, Place.COPY)),
        nth=st.integers(1, 4),
        count=st.integers(1, 3),
    ),
    st.builds(
        Freeze,
        stage=st.sampled_from(sorted(FAULT_STAGES)),
        ms=st.sampled_from((50, 500, 5000)),
        count=st.integers(1, 3),
    ),
    st.builds(Corrupt, copy=st.sampled_from(Damage), nth=st.integers(1, 3)),
)


class ControlPlane(RuleBasedStateMachine):
    """A server, and what is done to it. `NUMBERS` choose among what is there."""

    server: WholeServer

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="pdtrace-model-"))
        self._kills = 0

    @initialize(shape=st.sampled_from(sorted(SHAPES)), wishes=WISHES)
    def begin(self, shape: str, wishes: list[Wish]) -> None:
        self.server = WholeServer(self._directory, SHAPES[shape])
        self._ask(wishes)

    # -- clients ------------------------------------------------------------------------------

    @rule(wishes=WISHES)
    def ask(self, wishes: list[Wish]) -> None:
        self._ask(wishes)

    def _ask(self, wishes: list[Wish]) -> None:
        if self.server.gateway is not None:
            for wish in wishes:
                self.server.ask(wish.prompt, wish.max_tokens, stream=wish.stream)

    @rule(which=NUMBERS)
    def leave(self, which: int) -> None:
        clients = [client for client in self.server.clients if not client.is_over]
        if clients:
            clients[which % len(clients)].left.set()
            self.server.loop.settle()

    # -- messages -----------------------------------------------------------------------------

    @rule(which=NUMBERS, what=st.sampled_from(("deliver", "lose", "hold", "repeat", "reorder")))
    def meddle(self, which: int, what: str) -> None:
        post = self.server.post
        channels = post.channels()
        if not channels:
            return
        channel = channels[which % len(channels)]
        match what:
            case "deliver":
                self.server.deliver(channel)
            case "lose":
                post.take(channel)
            case "hold":
                post.held.append((channel, post.take(channel)))
            case "repeat":
                post.held.append((channel, post.waiting[channel][0]))
            case _:
                post.waiting[channel].rotate(-1)

    @rule()
    def release_held(self) -> None:
        self.server.post.release_held()

    @rule(sender=NUMBERS, receiver=NUMBERS)
    def block_or_free(self, sender: int, receiver: int) -> None:
        """Nothing moves between two for a while, and everything comes in the end."""
        names = [GATEWAY, *self.server.workers]
        channel = names[sender % len(names)], names[receiver % len(names)]
        self.server.post.blocked ^= {channel}

    # -- processes ----------------------------------------------------------------------------

    @precondition(lambda self: self._kills < MAX_KILLS)
    @rule(which=NUMBERS, noticed=st.booleans(), again=st.booleans())
    def kill(self, which: int, noticed: bool, again: bool) -> None:
        alive = [name for name in (*self.server.workers, GATEWAY) if self.server.is_up(name)]
        if not alive:
            return
        instance = alive[which % len(alive)]
        self._kills += 1
        self.server.kill(instance, noticed=noticed)
        if again:
            self.server.start(instance)

    @rule(which=NUMBERS)
    def freeze_or_thaw(self, which: int) -> None:
        if process := self._process(which):
            process.frozen = not process.frozen

    @rule(which=NUMBERS)
    def tell_to_stop(self, which: int) -> None:
        """As SIGTERM does: it takes nothing more, and ends what only waits."""
        process = self._process(which)
        if process is not None and isinstance(process.worker, Scheduler):
            process.worker.stop_accepting()

    @rule(which=NUMBERS, fault=FAULTS)
    def inject(self, which: int, fault: Fault) -> None:
        """Something goes wrong inside, if it can there."""
        if process := self._process(which):
            process.injector.arm([fault])

    # -- time ---------------------------------------------------------------------------------

    @rule(which=NUMBERS)
    def one_turns(self, which: int) -> None:
        """A process goes on with what it has, while nothing is delivered."""
        if (process := self._process(which)) and not process.frozen:
            process.step()

    def _process(self, which: int) -> Process | None:
        names = sorted(self.server.processes)
        return self.server.processes[names[which % len(names)]] if names else None

    @rule(turns=st.integers(1, 12))
    def all_turn(self, turns: int) -> None:
        for _ in range(turns):
            self.server.turn(ms=2.0)

    @rule(ms=st.sampled_from((100, 600, 1500, 4000)))
    def wait(self, ms: int) -> None:
        """Whoever is down comes back meanwhile, and so does what was held back."""
        for _ in range(ms // 50):
            self.server.turn(ms=50.0)
        self._bring_back()

    def _bring_back(self) -> None:
        for instance, worker in self.server.schedulers().items():
            if worker.draining and len(worker.legs) == 0:
                self.server.kill(instance, noticed=True)
        for instance in sorted(self.server.post.down):
            self.server.start(instance)
        self.server.post.release_held()
        self.server.post.blocked.clear()

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
            shutil.rmtree(self._directory)

    def _must_recover(self) -> None:
        """From here on nothing goes wrong: all ends by itself, and the next request is served."""
        server = self.server
        for process in server.processes.values():
            process.frozen = False
        server.clear_faults()
        self._bring_back()
        # Everybody hears of everybody: workers ask once a second who the transfer process is.
        for _ in range(30):
            server.turn(ms=50.0)
        server.run(until=lambda: not server.what_is_open(), limit_s=LONG_S, turn_ms=50.0)
        server.check()
        self._bring_back()  # who was told to stop has ended meanwhile
        server.run(until=lambda: not server.what_is_open(), limit_s=LONG_S, turn_ms=50.0)
        for client in server.clients:
            event(f"a request ended with {client.ending}")
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
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestControlPlane = ControlPlane.TestCase
