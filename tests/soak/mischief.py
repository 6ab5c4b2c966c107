"""What may go wrong in a soak, and which of it comes next. Pure: one seed makes one sequence.

Owns the kinds and their chances. Who does it is `tests.soak.culprit`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from server.injection.fault import Delay, Drop, Fault, Pause, Place, Raise, Reorder, Repeat, name_of

RECEIVED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gateway": ("Tokens", "LegClosed", "Heartbeat"),
        "prefill": (
            *("PrefillRequest", "PagesReserved", "CopyDone", "CopyFailed", "CopiesDrained"),
            *("Cancel", "Abort", "LegProbe", "LegReport", "HeartbeatAck"),
        ),
        "decode": (
            *("DecodeRequest", "Handoff", "CopyDone", "CopyFailed", "CopiesDrained"),
            *("Cancel", "Abort", "LegProbe", "LegReport", "HeartbeatAck"),
        ),
        "transfer": ("CopyJob", "CancelCopies", "RegisterPool", "HeartbeatAck"),
    }
)
"""Messages that each role takes in."""
PLACES: Mapping[str, tuple[Place, ...]] = MappingProxyType(
    {
        "gateway": (Place.STEP, Place.MESSAGE, Place.METRICS),
        "prefill": (Place.STEP, Place.MESSAGE, Place.ENGINE),
        "decode": (Place.STEP, Place.MESSAGE, Place.ENGINE),
        "transfer": (Place.STEP, Place.MESSAGE, Place.COPY),
    }
)
"""Where each role may raise. The recorder is left out: what it loses is lost on purpose."""
AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; the launcher starts another."""

    instance: str

    def __str__(self) -> str:
        return f"kill -9 {self.instance}"


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM: it finishes what it has, and is started again."""

    instance: str

    def __str__(self) -> str:
        return f"kill -TERM {self.instance}"


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP, and SIGCONT after so many seconds."""

    instance: str
    seconds: float

    def __str__(self) -> str:
        return f"stop {self.instance} for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Inject:
    """Something inside a process."""

    fault: Fault

    def __str__(self) -> str:
        fault = self.fault
        match fault:
            case Pause():
                return f"pause {fault.at} for {fault.ms / 1000:.1f} s"
            case Raise():
                return f"{fault.at} raises in {fault.place} x{fault.count}"
            case Drop():
                return f"{fault.at} loses {fault.message} x{fault.count}"
            case Delay() | Repeat() | Reorder():
                what = type(fault).__name__.lower()
                return f"{what} {fault.message} to {fault.at} by {fault.ms} ms x{fault.count}"
            case _:
                return f"{name_of(fault)} in {fault.at}"


@dataclass(frozen=True, slots=True)
class LeaveAll:
    """Every client that waits goes away at once."""

    def __str__(self) -> str:
        return "all clients leave"


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many clients more come at once."""

    clients: int

    def __str__(self) -> str:
        return f"{self.clients} clients come at once"


Mischief = Kill | Terminate | Freeze | Inject | LeaveAll | Crowd


def kind_of(mischief: Mischief) -> str:
    """What it is counted as."""
    match mischief:
        case Inject(fault):
            return type(fault).__name__.lower()
        case _:
            return type(mischief).__name__.lower()


def next_mischief(chance: random.Random, instances: Sequence[str]) -> Mischief:
    """What goes wrong now, in a server of these instances."""
    inside = [name for name in instances if name != AGENT]
    kind = chance.choices(
        ("kill", "terminate", "freeze", "message", "raise", "pause", "leave", "crowd"),
        (5, 2, 4, 8, 3, 3, 2, 2),
    )[0]
    match kind:
        case "kill":
            return Kill(chance.choice(instances))
        case "terminate":
            return Terminate(chance.choice(inside))
        case "freeze":
            return Freeze(chance.choice(instances), round(chance.uniform(0.3, 4.0), 1))
        case "message":
            return Inject(_message_fault(chance, chance.choice(inside)))
        case "raise":
            at = chance.choice(inside)
            place = chance.choice(PLACES[role_of(at)])
            return Inject(Raise(at=at, place=place, count=chance.randint(1, 3)))
        case "pause":
            ms = round(chance.uniform(200, 3000))
            return Inject(Pause(at=chance.choice(inside), ms=ms))
        case "leave":
            return LeaveAll()
        case _:
            return Crowd(chance.randint(10, 60))


def _message_fault(chance: random.Random, at: str) -> Fault:
    message = chance.choice(RECEIVED[role_of(at)])
    count = chance.randint(1, 4)
    match chance.choice(("drop", "delay", "repeat", "reorder")):
        case "drop":
            return Drop(at=at, message=message, count=count)
        case "delay":
            return Delay(at=at, message=message, count=count, ms=chance.randint(20, 3000))
        case "repeat":
            return Repeat(at=at, message=message, count=count, ms=chance.randint(0, 1000))
        case _:
            return Reorder(at=at, message=message, count=count)


def role_of(instance: str) -> str:
    """`prefill` of `prefill-0`."""
    return instance.rpartition("-")[0] or instance
