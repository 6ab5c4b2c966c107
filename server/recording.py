"""How every server process opens its recorder, and on which clock it records."""

from __future__ import annotations

import logging

from pdtrace.clock import Clock
from pdtrace.errors import PdtraceError, RingCreateError
from pdtrace.recorder import Recorder
from pdtrace.stages import Role
from server.clock_fault import make_clock
from server.config import ProcessConfig
from server.errors import StartError
from server.readiness import announce_unrecorded
from server.round_trips import RoundTrip

_logger = logging.getLogger(__name__)


def process_clock(config: ProcessConfig) -> Clock:
    """What the process reads the time from: shifted where settings say so, for tests; settable
    where they allow faults."""
    settings = config.settings
    fault = settings.clock_faults.get(config.instance)
    return make_clock(fault, settable=settings.allow_faults)


def open_recorder(
    config: ProcessConfig, role: Role, clock: Clock, recorder: type[Recorder] = Recorder
) -> Recorder:
    """The process's recorder, disabled where settings say so.

    Where no ring can be made, as on a full disk, the server's first process of that name raises
    StartError: whoever starts the server hears of it. One that follows it serves unrecorded.
    """
    if not config.settings.record:
        return Recorder.disabled()
    rings = config.settings.rings_path
    fault = config.settings.clock_faults.get(config.instance)
    try:
        return recorder.open(
            rings,
            role=role,
            instance=config.instance,
            clock=clock,
            resource=None if fault is None else {"host.id": fault.host},
        )
    except PdtraceError as error:
        if config.follows and isinstance(error, RingCreateError):
            _logger.warning("%s serves without being recorded: %s", config.instance, error)
            announce_unrecorded(config)
            return Recorder.disabled()
        raise StartError(f"{config.instance} cannot record in {rings}: {error}") from error


def record_round_trip(recorder: Recorder, trip: RoundTrip) -> None:
    """Keep what a heartbeat told of another host's clock; nothing on the gateway's own host."""
    if trip.peer_clock_id and recorder.clock_id not in {"", trip.peer_clock_id}:
        recorder.clock_sample(
            peer=trip.peer,
            peer_clock_id=trip.peer_clock_id,
            offset_ns=trip.offset_ns,
            error_ns=trip.error_ns,
            at_ns=trip.at_ns,
        )
