"""What a ring holds: records as a reader returns them. Values only, no encoding."""

from __future__ import annotations

import msgspec

from pdtrace.propagation import RequestContext
from pdtrace.stages import Mark, StepKind

Value = int | float | bool | str | None


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """A process takes up one attempt of a request: binds `key` of this ring to its identity.

    Repeated for a request that outlives a lap of the ring, so that the identity of whatever is in
    flight is always in it; `t_ns` is the first begin every time. A reader that missed records may
    therefore see marks of a key before the OPEN that names it, and one that sees a key first in a
    repeated OPEN has missed its begin.
    """

    key: int
    t_ns: int
    context: RequestContext
    repeated: bool = False


class MarkRecord(msgspec.Struct, tag="mark", gc=False):
    """An instant. `values` align with `MARKS[mark].attrs`; None where absent.

    Nobody changes what one says. It is not frozen, as the tracker lets the many that it holds share
    equal numbers and values.

    t_ns  CLOCK_MONOTONIC nanoseconds of the ring's host
    """

    mark: Mark
    key: int
    attempt: int
    t_ns: int
    values: tuple[Value, ...] = ()


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, tag="end", gc=False):
    """The process lets go of the attempt; `key` is not used again."""

    key: int
    t_ns: int


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", gc=False):
    """A forward pass of the process, with the attempts that took part.

    number   of this ring's passes, from 1
    tokens   computed in it: of prompts, or one for each member
    size     members, also those beyond the first MAX_STEP_MEMBERS
    members  keys of the attempts, as their OPEN records bind them
    """

    number: int
    kind: StepKind
    begin_ns: int
    end_ns: int
    tokens: int
    size: int
    members: tuple[int, ...] = ()


class ClockRecord(msgspec.Struct, frozen=True, kw_only=True, tag="clock", gc=False):
    """What a round trip to a process of another host said of that host's clock.

    t_ns           when, on the recording process's CLOCK_MONOTONIC
    peer           instance that answered
    peer_clock_id  `<host id>/<boot id>` of its host
    offset_ns      the peer's CLOCK_MONOTONIC less the recording process's
    error_ns       half the round trip: the true offset is within
    """

    t_ns: int
    peer: str
    peer_clock_id: str
    offset_ns: int
    error_ns: int


class LossRecord(msgspec.Struct, frozen=True, kw_only=True, tag="loss", gc=False):
    """Not in a ring: a reader's note, when asked for, that `count` records are missing here.

    overwritten  what follows is the oldest that the ring held: the OPEN record of every attempt
                 that was open then follows, or comes again
    """

    count: int
    overwritten: bool = False


Record = OpenRecord | MarkRecord | EndRecord | StepRecord | ClockRecord | LossRecord
