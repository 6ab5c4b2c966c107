"""Moving and comparing bytes at addresses.

Owns the calls and their types; knows nothing of pools. Whoever calls has checked that the bytes are
mapped. Both calls let go of the interpreter lock, so that the inbox's thread stamps arrivals in
time; slices of the mappings would hold it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

Move: TypeAlias = Callable[[int, int, int], int]
"""Copies to an address, from an address, so many bytes; returns how many it copied."""

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_compare.restype = ctypes.c_int


def move_bytes(destination: int, source: int, num_bytes: int) -> int:
    """Copy all of them."""
    ctypes.memmove(destination, source, num_bytes)
    return num_bytes


def is_equal(one: int, other: int, num_bytes: int) -> bool:
    """Whether the same bytes lie at both addresses."""
    return _compare(one, other, num_bytes) == 0


def first_difference(one: int, other: int, num_bytes: int) -> int | None:
    """Index of the first byte that differs; None when all are equal (by now)."""
    if is_equal(one, other, num_bytes):
        return None
    low, high = 0, num_bytes  # equal before low, different somewhere in low … high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if is_equal(one + low, other + low, middle - low):
            low = middle
        else:
            high = middle
    return low
