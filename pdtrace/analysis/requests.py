"""The requests of a recording, one timeline at a time: all of them need not fit into memory.

Owns the way from traces to timelines and back to one of them; what they are good for is others'.
Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pdtrace.analysis.columns import Column
from pdtrace.analysis.placement import split_requests
from pdtrace.analysis.skew import MAX_SKEW_NS
from pdtrace.analysis.timeline import Timeline, build_timeline
from pdtrace.patience import Progress, no_progress
from pdtrace.spans import Trace

_TELL_EVERY = 100


class Requests(Protocol):
    """Timelines that can be gone through again and again, such as a list of them."""

    def __iter__(self) -> Iterator[Timeline]: ...

    def __getitem__(self, position: int, /) -> Timeline:
        """One of those that were gone through, counted from 0."""
        ...


class RequestsOfTraces:
    """`Requests` of traces. A timeline is built whenever it is asked for, and forgotten.

    max_skew_ns  as for `build_timeline`
    watch        is shown each trace that is gone through
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        *,
        max_skew_ns: int = MAX_SKEW_NS,
        progress: Progress = no_progress,
        watch: Callable[[Trace], None] | None = None,
    ) -> None:
        self._traces = traces
        self._max_skew_ns = max_skew_ns
        self._progress = progress
        self._watch = watch
        self._owners = Column()  # of each request that was gone through, its trace
        self._latest: tuple[int, tuple[Trace, ...]] = (-1, ())

    def __iter__(self) -> Iterator[Timeline]:
        position = 0
        for number, trace in enumerate(self._traces):
            if number % _TELL_EVERY == 0:
                self._progress("looking at requests", number / len(self._traces))
            if self._watch is not None:
                self._watch(trace)
            for part in split_requests(trace):
                if position == len(self._owners.values):
                    self._owners.append(number)
                position += 1
                yield build_timeline(part, max_skew_ns=self._max_skew_ns)

    def __getitem__(self, position: int, /) -> Timeline:
        owners = self._owners.values
        owner = owners[position]
        if self._latest[0] != owner:  # a trace may hold many requests
            self._latest = owner, split_requests(self._traces[owner])
        part = self._latest[1][position - bisect_left(owners, owner)]
        return build_timeline(part, max_skew_ns=self._max_skew_ns)
