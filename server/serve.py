"""From a `ProcessConfig` to a running worker, and back to nothing: what the three workers share.

Owns the order of opening and closing (engine, recorder, sockets, threads) and how long a stop may
take; knows nothing of what a worker does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from pdtrace.stages import Role
from pdtrace.stopping import Stop, StopFlag, stop_on_signals
from server.config import ProcessConfig
from server.engine.base import Engine
from server.engine.loader import EngineConfig, load_engine
from server.errors import StartError
from server.heartbeat import HeartbeatThread, Progress, Serves
from server.injection.process import heartbeat_outbox, make_injector, recorder_class
from server.injection.workers import disturb, faulty_ports
from server.pauses import Pauses, PauseThread
from server.ports import Ports
from server.readiness import announce_ready
from server.recording import open_recorder, process_clock
from server.round_trips import RoundTrips
from server.scheduler import DRAINING, Scheduler
from server.taken import TakenRequests
from server.wire.curve import load_keys
from server.wire.messages import HeartbeatAck
from server.wire.sockets import Inbox, Outbox

DRAIN_S = 1.5
"""How long the transfer may take to let go of the pages of those that were given up in a stop."""
_TURN_S = 0.02

_logger = logging.getLogger(__name__)

MakeWorker = Callable[[ProcessConfig, Engine, Ports], Scheduler[Any]]


def serve(
    config: ProcessConfig,
    *,
    role: Role,
    make_worker: MakeWorker,
    engine: Engine | None = None,
    stop: Stop | None = None,
) -> None:
    """Run the worker until SIGTERM, SIGINT or `stop`; every request in flight is answered.

    Closes the engine. Raises StartError or ModelError when it cannot start.
    """
    stop = StopFlag() if stop is None else stop
    with contextlib.ExitStack() as stack:
        clock = process_clock(config)
        keys = load_keys(config.settings.curve_keys)
        inbox = Inbox(config.endpoint, clock=clock, keys=keys)
        stack.enter_context(stop_on_signals(stop, inbox.wake))
        stack.callback(inbox.close)
        injector = make_injector(config, clock)
        progress = Progress(clock)
        round_trips = RoundTrips(config.incarnation)
        taken = TakenRequests()
        heartbeat = HeartbeatThread(
            config,
            progress,
            round_trips=round_trips,
            taken=taken,
            clock=clock,
            make_outbox=heartbeat_outbox(injector, keys),
            num_malformed=lambda: inbox.counters.malformed,
            denied=lambda: {"control": inbox.counters.denied},
        )
        heartbeat.start()  # loading may take long: others see that it is coming
        stack.callback(heartbeat.stop)
        if engine is None:
            engine = _load(config, role)
        stack.callback(engine.close)
        recorder = open_recorder(config, role, clock, recorder_class(injector))
        stack.callback(recorder.close)
        progress.recorded = recorder.enabled
        outbox = Outbox(keys=keys)
        stack.callback(outbox.close)
        pauses = Pauses(clock)
        pause_thread = PauseThread(pauses)
        ports = Ports(
            inbox=inbox,
            outbox=outbox,
            recorder=recorder,
            progress=progress,
            clock=clock.monotonic_ns,
            round_trips=round_trips,
            taken=taken,
            pauses=pauses.within,
        )
        worker = make_worker(config, engine, faulty_ports(ports, injector))
        disturb(worker, injector, config.settings.faults)
        _discard_others_mail(inbox, config.instance)
        heartbeat.announce(Serves.of(engine))
        pause_thread.start()
        stack.callback(pause_thread.stop)
        announce_ready(config)
        _logger.info("%s serves at %s", config.instance, config.endpoint)
        while not stop.is_set():
            take_step(worker)
        progress.draining = True
        heartbeat.beat_now()  # from here on requests are refused
        stop_worker(worker, grace_s=config.settings.deadlines.stop_s)
    _logger.info("%s stopped", config.instance)


def take_step(worker: Scheduler[Any], max_wait_s: float | None = None) -> None:
    """One turn of the loop. A turn that raises gives up the requests in flight, not the process."""
    try:
        if max_wait_s is None:
            worker.step()
        else:
            worker.step(max_wait_s)
    except Exception:  # a process boundary: whatever it is, others are served
        _logger.exception("%s: a turn of the loop failed", worker.config.instance)
        worker.end_all("internal", "a turn of its loop failed")
        worker.publish()


def stop_worker(worker: Scheduler[Any], *, grace_s: float, drain_s: float = DRAIN_S) -> None:
    """Refuse what only waits, let the rest finish for `grace_s`, give up what is left then, and
    wait `drain_s` for copies that still read or write this worker's pages."""
    worker.stop_accepting()
    worker.publish()
    _turn_until_empty(worker, grace_s)
    worker.end_all(DRAINING, "is shutting down")
    worker.publish()
    _turn_until_empty(worker, drain_s)


def _discard_others_mail(inbox: Inbox, instance: str) -> None:
    """Nobody has sent this process work yet: what is here was meant for the one before it at the
    same address, and would be legs that nobody waits for."""
    others = [got for got in inbox.drain() if not isinstance(got.message, HeartbeatAck)]
    if others:
        _logger.info("%s discards %d messages for its predecessor", instance, len(others))


def _turn_until_empty(worker: Scheduler[Any], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while len(worker.legs) and time.monotonic() < end_s:
        take_step(worker, _TURN_S)


def _load(config: ProcessConfig, role: Role) -> Engine:
    settings = config.settings
    if config.pool_path is None:
        raise StartError(f"{config.instance} has no pool_path")
    return load_engine(
        EngineConfig(
            model=settings.model,
            pool_path=config.pool_path,
            owner=config.instance,
            num_pages=settings.prefill_pages if role is Role.PREFILL else settings.decode_pages,
            page_size=settings.page_size,
            dtype=settings.dtype,
            threads=settings.threads,
            device=settings.device,
        )
    )
