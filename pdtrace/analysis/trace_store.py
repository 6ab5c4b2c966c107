"""The traces of a recording: in memory while they are few, beyond that in a temporary file.

Owns joining spans into traces, and where they lie until somebody looks at them; knows nothing of
where they came from. Spans of one trace may come at any time, in any order, more than once.

In memory stay a trace's place in the file and, while spans still come, its id: 200 bytes. The file
has no name; it lies where TMPDIR says, and goes when nobody holds the traces any more.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, ClassVar, overload

from pdtrace.errors import PdtraceError
from pdtrace.spans import Span, Trace

MAX_HELD_SPANS = 50_000
"""Spans that stay in memory, of about a kilobyte each; with more, all go to the file."""

_FASTEST = 1  # a deflate level
_MAX_ALIKE_BYTES = 32 * 1024  # deflate looks back no further


class StoreError(PdtraceError):
    """The temporary file cannot be written, or read back; the message says what to do."""

    code: ClassVar[str] = "store_error"


@dataclass(slots=True)
class Joined:
    """What became of the spans.

    duplicates  spans that came again, counted once
    conflicts   span ids that came with two contents; the longer span counts
    """

    traces: Sequence[Trace] = ()
    spans: int = 0
    duplicates: int = 0
    conflicts: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where some spans of a trace lie in the file."""

    offset: int
    length: int


class TraceStore:
    """Takes spans, and gives the traces that they make.

    max_held  spans that stay in memory at most

    Methods raise StoreError where the temporary file cannot be written or read.
    """

    def __init__(self, max_held: int = MAX_HELD_SPANS) -> None:
        self._max_held = max_held
        self._held: dict[str, list[Span]] = {}
        self._num_held = 0
        self._file: _File | None = None
        self._rows: dict[bytes, int] = {}  # one number for each trace in the file
        self._starts = array("Q")
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._torn: dict[int, list[_Place]] = {}  # in several pieces, or with a span id twice
        self._spans = 0

    def __len__(self) -> int:
        """Spans taken so far."""
        return self._spans

    def add(self, spans: Iterable[Span]) -> None:
        """Take spans, of any traces."""
        held = self._held
        count = 0
        for span in spans:
            known = held.get(span.trace_id)
            if known is None:
                held[span.trace_id] = [span]
            else:
                known.append(span)
            count += 1
        self._spans += count
        self._num_held += count
        if self._num_held > self._max_held:
            self._put_away()

    def joined(self) -> Joined:
        """All traces by begin, each span id once. The store is empty then."""
        found = Joined()
        if self._file is None:
            traces = [_joined(trace_id, spans, found) for trace_id, spans in self._held.items()]
            traces.sort(key=lambda trace: (trace.spans[0].start_ns, trace.trace_id))
            found.traces = tuple(traces)
        else:
            self._put_away()
            file, self._file = self._file, None
            self._mend(file, found)
            found.traces = StoredTraces(file, self._by_begin(), self._offsets, self._lengths)
        self._held, self._num_held = {}, 0
        found.spans = self._spans - found.duplicates - found.conflicts
        return found

    def _put_away(self) -> None:
        """Everything that is in memory goes to the file."""
        if self._file is None:
            self._file = _File()
        for trace_id, spans in self._held.items():
            is_whole = len({span.span_id for span in spans}) == len(spans)
            if is_whole:
                spans.sort(key=_by_begin)
            place = self._file.append(spans)
            key = bytes.fromhex(trace_id)
            row = self._rows.setdefault(key, len(self._rows))
            if row == len(self._offsets):
                self._offsets.append(place.offset)
                self._lengths.append(place.length)
                self._starts.append(spans[0].start_ns)
                if not is_whole:
                    self._torn[row] = [place]
            else:
                first = _Place(self._offsets[row], self._lengths[row])
                self._torn.setdefault(row, [first]).append(place)
        self._held.clear()
        self._num_held = 0

    def _mend(self, file: _File, found: Joined) -> None:
        """Join the traces whose spans lie in several pieces, in the order in which they came."""
        for row, places in self._torn.items():
            spans = [span for place in places for span in file.read(place.offset, place.length)]
            trace = _joined(spans[0].trace_id, spans, found)
            place = file.append(trace.spans)
            self._offsets[row], self._lengths[row] = place.offset, place.length
            self._starts[row] = trace.spans[0].start_ns
        self._torn.clear()

    def _by_begin(self) -> Sequence[int]:
        ids = list(self._rows)
        self._rows = {}
        rows = sorted(range(len(ids)), key=ids.__getitem__)
        rows.sort(key=self._starts.__getitem__)
        return array("Q", rows)


class StoredTraces(Sequence[Trace]):
    """Traces in a file, by begin. Each is made anew whenever it is asked for.

    Raises StoreError where the file cannot be read.
    """

    def __init__(
        self, file: _File, order: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._file = file
        self._order = order
        self._offsets = offsets
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Trace: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Trace, ...]: ...
    def __getitem__(self, index: int | slice) -> Trace | tuple[Trace, ...]:
        if isinstance(index, slice):
            return tuple(map(self._load, self._order[index]))
        return self._load(self._order[index])

    def __iter__(self) -> Iterator[Trace]:
        return map(self._load, self._order)

    def _load(self, row: int) -> Trace:
        spans = self._file.read(self._offsets[row], self._lengths[row])
        return Trace(trace_id=spans[0].trace_id, spans=spans)


class _File:
    """Spans in a temporary file, packed."""

    def __init__(self) -> None:
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 see below
        except OSError as error:
            raise _no_room(error) from error
        weakref.finalize(self, self._file.close)
        self._end = 0
        self._alike = b""

    def append(self, spans: Sequence[Span]) -> _Place:
        plain = pickle.dumps(tuple(spans), pickle.HIGHEST_PROTOCOL)
        # Requests say the same with other numbers: packed against the first of them, they take a
        # third of the room that each would take alone.
        self._alike = self._alike or plain[-_MAX_ALIKE_BYTES:]
        packer = zlib.compressobj(_FASTEST, zdict=self._alike)
        packed = packer.compress(plain) + packer.flush()
        place = _Place(self._end, len(packed))
        rest = memoryview(packed)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise _no_room(error) from error
        self._end += len(packed)
        return place

    def read(self, offset: int, length: int) -> tuple[Span, ...]:
        try:
            packed = os.pread(self._file.fileno(), length, offset)
            unpacker = zlib.decompressobj(zdict=self._alike)
            plain = unpacker.decompress(packed)
        except (OSError, zlib.error) as error:
            raise StoreError(f"the temporary file cannot be read back: {error}") from error
        if not unpacker.eof:
            raise StoreError("the temporary file cannot be read back: it has become shorter")
        return pickle.loads(plain)  # noqa: S301 written above, in a file that has no name


def _no_room(error: OSError) -> StoreError:
    where = tempfile.tempdir or "temporary directory"
    return StoreError(
        f"{where}: {error.strerror or error}; the traces are too many for memory and take "
        "about 2 kB a request there; set TMPDIR to a directory with that much room"
    )


def join_spans(spans: Iterable[Span]) -> tuple[Trace, ...]:
    """Spans in any order → traces by begin, each span id once, all in memory."""
    store = TraceStore(max_held=2**63)
    store.add(spans)
    return tuple(store.joined().traces)


def _joined(trace_id: str, spans: Iterable[Span], counts: Joined) -> Trace:
    """One trace of its spans as they came; counts what it drops."""
    known: dict[str, Span] = {}
    for span in spans:
        before = known.get(span.span_id)
        if before is None:
            known[span.span_id] = span
        elif before == span:
            counts.duplicates += 1
        else:
            counts.conflicts += 1
            # Whatever order they came in, the same one stays.
            known[span.span_id] = max(before, span, key=_weight)
    return Trace(trace_id=trace_id, spans=tuple(sorted(known.values(), key=_by_begin)))


def _weight(span: Span) -> tuple[int, int, str]:
    return (span.end_ns - span.start_ns, len(span.attributes), repr(span))


def _by_begin(span: Span) -> tuple[int, str]:
    return (span.start_ns, span.span_id)
