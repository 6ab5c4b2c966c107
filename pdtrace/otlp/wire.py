"""The protobuf wire format, as far as spans need it: varints, fields, attributes.

Owns bytes only, and remembers those that come again. Knows nothing of spans
(`pdtrace.otlp.span_fields`).

A field is a tag (number << 3 | wire type), for bytes and messages their length, and the payload;
integers are varints, seven bits a byte, the lowest first.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pdtrace.native import compiled
from pdtrace.otlp.json_lines import KnownPairs, valid_pair, valid_text
from pdtrace.spans import AttrValue

_GROUPS = range(1 << 14)
_LAST = [bytes((n,)) if n < 128 else bytes((n & 127 | 128, n >> 7)) for n in _GROUPS]
"""Fourteen bits as the end of a varint."""
_MORE = [bytes((n & 127 | 128, n >> 7 | 128)) for n in _GROUPS]
"""Fourteen bits of a varint that goes on."""

MAX_VARINT_BYTES = 10
_TIMES_BEGIN, _TIMES_END = 1 << 42, 1 << 56
"""Nanoseconds of a monotonic clock, from about an hour after the machine started."""
_MAX_PREFIXED_KEYS = 1_000
_MAX_REST = 1_000
_FEW = 1_000
"""Integers below are remembered."""
_SHORT = 120
"""Characters of a text whose length, with two bytes more, is still a varint of one byte."""


def varint(n: int) -> bytes:
    """Any integer of 64 bits; negative ones take ten bytes."""
    if 0 <= n <= 0x3FFF:
        return _LAST[n]
    n &= 0xFFFF_FFFF_FFFF_FFFF
    encoded = b""
    while n > 0x3FFF:
        encoded += _MORE[n & 0x3FFF]
        n >>= 14
    return encoded + _LAST[n]


def varints(numbers: Sequence[int]) -> Sequence[bytes]:
    """Varints of the times of one request: all at once where they are equally long."""
    size = num_bytes(max(numbers))
    if size > 8 or num_bytes(min(numbers)) != size:
        return [varint(number) for number in numbers]
    lanes = len(numbers)
    pack, split, halves, quarters, eighths, more = _lanes(lanes, size)
    # One large integer of a lane of 64 bits for each number, whose lower 56 are drawn apart.
    spread = int.from_bytes(pack(*numbers), "little")
    for (low, high), shift in ((halves, 4), (quarters, 2), (eighths, 1)):
        spread = spread & low | (spread & high) << shift
    return split((spread | more).to_bytes(8 * lanes, "little"))


def num_bytes(number: int) -> int:
    """Of the varint of an integer."""
    return (number.bit_length() + 6) // 7 or 1 if number >= 0 else MAX_VARINT_BYTES


@lru_cache(maxsize=1_000)
def _lanes(lanes: int, size: int) -> tuple[Any, ...]:
    """What `varints` needs for so many numbers of that size: what packs and splits them, which bits
    stay and which move in each step, and the bit of each byte but the last that says that one
    follows."""

    def repeated(lane: int) -> int:
        return int.from_bytes(lane.to_bytes(8, "little") * lanes, "little")

    steps = [
        (0x0000_0000_0FFF_FFFF, 0x00FF_FFFF_F000_0000),  # 28 bits to each half
        (0x0000_3FFF_0000_3FFF, 0x0FFF_C000_0FFF_C000),  # 14 to each quarter
        (0x007F_007F_007F_007F, 0x3F80_3F80_3F80_3F80),  # 7 to each byte
    ]
    return (
        struct.Struct(f"<{lanes}Q").pack,
        struct.Struct(f"{size}s{8 - size}x" * lanes).unpack,
        *((repeated(low), repeated(high)) for low, high in steps),
        repeated(0x8080_8080_8080_8080 & (1 << 8 * (size - 1)) - 1),
    )


def field(tag: bytes, payload: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return tag + varint(len(payload)) + payload


def text_field(tag: bytes, text: str) -> bytes:
    """A field of text; what UTF-8 cannot carry becomes `?`."""
    return field(tag, valid_text(text).encode())


class Attributes:
    """Attributes as repeated KeyValue fields of one message; what comes again is encoded once."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._known = KnownPairs[bytes]()
        # What stands before an integer, by key and length of its varint.
        self._prefixes: dict[str, list[bytes]] = {}
        self._before_doubles: dict[str, bytes] = {}
        self._keys: dict[str, bytes] = {}
        # Flags and lists of one text, apart from the integers that flags are equal to.
        self._rest: dict[tuple[str, Any], bytes] = {}

    def add(self, parts: list[bytes], attributes: Mapping[str, Any]) -> int:
        """Appends all that OTLP can carry; returns how many were left out."""
        if compiled is not None and isinstance(attributes, dict):
            return compiled.add_attributes(parts, attributes, self._tag[0], self._keys, self._rare)
        append, known, prefixes = parts.append, self._known.by_key, self._prefixes
        dropped = 0
        for key, value in attributes.items():
            # By type: nearly every value is plain text, a small integer or a time.
            kind = type(value)
            try:
                if kind is str or (kind is int and 0 <= value < _FEW):
                    append(known[key][value])
                    continue
                if kind is int and 0 <= value < _TIMES_END:
                    if value >= _TIMES_BEGIN:
                        last = _LAST[value >> 42]
                        parts += (
                            prefixes[key][6 + len(last)],
                            _MORE[value & 0x3FFF],
                            _MORE[value >> 14 & 0x3FFF],
                            _MORE[value >> 28 & 0x3FFF],
                            last,
                        )
                    else:
                        encoded = varint(value)
                        parts += (prefixes[key][len(encoded)], encoded)
                    continue
                if kind is float:
                    parts += (self._before_doubles[key], _pack_double(value))
                    continue
                if kind is bool or (kind is tuple and _is_one_text(value)):
                    append(self._rest[key, value])
                    continue
            except KeyError:
                pass
            pair = self._pair(key, value)
            if pair is None:
                dropped += 1
            else:
                append(pair)
        return dropped

    def told(self, records: list[Any], told: tuple[tuple[Any, ...], ...]) -> Sequence[bytes | None]:
        """For each group of `told` the fields of what it says, None where `add` has to make them.

        told     groups of: key, number of a record, place among its values, where else to look
        records  objects with `values`
        """
        if compiled is None:
            return (None,) * len(told)
        return compiled.told_fields(records, told, self._tag[0], self._keys)

    def before_ints(self, key: str) -> list[bytes]:
        """What stands before the varint of an integer under `key`, by the length of that."""
        whole = [self._field(key, b"\x18" + bytes(size)) for size in range(MAX_VARINT_BYTES + 1)]
        return [encoded[: len(encoded) - size] for size, encoded in enumerate(whole)]

    def _rare(self, key: str, value: Any) -> bytes | None:
        """One attribute that is not for C: of a new key, or of a type that hardly any has."""
        if type(value) is tuple and _is_one_text(value):
            known = self._rest.get((key, value))
            if known is not None:
                return known
        return self._pair(key, value)

    def _pair(self, key: str, value: Any) -> bytes | None:
        """One attribute, and what is remembered of it; None if it cannot be carried."""
        if type(value) is str and len(value) < _SHORT and key in self._keys and value.isascii():
            # Ids of requests: new ones come all the time.
            before, text = self._keys[key], value.encode()
            size = len(text)
            lengths = bytes((0x12, size + 2, 0x0A, size))
            encoded = b"".join((self._tag, _LAST[len(before) + size + 4], before, lengths, text))
            self._known.keep(key, value, encoded)
            return encoded
        pair = valid_pair(key, value)
        if pair is None:
            return None
        encoded = self._field(pair[0], _value(pair[1]))
        if len(self._keys) >= _MAX_PREFIXED_KEYS:
            self._keys.clear()
        if len(key) < _SHORT:
            self._keys[key] = text_field(b"\x0a", pair[0])
        if type(value) is str or (type(value) is int and 0 <= value < _FEW):
            self._known.keep(key, value, encoded)
        elif type(value) is int and 0 <= value < _TIMES_END:
            if len(self._prefixes) >= _MAX_PREFIXED_KEYS:
                self._prefixes.clear()
            self._prefixes[key] = self.before_ints(pair[0])
        elif type(value) is float:
            if len(self._before_doubles) >= _MAX_PREFIXED_KEYS:
                self._before_doubles.clear()
            self._before_doubles[key] = encoded[:-8]
        elif type(value) is bool or (type(value) is tuple and _is_one_text(value)):
            if len(self._rest) >= _MAX_REST:
                self._rest.clear()
            self._rest[key, value] = encoded
        return encoded

    def _field(self, key: str, value: bytes) -> bytes:
        return field(self._tag, text_field(b"\x0a", key) + field(b"\x12", value))


def _is_one_text(values: tuple[Any, ...]) -> bool:
    return len(values) == 1 and type(values[0]) is str and len(values[0]) < _SHORT


def _value(value: AttrValue) -> bytes:
    """An AnyValue."""
    if isinstance(value, str):
        return text_field(b"\x0a", value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value)
    if isinstance(value, float):
        return b"\x21" + _pack_double(value)
    return field(b"\x2a", b"".join(field(b"\x0a", _value(item)) for item in value))


_pack_double = struct.Struct("<d").pack
