"""Whole numbers of many requests in eight bytes each, as long as they fit into 64 bits.

Owns how they are kept; knows nothing of what they mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, MutableMapping, Sequence, ValuesView
from itertools import repeat
from typing import TypeVar, cast

K = TypeVar("K", bound=Hashable)

_ABSENT = -(2**63)


class Column:
    """Whole numbers in the order in which they came. `values` is an array, or a list from the
    first one on that takes more than 64 bits."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: array[int] | list[int] = array("q")

    def append(self, value: int) -> None:
        try:
            self.values.append(value)
        except OverflowError:
            self.values = [*self.values, value]

    def ordered(self) -> Sequence[int]:
        """The numbers from the smallest to the largest, kept as these are."""
        found = sorted(self.values)
        return found if isinstance(self.values, list) else array("q", found)

    def put(self, index: int, value: int) -> None:
        """Sets one of the numbers; those between the last one and it are absent."""
        missing = index + 1 - len(self.values)
        if missing > 0:
            self.values.extend(repeat(_ABSENT, missing))
        try:
            self.values[index] = value
        except OverflowError:
            self.values = list(self.values)
            self.values[index] = value


class Samples(MutableMapping[K, tuple[int, int]]):
    """Pairs of whole numbers by key, in 16 bytes each; the first of a pair is above -2**63.

    rows  a number for each key, which all samples of the same requests share; it grows here
    """

    def __init__(self, rows: dict[K, int]) -> None:
        self._rows = rows
        self._first, self._second = Column(), Column()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: object) -> bool:
        row, first = cast("dict[object, int]", self._rows).get(key), self._first.values
        return row is not None and row < len(first) and first[row] != _ABSENT

    def __getitem__(self, key: K) -> tuple[int, int]:
        if key not in self:
            raise KeyError(key)
        row = self._rows[key]
        return self._first.values[row], self._second.values[row]

    def __setitem__(self, key: K, pair: tuple[int, int]) -> None:
        self._count += key not in self
        row = self._rows.setdefault(key, len(self._rows))
        self._first.put(row, pair[0])
        self._second.put(row, pair[1])

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self._first.put(self._rows[key], _ABSENT)
        self._count -= 1

    def __iter__(self) -> Iterator[K]:
        # Keys are in the order of their rows, and a column may be shorter.
        return (k for k, one in zip(self._rows, self._first.values, strict=False) if one != _ABSENT)

    def values(self) -> ValuesView[tuple[int, int]]:
        return _Pairs(self, self._first, self._second)


class _Pairs(ValuesView[tuple[int, int]]):
    """All pairs of some samples, without looking at the keys."""

    def __init__(self, samples: Samples[K], first: Column, second: Column) -> None:
        super().__init__(samples)
        self._first, self._second = first, second

    def __iter__(self) -> Iterator[tuple[int, int]]:
        both = zip(self._first.values, self._second.values, strict=True)
        return (pair for pair in both if pair[0] != _ABSENT)
