"""What a ring holds: records as a reader returns them. Values only, no encoding."""

from __future__ import annotations

import msgspec

from pdtrace.propagation import RequestContext
from pdtrace.stages import Mark

Value = int | float | bool | str | None


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """A process takes up one attempt of a request: binds `key` of this ring to its identity.

    Repeated for a request that outlives a lap of the ring, so that the identity of whatever is in
    flight is always in it; `t_ns` is the first begin every time. A reader that missed records may
    therefore see marks of a key before the OPEN that names it.
    """

    key: int
    t_ns: int
    context: RequestContext


class MarkRecord(msgspec.Struct, frozen=True, kw_only=True, tag="mark", gc=False):
    """An instant. `values` align with `MARKS[mark].attrs`; None where absent.

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


Record = OpenRecord | MarkRecord | EndRecord
