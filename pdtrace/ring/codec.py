"""Record bodies to and from bytes. Knows nothing of files, blocks or threads.

A mark's values follow the body head in the order of its attributes: `int` and `float` take 8 bytes,
`bool` 1, `str` 1 for its length; the bytes of all strings come last. An absent value keeps its
place as zero and lacks its presence bit. Decoders look at every length before they use it: a body
that cannot be what its kind says raises, and one with more at its end than this version knows does
not.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, SupportsFloat, SupportsIndex, cast

import msgspec

from pdtrace.errors import RecordError
from pdtrace.native import compiled
from pdtrace.propagation import MAX_TRACESTATE_CHARS, RequestContext
from pdtrace.ring.layout import (
    BODY_HEAD,
    CLOCK_HEAD,
    FIRST_CONTROL_KIND,
    KIND_CLOCK,
    KIND_END,
    KIND_OPEN,
    KIND_STEP,
    MAX_CLOCK_ID_BYTES,
    MAX_ID_BYTES,
    MAX_STEP_MEMBERS,
    MAX_STRING_BYTES,
    STEP_HEAD,
)
from pdtrace.ring.records import (
    ClockRecord,
    EndRecord,
    MarkRecord,
    OpenRecord,
    Record,
    StepRecord,
    Value,
)
from pdtrace.semconv import AttrType
from pdtrace.stages import MARKS, Mark, Role, StepKind

Encode = Callable[[int, int, int, tuple[Value, ...]], bytes]
"""(attempt, key, t_ns, values) -> body."""

Decode = Callable[[bytes], Record]

_FORMATS: Mapping[AttrType, str] = {
    AttrType.INT: "q",
    AttrType.FLOAT: "d",
    AttrType.BOOL: "?",
    AttrType.STR: "B",
}
ID_SEPARATOR = "\x1f"  # between the ids of one string; control characters are no part of an id
_INT64 = range(-(2**63), 2**63)

Schema = dict[int, list[tuple[str, str]]]

SCHEMA: Schema = {
    int(mark): [(attr.key, attr.type.value) for attr in spec.attrs] for mark, spec in MARKS.items()
}
"""Attributes of every mark, as this version writes them."""


pack_head = BODY_HEAD.pack
"""(kind, 0, attempt, key, t_ns) -> body of a mark without values, or of an END record."""

_context_encoder = msgspec.msgpack.Encoder()
_context_decoder = msgspec.msgpack.Decoder(RequestContext)


def encode_open(
    context: RequestContext, key: int, t_ns: int, *, repeated: bool = False
) -> tuple[bytes, int]:
    """Body of an OPEN record, and how many of its strings were cut."""
    truncated = 0
    # One character takes at most 4 bytes, so most ids skip the encoding.
    if len(context.request_id) * 4 > MAX_ID_BYTES or len(context.handoff_id) * 4 > MAX_ID_BYTES:
        request_id, cut_request = _fit(context.request_id, MAX_ID_BYTES)
        handoff_id, cut_handoff = _fit(context.handoff_id, MAX_ID_BYTES)
        truncated += cut_request + cut_handoff
        context = msgspec.structs.replace(
            context,
            request_id=request_id.decode(),
            handoff_id=handoff_id.decode(),
        )
    if len(context.tracestate) > MAX_TRACESTATE_CHARS:
        truncated += 1
        context = msgspec.structs.replace(context, tracestate="")
    try:
        encoded = _context_encoder.encode(context)
    except UnicodeEncodeError:  # lone surrogates
        context = msgspec.structs.replace(
            context,
            request_id=context.request_id.encode(errors="replace").decode(),
            handoff_id=context.handoff_id.encode(errors="replace").decode(),
            tracestate=context.tracestate.encode(errors="replace").decode(),
        )
        encoded = _context_encoder.encode(context)
    return pack_head(KIND_OPEN, int(repeated), 0, key, t_ns) + encoded, truncated


_STEP_KINDS = tuple(StepKind)
_STEP_KIND_AT: Mapping[StepKind, int] = {kind: place for place, kind in enumerate(_STEP_KINDS)}
_step_structs: list[struct.Struct | None] = [None] * (MAX_STEP_MEMBERS + 1)


def _step_struct(members: int) -> struct.Struct:
    layout = _step_structs[members]
    if layout is None:
        layout = struct.Struct(f"{STEP_HEAD.format}{members}Q")
        _step_structs[members] = layout
    return layout


def encode_step(
    kind: StepKind,
    number: int,
    begin_ns: int,
    end_ns: int,
    *,
    tokens: int,
    members: list[int],
    size: int,
) -> bytes:
    """Body of a step record; keeps the first MAX_STEP_MEMBERS of `members`. Raises RecordError."""
    if len(members) > MAX_STEP_MEMBERS:
        del members[MAX_STEP_MEMBERS:]
    kept = len(members)
    try:
        if end_ns < begin_ns:
            raise RecordError(f"a step cannot end {begin_ns - end_ns} ns before it begins")
        return _step_struct(kept).pack(
            KIND_STEP, _STEP_KIND_AT[kind], kept, size, number, begin_ns, end_ns, tokens, *members
        )
    except (struct.error, KeyError, TypeError) as error:
        raise RecordError(
            "a step takes a StepKind, tokens from 0 and times in whole nanoseconds, got "
            f"{kind!r}, {tokens!r} tokens, {begin_ns!r} to {end_ns!r}"
        ) from error


def encode_clock(
    peer: str, peer_clock_id: str, offset_ns: int, error_ns: int, t_ns: int
) -> tuple[bytes, bool]:
    """Body of a clock record, and whether `peer` was cut. Raises RecordError."""
    try:
        name, cut = _fit(peer, MAX_STRING_BYTES)
        clock_id = peer_clock_id.encode()
        if not 0 < len(clock_id) <= MAX_CLOCK_ID_BYTES:  # half an id would be another clock's
            raise RecordError(
                f"a clock id takes 1 to {MAX_CLOCK_ID_BYTES} bytes, got {len(clock_id)}"
            )
        head = CLOCK_HEAD.pack(KIND_CLOCK, len(name), len(clock_id), error_ns, t_ns, offset_ns)
    except (struct.error, AttributeError, UnicodeEncodeError) as error:
        raise RecordError(
            "a clock sample takes two strings and whole nanoseconds, the error not below 0, got "
            f"{peer!r}, {peer_clock_id!r}, offset {offset_ns!r}, error {error_ns!r}, at {t_ns!r}"
        ) from error
    return head + name + clock_id, cut


def _fit(text: str, limit: int) -> tuple[bytes, bool]:
    """UTF-8 bytes of `text`, cut to `limit` on a character boundary; whether they were cut."""
    raw = text.encode(errors="replace")
    if len(raw) <= limit:
        return raw, False
    return raw[:limit].decode(errors="ignore").encode(), True


def fit_ids(ids: Sequence[str]) -> tuple[str | None, int]:
    """Ids joined to one string that fits a record, and how many were left out of it, whole ones.

    None when fewer than two fit.
    """
    room = MAX_STRING_BYTES + 1
    kept: list[str] = []
    for one in ids:
        plain = one.replace(ID_SEPARATOR, "?")
        room -= len(plain.encode(errors="replace")) + 1
        if room < 0:
            break
        kept.append(plain)
    return (ID_SEPARATOR.join(kept) if len(kept) > 1 else None), len(ids) - len(kept)


def build_encoders(
    role: Role, *, on_error: Callable[[Exception], None], on_truncated: Callable[[], None]
) -> Sequence[Encode | None]:
    """Encoders by mark value; None for marks that `role` does not record.

    on_error      called with a RecordError for a value that cannot be recorded; the value is left
                  out and the record is written all the same
    on_truncated  called for each string that was cut
    """
    encoders: list[Encode | None] = [None] * FIRST_CONTROL_KIND
    for mark, spec in MARKS.items():
        if role in spec.roles:
            types = tuple(attr.type for attr in spec.attrs)
            checked = _checked_encoder(mark, types, on_error, on_truncated)
            if compiled is not None:
                encoders[mark] = compiled.Layout(mark, _format(types), checked)
            elif all(kind in (AttrType.INT, AttrType.FLOAT) for kind in types):
                encoders[mark] = _numeric_encoder(mark, types, checked)
            else:
                encoders[mark] = checked
    return encoders


def build_bare_encoders(
    encoders: Sequence[Encode | None], keep: Collection[Mark], on_shed: Callable[[], None]
) -> Sequence[Encode | None]:
    """`encoders` with those of marks not in `keep` replaced by ones that leave the values out.

    on_shed  called for each mark whose values were left out
    """
    bare = list(encoders)
    for mark in MARKS:
        if encoders[mark] is not None and mark not in keep:
            bare[mark] = _bare_encoder(int(mark), on_shed)
    return bare


def _bare_encoder(kind: int, on_shed: Callable[[], None]) -> Encode:
    def encode(attempt: int, key: int, t_ns: int, values: tuple[Value, ...]) -> bytes:
        on_shed()
        return pack_head(kind, 0, attempt, key, t_ns)

    return encode


def _numeric_encoder(mark: Mark, types: tuple[AttrType, ...], checked: Encode) -> Encode:
    """Fast path for marks whose attributes are all numbers and all given; what is absent or of a
    wrong type is sorted out by `checked`.

    The usual numbers of values are spelled out: a call with `*values` first makes a list of all its
    arguments, which takes as long as packing them.
    """
    pack = _mark_struct(types).pack
    kind, full = int(mark), (1 << len(types)) - 1

    def one(attempt: int, key: int, t_ns: int, values: tuple[Value, ...]) -> bytes:
        try:
            (a,) = values
            return pack(kind, full, attempt, key, t_ns, a)
        except (struct.error, ValueError):
            return checked(attempt, key, t_ns, values)

    def two(attempt: int, key: int, t_ns: int, values: tuple[Value, ...]) -> bytes:
        try:
            a, b = values
            return pack(kind, full, attempt, key, t_ns, a, b)
        except (struct.error, ValueError):
            return checked(attempt, key, t_ns, values)

    def four(attempt: int, key: int, t_ns: int, values: tuple[Value, ...]) -> bytes:
        try:
            a, b, c, d = values
            return pack(kind, full, attempt, key, t_ns, a, b, c, d)
        except (struct.error, ValueError):
            return checked(attempt, key, t_ns, values)

    def any_number(attempt: int, key: int, t_ns: int, values: tuple[Value, ...]) -> bytes:
        try:
            return pack(kind, full, attempt, key, t_ns, *values)
        except struct.error:
            return checked(attempt, key, t_ns, values)

    return {1: one, 2: two, 4: four}.get(len(types), any_number)


def _checked_encoder(
    mark: Mark,
    types: tuple[AttrType, ...],
    on_error: Callable[[Exception], None],
    on_truncated: Callable[[], None],
) -> Encode:
    pack = _mark_struct(types).pack
    kind, count, full = int(mark), len(types), (1 << len(types)) - 1
    strings = [index for index, attr_type in enumerate(types) if attr_type is AttrType.STR]
    bools = [index for index, attr_type in enumerate(types) if attr_type is AttrType.BOOL]

    def encode(attempt: int, key: int, t_ns: int, values: tuple[Value, ...]) -> bytes:
        fields: list[Any] = list(values)
        try:
            if len(fields) != count or None in fields:
                present = _fill_absent(fields, count)
            else:
                present = full
            tail = b""
            for index in strings:
                if present >> index & 1:
                    raw = str.encode(fields[index])
                    if len(raw) > MAX_STRING_BYTES:
                        raw, _ = _fit(fields[index], MAX_STRING_BYTES)
                        on_truncated()
                    fields[index] = len(raw)
                    tail += raw
            for index in bools:
                if (
                    present >> index & 1
                    and fields[index] is not True
                    and fields[index] is not False
                ):
                    raise TypeError
            return pack(kind, present, attempt, key, t_ns, *fields) + tail
        except (struct.error, AttributeError, TypeError, UnicodeEncodeError):
            # Before another try: with a time that does not pack, there would be no end of them.
            _check_time(mark, t_ns)
            sound = _sound_values(mark, types, values, on_error)
        return encode(attempt, key, t_ns, sound)

    return encode


def _check_time(mark: Mark, t_ns: object) -> None:
    try:
        if operator.index(cast("SupportsIndex", t_ns)) in _INT64:
            return
    except TypeError:
        pass
    raise RecordError(f"{mark.name}: at_ns takes whole nanoseconds (64 bits), got {t_ns!r}")


def _fill_absent(fields: list[Any], count: int) -> int:
    """Put 0 for what is absent; returns the presence bits. Raises TypeError for too many values."""
    if len(fields) > count:
        raise TypeError
    fields.extend([None] * (count - len(fields)))
    present = 0
    for index, value in enumerate(fields):
        if value is None:
            fields[index] = 0
        else:
            present |= 1 << index
    return present


def _sound_values(
    mark: Mark,
    types: tuple[AttrType, ...],
    values: tuple[Value, ...],
    on_error: Callable[[Exception], None],
) -> tuple[Value, ...]:
    """`values` with those that cannot be recorded reported and left out."""
    sound: list[Value] = []
    for attr, attr_type, value in zip(MARKS[mark].attrs, types, values, strict=False):
        try:
            sound.append(None if value is None else _sound(attr_type, value))
        except (TypeError, OverflowError):
            sound.append(None)
            on_error(
                RecordError(
                    f"{mark.name}: {attr.key} takes {attr_type.value} (numbers of 64 bits), "
                    f"got {type(value).__name__}; the value is left out"
                )
            )
    if len(values) > len(types):
        on_error(
            RecordError(
                f"{mark.name} takes {len(types)} values, got {len(values)}; the rest is left out"
            )
        )
    return tuple(sound)


def _sound(attr_type: AttrType, value: object) -> Value:
    """`value` in a form that packs. Raises TypeError or OverflowError when there is none."""
    match attr_type:
        case AttrType.STR:
            if not isinstance(value, str):
                raise TypeError
            return value.encode(errors="replace").decode()  # lone surrogates become "?"
        case AttrType.BOOL:
            if value is not True and value is not False:
                raise TypeError
            return value
        case AttrType.INT:
            number = operator.index(cast("SupportsIndex", value))  # also numpy's integers
            if number not in _INT64:
                raise OverflowError
            return number
        case AttrType.FLOAT:
            if isinstance(value, str | bytes):
                raise TypeError  # float("1.5") would hide the caller's mistake
            return float(cast("SupportsFloat", value))


def _mark_struct(types: Sequence[AttrType]) -> struct.Struct:
    return struct.Struct(BODY_HEAD.format + _format(types))


def _format(types: Sequence[AttrType]) -> str:
    return "".join(_FORMATS[attr_type] for attr_type in types)


def build_decoders(schema: Schema) -> list[Decode | None]:
    """Decoders by kind for a ring whose writer used `schema`; None for kinds unknown here.

    Attributes are matched by key and type, so a ring of another pdtrace version reads as far as
    both know them. Decoders raise `struct.error`, `ValueError` or `msgspec.MsgspecError` on damaged
    bodies.
    """
    decoders: list[Decode | None] = [None] * 256
    decoders[KIND_OPEN] = _decode_open
    decoders[KIND_END] = _decode_end
    decoders[KIND_STEP] = _decode_step
    decoders[KIND_CLOCK] = _decode_clock
    for kind, attrs in schema.items():
        if kind in MARKS:
            decoders[kind] = _mark_decoder(Mark(kind), attrs)
    return decoders


def _decode_open(body: bytes) -> OpenRecord:
    _, repeated, _, key, t_ns = BODY_HEAD.unpack_from(body)
    context = _context_decoder.decode(memoryview(body)[BODY_HEAD.size :])
    return OpenRecord(key=key, t_ns=t_ns, context=context, repeated=bool(repeated))


def _decode_end(body: bytes) -> EndRecord:
    _, _, _, key, t_ns = BODY_HEAD.unpack_from(body)
    return EndRecord(key=key, t_ns=t_ns)


def _decode_step(body: bytes) -> StepRecord:
    _, kind, kept, size, number, begin_ns, end_ns, tokens = STEP_HEAD.unpack_from(body)
    if kind >= len(_STEP_KINDS) or kept > min(size, MAX_STEP_MEMBERS) or end_ns < begin_ns:
        raise ValueError
    return StepRecord(
        number=number,
        kind=_STEP_KINDS[kind],
        begin_ns=begin_ns,
        end_ns=end_ns,
        tokens=tokens,
        size=size,
        members=_step_struct(kept).unpack_from(body)[_STEP_HEAD_FIELDS:],
    )


_STEP_HEAD_FIELDS = 8


def _decode_clock(body: bytes) -> ClockRecord:
    _, name, clock_id, error_ns, t_ns, offset_ns = CLOCK_HEAD.unpack_from(body)
    begin = CLOCK_HEAD.size
    middle, end = begin + name, begin + name + clock_id
    if not clock_id or end > len(body):
        raise ValueError
    return ClockRecord(
        t_ns=t_ns,
        peer=body[begin:middle].decode(),
        peer_clock_id=body[middle:end].decode(),
        offset_ns=offset_ns,
        error_ns=error_ns,
    )


def _bare_decoder(mark: Mark) -> Decode:
    """For a mark whose values are of types to come: its time is known, its values are not."""
    nothing: tuple[Value, ...] = (None,) * len(MARKS[mark].attrs)

    def decode(body: bytes) -> MarkRecord:
        _, _, attempt, key, t_ns = BODY_HEAD.unpack_from(body)
        return MarkRecord(mark, key, attempt, t_ns, nothing)

    return decode


def _mark_decoder(mark: Mark, attrs: Sequence[tuple[str, str]]) -> Decode:
    try:
        types = tuple(AttrType(attr_type) for _, attr_type in attrs)
    except ValueError:
        return _bare_decoder(mark)
    layout = _mark_struct(types)
    unpack, size = layout.unpack_from, layout.size
    full = (1 << len(types)) - 1
    written = [tuple(attr) for attr in attrs]
    known = [(attr.key, attr.type.value) for attr in MARKS[mark].attrs]
    # Where each attribute known here stands among the written ones; None: not written.
    places = [written.index(attr) if attr in written else None for attr in known]
    aligned = written == known
    strings = [index for index, attr_type in enumerate(types) if attr_type is AttrType.STR]
    nothing: tuple[Value, ...] = (None,) * len(known)
    bare = BODY_HEAD.size
    unpack_head = BODY_HEAD.unpack

    def decode(body: bytes) -> MarkRecord:
        if len(body) == bare:
            _, _, attempt, key, t_ns = unpack_head(body)
            return MarkRecord(mark, key, attempt, t_ns, nothing)
        fields = unpack(body)
        _, present, attempt, key, t_ns = fields[:5]
        values: tuple[Value, ...] = fields[5:]
        if present != full or strings:
            values = with_texts(body, present, values)
        if not aligned:
            values = tuple([None if place is None else values[place] for place in places])
        return MarkRecord(mark, key, attempt, t_ns, values)

    def with_texts(body: bytes, present: int, fields: tuple[Any, ...]) -> tuple[Value, ...]:
        """Texts in place of their lengths, None for what is absent."""
        values: list[Value] = list(fields)
        start = size
        for index in strings:
            if present >> index & 1:
                end = start + fields[index]
                values[index] = body[start:end].decode("utf-8", "replace")
                start = end
        if start > len(body):
            raise ValueError
        if present != full:
            for index in range(len(values)):
                if not present >> index & 1:
                    values[index] = None
        return tuple(values)

    if aligned and compiled is not None:
        return compiled.Layout(mark, _format(types), decode)
    return decode
