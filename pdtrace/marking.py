"""One mark of one request: from the call to the ring. Knows nothing of recorders beyond what a mark
needs of one, which `pdtrace.recorder` puts in.

`Marking` does the usual case in C where there is such a class (`pdtrace.native`): the clock is
read, the values are of their types and given in order, the block has room. For anything else, and
without it, `PlainMarking.mark` is what a mark does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdtrace.errors import RecordError
from pdtrace.native import compiled
from pdtrace.ring.codec import Encode, pack_head
from pdtrace.ring.records import Value
from pdtrace.ring.writer import RingWriter
from pdtrace.stages import MARKS, Mark, Role


class PlainMarking:
    """What a mark needs of its attempt and recorder. Values are the subclass's to set.

    key   number of this attempt in its ring
    ring  that knows this attempt; None once it has ended
    """

    __slots__ = (
        "_append",
        "_attempt",
        "_cause",
        "_encoders",
        "_fail",
        "_kinds",
        "_now",
        "_role",
        "key",
        "ring",
    )

    _append: Callable[[bytes], None]
    _attempt: int
    _cause: tuple[str, str, str | tuple[str, ...] | None] | None
    _encoders: Sequence[Encode | None]
    _fail: Callable[[Exception], None]
    _kinds: Sequence[int | None]
    _now: Callable[[], int]
    _role: Role
    key: int
    ring: RingWriter | None

    def mark(self, mark: Mark, *values: Value, at_ns: int | None = None) -> None:
        """Record an instant.

        values  in the order of `MARKS[mark].attrs`; trailing ones may be left off, None is absent.
                A value of a wrong type is left out and counted as an error
        at_ns   CLOCK_MONOTONIC nanoseconds; the clock is read when None
        """
        self._cause = None  # what it waits for from here on is said anew: a stage may come twice
        try:
            if at_ns is None:
                at_ns = self._now()
            if values:
                encode = self._encoders[mark]
                if encode is None:
                    raise RecordError(_refusal(self._role, mark))
                self._append(encode(self._attempt, self.key, at_ns, values))
            else:
                kind = self._kinds[mark]  # a plain int packs faster than a Mark
                if kind is None:
                    raise RecordError(_refusal(self._role, mark))
                self._append(pack_head(kind, 0, self._attempt, self.key, at_ns))
        except Exception as error:  # the guard: telemetry never reaches the request
            self._fail(error)


def _refusal(role: Role, mark: int) -> str:
    if mark not in MARKS:
        return f"{mark!r} is no mark; see pdtrace.stages.Mark"
    roles = ", ".join(sorted(MARKS[Mark(mark)].roles))
    return f"a {role} process does not record {Mark(mark).name}; {roles} does"


if TYPE_CHECKING or compiled is None:
    Marking = PlainMarking
else:

    class Marking(compiled.Marking):
        """The usual case in C, the rest in Python."""

        __slots__ = ("_append", "_kinds", "_role")

        _mark_slowly = PlainMarking.mark
