"""What may go wrong in a soak, and which of it comes next. Pure: one seed makes one sequence.

Owns the kinds and their chances. Who does it is `tests.soak.culprit`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from server.injection.fault import (
    Corrupt,
    Damage,
    Delay,
    Drop,
    Fault,
    Freeze,
    Pause,
    Place,
    Raise,
    Reorder,
    Repeat,
    name_of,
)

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
        "worker": ("ColocatedRequest", "Cancel", "HeartbeatAck"),
    }
)
"""Messages that each role takes in."""
PLACES: Mapping[str, tuple[Place, ...]] = MappingProxyType(
    {
        "gateway": (Place.STEP, Place.MESSAGE, Place.METRICS),
        "prefill": (Place.STEP, Place.MESSAGE, Place.ENGINE),
        "decode": (Place.STEP, Place.MESSAGE, Place.ENGINE),
        "transfer": (Place.STEP, Place.MESSAGE, Place.COPY),
        "worker": (Place.STEP, Place.MESSAGE, Place.ENGINE),
    }
)
"""Where each role may raise. The recorder is left out: what it loses is lost on purpose."""
OVER_TCP = (Place.SENDER, Place.RECEIVER)
"""Where transfer processes may raise as well if there are two of them."""
_DECODING = ("hop.notice", "decode.queue", "decode.first", "decode.generate", "decode.gap")
STAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gateway": ("gateway.queue", "gateway.route", "gateway.dispatch", "gateway.finish"),
        "prefill": ("hop.publish", "prefill.queue", "prefill.compute"),
        "decode": ("hop.dispatch", "decode.reserve", *_DECODING),
        "transfer": ("transfer",),
        "worker": ("hop.dispatch", "prefill.queue", "prefill.compute", "decode.generate"),
    }
)
"""In which stages each role may hold requests."""
WITH_POOL = ("prefill", "decode", "worker")
WITH_CLOCK = (*WITH_POOL, "transfer")
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
class Stop:
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
            case Freeze():
                return f"{fault.at} holds x{fault.count} in {fault.stage} for {fault.ms} ms"
            case Corrupt():
                return f"a copy of {fault.at} is {fault.copy} x{fault.count}"
            case Drop():
                return f"{fault.at} loses {fault.message} x{fault.count}"
            case Delay() | Repeat() | Reorder():
                what = type(fault).__name__.lower()
                return f"{what} {fault.message} to {fault.at} by {fault.ms} ms x{fault.count}"
            case _:
                return f"{name_of(fault)} in {fault.at}"


@dataclass(frozen=True, slots=True)
class SetClock:
    """A process's clock jumps, or stands still, by so much; after a while it is told to stop, and
    its successor's clock is right."""

    instance: str
    by_s: float
    lasts_s: float

    def __str__(self) -> str:
        return f"the clock of {self.instance} is set by {self.by_s:+.1f} s for {self.lasts_s:.1f} s"


@dataclass(frozen=True, slots=True)
class TakePages:
    """Pages of a pool are out of use for a while."""

    instance: str
    pages: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.instance} lacks {self.pages} pages for {self.lasts_s:.1f} s"


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


Mischief = Kill | Terminate | Stop | Inject | SetClock | TakePages | LeaveAll | Crowd
KINDS: Mapping[str, int] = MappingProxyType(
    {
        "kill": 5,
        "terminate": 3,
        "stop": 4,
        "message": 8,
        "raise": 3,
        "pause": 2,
        "freeze": 3,
        "corrupt": 3,
        "clock": 2,
        "shrink": 2,
        "leave": 2,
        "crowd": 2,
    }
)
"""What may be drawn, and how often each."""


def kind_of(mischief: Mischief) -> str:
    """What it is counted as."""
    match mischief:
        case Inject(fault):
            return type(fault).__name__.lower()
        case SetClock():
            return "clock"
        case TakePages():
            return "shrink"
        case _:
            return type(mischief).__name__.lower()


def next_mischief(chance: random.Random, instances: Sequence[str]) -> Mischief:
    """What goes wrong now, in a server of these instances."""
    inside = [name for name in instances if name != AGENT]
    transfers = [name for name in inside if role_of(name) == "transfer"]
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    if kind == "corrupt" and not transfers:
        kind = "freeze"
    match kind:
        case "kill":
            return Kill(chance.choice(instances))
        case "terminate":
            return Terminate(chance.choice(instances))
        case "stop":
            return Stop(chance.choice(instances), round(chance.uniform(0.3, 4.0), 1))
        case "message":
            return Inject(_message_fault(chance, chance.choice(inside)))
        case "raise":
            at = chance.choice(inside)
            places = PLACES[role_of(at)]
            if at in transfers and len(transfers) > 1:
                places += OVER_TCP
            return Inject(Raise(at=at, place=chance.choice(places), count=chance.randint(1, 3)))
        case "pause":
            ms = round(chance.uniform(200, 3000))
            return Inject(Pause(at=chance.choice(inside), ms=ms))
        case "freeze":
            at = chance.choice(inside)
            stage = chance.choice(STAGES[role_of(at)])
            ms = round(chance.uniform(200, 3000))
            return Inject(Freeze(at=at, stage=stage, ms=ms, count=chance.randint(1, 6)))
        case "corrupt":
            copy, count = chance.choice(list(Damage)), chance.randint(1, 3)
            return Inject(Corrupt(at=chance.choice(transfers), copy=copy, count=count))
        case "clock":
            at = chance.choice(_of(inside, WITH_CLOCK))
            by_s = chance.choice((-2.0, 0.5, 3.0, 30.0))
            return SetClock(at, by_s, round(chance.uniform(1.0, 4.0), 1))
        case "shrink":
            at = chance.choice(_of(inside, WITH_POOL))
            return TakePages(at, chance.randint(20, 100), round(chance.uniform(1.0, 4.0), 1))
        case "leave":
            return LeaveAll()
        case _:
            return Crowd(chance.randint(10, 60))


def _of(instances: Sequence[str], roles: Sequence[str]) -> list[str]:
    return [name for name in instances if role_of(name) in roles]


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
