"""Heartbeats: a thread that tells the gateway how far the scheduler loop of this process is.

Owns the thread, its sockets and the numbers it sends; knows nothing of what the loop does. It beats
even while the loop hangs: that is how a hang is seen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from pdtrace.clock import SYSTEM_CLOCK, Clock
from server.config import ProcessConfig
from server.engine.base import Engine, ModelInfo
from server.kv.layout import KvLayout
from server.kv.pool import PoolDescriptor
from server.round_trips import RoundTrips
from server.taken import TakenRequests
from server.wire.messages import AnyMessage, Heartbeat, Peer, RegisterPool, WorkerLoad
from server.wire.sockets import Outbox

RETRY_S = 0.05


class BeatOutbox(Protocol):
    """What the thread sends through; `server.wire.sockets.Outbox`."""

    def send(self, endpoint: str, message: AnyMessage) -> bool: ...

    def close(self) -> None: ...


MakeOutbox: TypeAlias = Callable[[], BeatOutbox]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Errand:
    """Something to be told: `tell` is False when its receiver did not take it."""

    tell: Callable[[BeatOutbox], bool]
    due_s: float = 0.0


class ProgressState(NamedTuple):
    """What the loop last said of itself; `ticked_ns` is CLOCK_MONOTONIC."""

    ticked_ns: int
    busy: bool
    load: WorkerLoad
    ignored: Mapping[str, int]


class Progress:
    """Written by the scheduler loop, read by the heartbeat thread.

    The loop calls `tick` every time it goes round, and with `busy=False` before it waits for work.
    `draining` and `recorded` are what the next heartbeat says.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._state = ProgressState(clock.monotonic_ns(), False, WorkerLoad(), {})
        self.draining = False
        self.recorded = True

    def tick(
        self,
        *,
        busy: bool,
        load: WorkerLoad | None = None,
        ignored: Mapping[str, int] | None = None,
    ) -> int:
        """The loop went round; None keeps the numbers. Returns the instant, for the
        LAST_PROGRESS_NS gauge.

        ignored   messages without effect so far, as "why.Type"; may go on changing
        """
        now_ns = self._clock.monotonic_ns()
        before = self._state
        counts = before.ignored
        if ignored is not None and ignored != counts:
            counts = dict(ignored)  # the other thread must not read what changes
        # One assignment of one tuple: the reader never sees half of it.
        self._state = ProgressState(now_ns, busy, before.load if load is None else load, counts)
        return now_ns

    @property
    def state(self) -> ProgressState:
        return self._state

    @property
    def age_s(self) -> float:
        """Seconds since the last tick; 0 while the loop has no work."""
        state = self._state
        if not state.busy:
            return 0.0
        return max(0, self._clock.monotonic_ns() - state.ticked_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """What a worker with a loaded engine offers."""

    info: ModelInfo
    layout: KvLayout
    pool: PoolDescriptor

    @classmethod
    def of(cls, engine: Engine) -> Serves:
        return cls(info=engine.info, layout=engine.layout, pool=engine.pool.descriptor)


class HeartbeatThread:
    """Sends a Heartbeat to the gateway every `heartbeat_s`, the first at once, and RegisterPool to
    the host's transfer process once it is known what this process `serves`: a worker beats while it
    loads its engine, and gets no work.

    `stop` sends a last beat with `draining` and `leaving` set. What a peer does not take, because
    its connection is lost, is said again every `RETRY_S` until it does: a process that starts again
    at its address hears of everybody as soon as it can be reached. Answers arrive in the process's
    inbox; `round_trips` matches them; `taken` are the requests that it names, `denied` counts
    connections that were not let in, by plane.
    """

    def __init__(
        self,
        config: ProcessConfig,
        progress: Progress,
        *,
        serves: Serves | None = None,
        round_trips: RoundTrips | None = None,
        taken: TakenRequests | None = None,
        clock: Clock = SYSTEM_CLOCK,
        make_outbox: MakeOutbox = Outbox,
        num_malformed: Callable[[], int] = lambda: 0,
        denied: Callable[[], dict[str, int]] = dict[str, int],
    ) -> None:
        self._config = config
        self._num_malformed = num_malformed
        self._denied = denied
        self._progress = progress
        self._serves = serves
        self._round_trips = RoundTrips() if round_trips is None else round_trips
        self._taken = TakenRequests() if taken is None else taken
        self._clock = clock
        self._make_outbox = make_outbox
        self._peer = Peer(
            instance=config.instance, endpoint=config.endpoint, incarnation=config.incarnation
        )
        self._seq = 0
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def announce(self, serves: Serves) -> None:
        """The engine is loaded: from the next beat on, which is now, others may use it."""
        self._serves = serves
        self.beat_now()

    def beat_now(self) -> None:
        """Let the next beat not wait for its time: others must know at once what has changed."""
        self._wake.set()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Send the last beat and wait for the thread, at most `timeout_s`. Idempotent."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        outbox = self._make_outbox()  # here: it belongs to this thread
        every_s = self._config.settings.heartbeat_s
        errands = [_Errand(self._beat), _Errand(self._register)]
        try:
            while True:
                at_once = self._wake.is_set()
                self._wake.clear()
                last = self._stopping.is_set()  # `stop` sets it before it wakes this thread
                for errand in errands:
                    now_s = time.monotonic()
                    if last or at_once or now_s >= errand.due_s:
                        taken = self._tell(errand, outbox)
                        errand.due_s = now_s + (every_s if taken else min(RETRY_S, every_s))
                if last:
                    return
                due_s = min(errand.due_s for errand in errands)
                self._wake.wait(max(0.0, due_s - time.monotonic()))
        finally:
            outbox.close()

    def _tell(self, errand: _Errand, outbox: BeatOutbox) -> bool:
        try:
            return errand.tell(outbox)
        except Exception:  # a worker whose heart stopped would be taken for dead
            _logger.exception("heartbeat of %s failed; it goes on", self._config.instance)
            return True

    def _beat(self, outbox: BeatOutbox) -> bool:
        leaving = self._stopping.is_set()
        draining = leaving or self._progress.draining
        # Read age before load: a tick in between makes the beat look older, never fresher.
        age_s = self._progress.age_s
        state = self._progress.state
        serves = self._serves
        self._seq += 1
        sent_ns = self._clock.monotonic_ns()
        self._round_trips.sending(self._seq, sent_ns)
        taken = self._taken.state
        self._taken.telling(self._seq, taken)
        return outbox.send(
            self._config.gateway_endpoint,
            Heartbeat(
                peer=self._peer,
                role=self._config.role,
                seq=self._seq,
                sent_ns=sent_ns,
                load=state.load,
                progress_age_s=age_s,
                busy=state.busy,
                draining=draining,
                info=None if serves is None else serves.info,
                layout=None if serves is None else serves.layout,
                ignored=self._ignored(state),
                heard=taken.heard,
                taken=taken.ids,
                denied=self._denied(),
                leaving=leaving,
                unrecorded=not self._progress.recorded,
            ),
        )

    def _ignored(self, state: ProgressState) -> dict[str, int]:
        malformed = self._num_malformed()
        return {**state.ignored, **({"malformed.frame": malformed} if malformed else {})}

    def _register(self, outbox: BeatOutbox) -> bool:
        endpoint = self._config.transfer_endpoint
        if self._serves is None or endpoint is None:
            return True
        return outbox.send(endpoint, RegisterPool(peer=self._peer, pool=self._serves.pool))
