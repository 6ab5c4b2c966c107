"""How every server process opens its recorder, and on which clock it records."""

from __future__ import annotations

from pdtrace.clock import Clock
from pdtrace.errors import PdtraceError
from pdtrace.recorder import Recorder
from pdtrace.stages import Role
from server.clock_fault import make_clock
from server.config import ProcessConfig
from server.errors import StartError
from server.round_trips import RoundTrip


def process_clock(config: ProcessConfig) -> Clock:
    """What the process reads the time from: shifted where settings say so, for tests; settable
    where they allow faults."""
    settings = config.settings
    fault = settings.clock_faults.get(config.instance)
    return make_clock(fault, settable=settings.allow_faults)


def open_recorder(
    config: ProcessConfig, role: Role, clock: Clock, recorder: type[Recorder] = Recorder
) -> Recorder:
    """The process's recorder, disabled where settings say so. Raises StartError."""
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
