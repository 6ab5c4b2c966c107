"""The faults that can be injected, as data.

Owns their fields and ranges; knows nothing of who obeys (`server.injection.injector`) or of the
file they stand in (`server.injection.script`). A fault is armed in each process that `at` names,
and each of these counts for itself, from the instant at which it was armed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pdtrace.stages import Role
from server.clock_fault import MAX_SHIFT_S
from server.errors import StartError

MAX_MS = 3_600_000
MAX_PAGES = 2**31
WITH_POOL = frozenset({Role.PREFILL, Role.DECODE, Role.WORKER})
"""Roles whose processes own a KV pool."""

Ordinal = Annotated[int, Meta(ge=1)]
Times = Annotated[int, Meta(ge=1)]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_MS)]
Seconds = Annotated[float, Meta(ge=-MAX_SHIFT_S, le=MAX_SHIFT_S)]
Pages = Annotated[int, Meta(ge=1, le=MAX_PAGES)]


class Direction(StrEnum):
    """Seen from the process that the fault is armed in."""

    SENT = "sent"
    RECEIVED = "received"


class Place(StrEnum):
    """Where a process can be made to raise.

    step       a turn of the loop: of a scheduler, a transfer, or the gateway's clock
    message    the handling of a message
    engine     a forward pass
    copy       the start of a copy, in the transfer process
    sender     a TCP transfer, where it advances a connection that it sends on
    receiver   the same, where it receives
    metrics    a measurement of the gateway
    recorder   inside the recorder, where it writes a record into its ring
    """

    STEP = "step"
    MESSAGE = "message"
    ENGINE = "engine"
    COPY = "copy"
    SENDER = "sender"
    RECEIVER = "receiver"
    METRICS = "metrics"
    RECORDER = "recorder"


class Damage(StrEnum):
    """What becomes of a copy of KV pages.

    short     it ends before all bytes have moved
    altered   one byte arrives as another
    never     nothing moves and nothing is said of it, until it is cancelled
    """

    SHORT = "short"
    ALTERED = "altered"
    NEVER = "never"


class _Fault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """`at`: an instance or a role; "" is every process."""

    at: str = ""


class _MessageFault(_Fault, frozen=True, kw_only=True):
    """Hits messages number `nth` to `nth + count - 1` of a type; `count` None is all from there.

    message     name of the type, as in `server.wire.messages`
    direction   of the message, seen from the process
    """

    message: str
    direction: Direction = Direction.RECEIVED
    nth: Ordinal = 1
    count: Times | None = 1


class Drop(_MessageFault, frozen=True, kw_only=True, tag="drop"):
    """The message is lost; its sender believes that it was sent."""


class Delay(_MessageFault, frozen=True, kw_only=True, tag="delay"):
    """The message comes `ms` later; those behind it pass it."""

    ms: Milliseconds


class Repeat(_MessageFault, frozen=True, kw_only=True, tag="repeat"):
    """The message comes twice, the second time `ms` later."""

    ms: Milliseconds = 0


class Reorder(_MessageFault, frozen=True, kw_only=True, tag="reorder"):
    """The message comes behind the next one (to the same receiver, where it is sent), of whatever
    type; after `ms` at the latest."""

    ms: Milliseconds = 1000


class Raise(_Fault, frozen=True, kw_only=True, tag="raise"):
    """Calls number `nth` to `nth + count - 1` of a place raise InjectedError.

    message   count only calls about messages of this type; for the place "message"
    """

    place: Place
    nth: Ordinal = 1
    count: Times | None = 1
    message: str = ""


class Freeze(_Fault, frozen=True, kw_only=True, tag="freeze"):
    """Requests number `nth` to `nth + count - 1` that are in a stage are held in it for `ms`.

    stage     one that the process holds requests in: see `server.faults.FAULT_STAGES`
    request   count only requests whose ids begin with this
    """

    stage: str
    ms: Milliseconds
    nth: Ordinal = 1
    count: Times | None = 1
    request: str = ""


class Corrupt(_Fault, frozen=True, kw_only=True, tag="corrupt"):
    """Copies number `nth` to `nth + count - 1` that a transfer process starts go wrong."""

    copy: Damage
    nth: Ordinal = 1
    count: Times | None = 1


class _TimedFault(_Fault, frozen=True, kw_only=True):
    """`after_ms`: from being armed to being done."""

    after_ms: Milliseconds = 0


class Pause(_TimedFault, frozen=True, kw_only=True, tag="pause"):
    """The loop stands still for `ms`; the process's other threads go on."""

    ms: Milliseconds


class ShiftClock(_TimedFault, frozen=True, kw_only=True, tag="clock"):
    """The process's clock jumps `seconds` forward; below 0 it stands still for as long."""

    seconds: Seconds


class Shrink(_TimedFault, frozen=True, kw_only=True, tag="shrink"):
    """`pages` of the worker's KV pool are taken out of use, as they come free, until cleared."""

    pages: Pages


MessageFault: TypeAlias = Drop | Delay | Repeat | Reorder
TimedFault: TypeAlias = Pause | ShiftClock | Shrink
Fault: TypeAlias = (
    Drop | Delay | Repeat | Reorder | Raise | Freeze | Corrupt | Pause | ShiftClock | Shrink
)


def roles_of(fault: Fault) -> frozenset[str]:
    """Roles of the processes in which a fault can act; in others it is not armed."""
    match fault:
        case Shrink():
            return WITH_POOL
        case Corrupt():
            return frozenset({Role.TRANSFER})
        case ShiftClock():  # the gateway's clock is the one that others are compared with
            return WITH_POOL | {Role.TRANSFER}
        case _:
            return WITH_POOL | {Role.TRANSFER, Role.GATEWAY}


def check_at(faults: Sequence[Fault], names: Collection[str]) -> None:
    """Raises StartError for a fault that can act nowhere: `at` is neither "" nor one of `names`,
    instances and roles, or a process of another kind."""
    for number, fault in enumerate(faults, 1):
        roles = roles_of(fault)
        able = sorted(name for name in names if _role(name) in roles)
        if not able:
            raise StartError(f"fault {number} ({kind_of(fault)}): no process here can have it")
        if fault.at and fault.at not in able:
            raise StartError(
                f"fault {number} ({kind_of(fault)}): at is {fault.at!r}, expected one of "
                f"{', '.join(able)}"
            )


def _role(name: str) -> str:
    """Of an instance, which is named role and number, or of a role."""
    return name.rpartition("-")[0] or name


def name_of(fault: Fault) -> str:
    """What a fault is counted as: its kind, and what it hits where that is one of several."""
    match fault:
        case Drop() | Delay() | Repeat() | Reorder():
            return f"{kind_of(fault)}.{fault.message}"
        case Raise():
            return f"raise.{fault.place}"
        case Freeze():
            return f"freeze.{fault.stage}"
        case Corrupt():
            return f"corrupt.{fault.copy}"
        case Pause() | ShiftClock() | Shrink():
            return kind_of(fault)


def kind_of(fault: Fault) -> str:
    """The word that stands for it in a file."""
    return str(type(fault).__struct_config__.tag)
