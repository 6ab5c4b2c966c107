"""Which end belongs to which begin of a stage that occurs several times in an attempt. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdtrace import semconv as a
from pdtrace.assembly.evidence import Stamp
from pdtrace.stages import MARKS

_CHUNK_ATTRS = {
    mark: next((i for i, attr in enumerate(spec.attrs) if attr is a.CHUNK_INDEX), None)
    for mark, spec in MARKS.items()
}


def paired(
    begins: Sequence[Stamp], finishes: Sequence[Stamp]
) -> Sequence[tuple[Stamp, Stamp | None]]:
    """Each begin with its finish: by chunk index where both have one, else in order of time."""
    indices = [_chunk_index(begin) for begin in begins]
    ended = [_chunk_index(finish) for finish in finishes]
    if indices == ended and None not in indices and len(set(indices)) == len(indices):
        return list(zip(begins, finishes, strict=True))  # nearly always
    return list(_searched(zip(begins, indices, strict=True), zip(finishes, ended, strict=True)))


def _searched(
    begins: Iterable[tuple[Stamp, int | None]], finishes: Iterable[tuple[Stamp, int | None]]
) -> Iterable[tuple[Stamp, Stamp | None]]:
    waiting: dict[int | None, list[Stamp]] = {}
    for finish, index in finishes:
        waiting.setdefault(index, []).append(finish)
    for begin, index in begins:
        queue = waiting.get(index) if index is not None else None
        if queue:
            yield begin, queue.pop(0)
            continue
        if index is None:
            queue = min((q for q in waiting.values() if q), key=_first_ns, default=None)
        else:
            queue = waiting.get(None)
        # A finish without a begin (its record was lost) pairs with nothing later.
        while queue and queue[0].t_ns < begin.t_ns:
            queue.pop(0)
        yield begin, queue.pop(0) if queue else None


def _first_ns(queue: Sequence[Stamp]) -> int:
    return queue[0].t_ns


def _chunk_index(stamp: Stamp) -> int | None:
    position = _CHUNK_ATTRS[stamp.mark]
    if position is None or position >= len(stamp.values):
        return None
    value = stamp.values[position]
    return value if isinstance(value, int) else None
