"""The ring as bytes: round trips, laps, damage, concurrent and killed writers."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdtrace.clock import ClockAnchor
from pdtrace.errors import (
    RecordError,
    RingClosedError,
    RingCreateError,
    RingError,
    RingFormatError,
    RingVersionError,
)
from pdtrace.propagation import RequestContext
from pdtrace.ring import codec
from pdtrace.ring.files import create_ring, scan_rings
from pdtrace.ring.layout import (
    BLOCK_HEADER,
    BODY_HEAD,
    FIXED_HEADER,
    HEADER_BYTES,
    IDENTITY_OFFSET,
    MAX_STEP_MEMBERS,
    RECORD_HEADER,
    Counter,
    RingCapacity,
    RingIdentity,
    block_checksum,
)
from pdtrace.ring.reader import RingPosition, RingReader, WriterState
from pdtrace.ring.records import (
    ClockRecord,
    EndRecord,
    LossRecord,
    MarkRecord,
    OpenRecord,
    Record,
    StepRecord,
    Value,
)
from pdtrace.ring.writer import RingWriter
from pdtrace.semconv import AttrType
from pdtrace.stages import MARKS, Gauge, Mark, Role, StepKind
from pdtrace.testing import MemoryRings, record_request

TINY = RingCapacity(blocks=4, block_bytes=4096)
MARKS_PER_TINY_BLOCK = (4096 - BLOCK_HEADER.size) // 32

IDENTITY = RingIdentity(
    role=Role.DECODE,
    instance="decode-0",
    pid=4711,
    host_id="host",
    host_name="name",
    boot_id="boot",
    anchor=ClockAnchor(monotonic_ns=1, wall_ns=2),
    service_name="pd-decode",
    resource={"deployment.environment.name": "test"},
    schema=codec.SCHEMA,
)


def memory_ring(
    capacity: RingCapacity = TINY, identity: RingIdentity = IDENTITY
) -> tuple[RingWriter, bytearray]:
    buffer = bytearray(capacity.file_bytes)
    return RingWriter(buffer, identity, capacity), buffer


def bare_mark(number: int) -> bytes:
    """A mark whose time says its number."""
    return codec.pack_head(Mark.KV_NOTICED, 0, 1, 7, number)


def times(records: Iterable[Record]) -> list[int]:
    return [time_of(record) for record in records]


def time_of(record: Record) -> int:
    assert not isinstance(record, LossRecord)  # nobody asked for these
    return record.begin_ns if isinstance(record, StepRecord) else record.t_ns


def fail(error: Exception) -> None:
    raise error


def ignore() -> None:
    pass


# Values survive


_VALUES: dict[AttrType, st.SearchStrategy[Value]] = {
    AttrType.INT: st.integers(-(2**63), 2**63 - 1),
    AttrType.FLOAT: st.floats(allow_nan=False),
    AttrType.BOOL: st.booleans(),
    AttrType.STR: st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
}
_INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def marks_with_values(draw: st.DrawFn) -> tuple[Role, Mark, tuple[Value, ...]]:
    mark = draw(st.sampled_from(list(Mark)))
    role = draw(st.sampled_from(sorted(MARKS[mark].roles)))
    values = [draw(st.none() | _VALUES[attr.type]) for attr in MARKS[mark].attrs]
    return role, mark, tuple(values[: draw(st.integers(0, len(values)))])


@given(
    written=st.lists(
        st.tuples(
            marks_with_values(),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**64 - 1),
            _INT64,
        ),
        max_size=20,
    )
)
def test_every_mark_comes_back_with_its_values(
    written: list[tuple[tuple[Role, Mark, tuple[Value, ...]], int, int, int]],
):
    writer, buffer = memory_ring(RingCapacity(blocks=4, block_bytes=2**20))
    expected: list[Record] = []
    for (role, mark, values), attempt, key, t_ns in written:
        encode = codec.build_encoders(role, on_error=fail, on_truncated=ignore)[mark]
        assert encode is not None
        writer.append(
            encode(attempt, key, t_ns, values)
            if values
            else codec.pack_head(mark, 0, attempt, key, t_ns)
        )
        absent = (None,) * (len(MARKS[mark].attrs) - len(values))
        expected.append(
            MarkRecord(mark=mark, key=key, attempt=attempt, t_ns=t_ns, values=values + absent)
        )
    reader = RingReader.over(buffer)
    assert reader.read() == expected
    assert (reader.missed, reader.torn, reader.unknown) == (0, 0, 0)


@given(
    request_id=st.text(max_size=300),
    handoff_id=st.text(max_size=80),
    trace=st.integers(1, 2**128 - 1),
    sampled=st.booleans(),
    attempt=st.integers(0, 2**32 - 1),
)
def test_open_records_keep_any_unicode_id_up_to_their_limit(
    request_id: str, handoff_id: str, trace: int, sampled: bool, attempt: int
):
    writer, buffer = memory_ring()
    context = RequestContext(
        request_id=request_id,
        trace_id=f"{trace:032x}",
        root_span_id=f"{1:016x}",
        attempt_span_id=f"{2:016x}",
        sampled=sampled,
        tracestate="vendor=1",
        attempt=attempt,
        handoff_id=handoff_id,
    )
    body, truncated = codec.encode_open(context, 9, 5)
    writer.append(body)
    writer.append(codec.pack_head(codec.KIND_END, 0, 0, 9, 6))
    opened, ended = RingReader.over(buffer).read()
    assert isinstance(opened, OpenRecord)
    assert ended == EndRecord(key=9, t_ns=6)
    assert (opened.key, opened.t_ns) == (9, 5)

    # Lone surrogates cannot be stored; everything else is kept from the beginning.
    for kept, given_id in (
        (opened.context.request_id, request_id.encode(errors="replace").decode()),
        (opened.context.handoff_id, handoff_id.encode(errors="replace").decode()),
    ):
        assert len(kept.encode()) <= 256
        assert given_id.startswith(kept)
        if len(given_id.encode()) <= 256:
            assert kept == given_id
        else:
            assert len(kept.encode()) > 256 - 4
    cut = sum(len(text.encode(errors="replace")) > 256 for text in (request_id, handoff_id))
    assert truncated == cut
    same = msgspec.structs.replace(opened.context, request_id=request_id, handoff_id=handoff_id)
    assert same == context


@pytest.mark.parametrize("character", ["a", "é", "語", "😀"])
def test_long_strings_are_cut_on_a_character_and_counted(character: str):
    cuts: list[int] = []
    encode = codec.build_encoders(Role.DECODE, on_error=fail, on_truncated=lambda: cuts.append(1))[
        Mark.WAITING
    ]
    assert encode is not None
    writer, buffer = memory_ring()
    width = len(character.encode())
    fits = 255 // width
    writer.append(encode(1, 7, 0, ("s", "r", 1, 2, 3, 4, "b", character * fits)))
    assert cuts == []
    writer.append(encode(1, 7, 0, ("s", "r", 1, 2, 3, 4, "b", character * (fits + 1))))
    assert cuts == [1]
    whole, cut = RingReader.over(buffer).read()
    assert isinstance(whole, MarkRecord)
    assert isinstance(cut, MarkRecord)
    assert whole.values[-1] == cut.values[-1] == character * fits


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (("s", "r", "three", 2, 3, 4, "b", "bs"), ("s", "r", None, 2, 3, 4, "b", "bs")),
        (("s", "r", 1.5, 2, 3, 4, "b", "bs"), ("s", "r", None, 2, 3, 4, "b", "bs")),
        (("s", "r", 2**63, 2, 3, 4, "b", "bs"), ("s", "r", None, 2, 3, 4, "b", "bs")),
        ((b"s", "r", 1, 2, 3, 4, Path("b"), "bs"), (None, "r", 1, 2, 3, 4, None, "bs")),
        (("s", "r", 1, 2, 3, 4, "b", "bs", "more"), ("s", "r", 1, 2, 3, 4, "b", "bs")),
        (("s\ud800", "r", True, 2, 3, 4, "b", "bs"), ("s?", "r", 1, 2, 3, 4, "b", "bs")),
    ],
)
def test_a_bad_value_is_left_out_and_the_record_kept(
    values: tuple[Value, ...], kept: tuple[Value, ...]
):
    errors: list[Exception] = []
    encode = codec.build_encoders(Role.DECODE, on_error=errors.append, on_truncated=ignore)[
        Mark.WAITING
    ]
    assert encode is not None
    writer, buffer = memory_ring()
    writer.append(encode(1, 7, 0, values))
    (record,) = RingReader.over(buffer).read()
    assert isinstance(record, MarkRecord)
    assert record.values == kept
    bad = sum(got is not None and want is None for got, want in zip(values, kept, strict=False))
    assert len(errors) == bad + (len(values) > len(kept))
    assert all(isinstance(error, RecordError) for error in errors)


@pytest.mark.parametrize("value", [1, "yes", 0.0])
def test_bool_attributes_take_only_true_and_false(value: Value):
    errors: list[Exception] = []
    encode = codec.build_encoders(Role.GATEWAY, on_error=errors.append, on_truncated=ignore)[
        Mark.TOKENIZED
    ]
    assert encode is not None
    writer, buffer = memory_ring()
    writer.append(encode(1, 7, 0, ("m", 1, 2, value, "pd")))
    (record,) = RingReader.over(buffer).read()
    assert isinstance(record, MarkRecord)
    assert record.values == ("m", 1, 2, None, "pd")
    assert "gen_ai.request.stream takes bool" in str(errors[0])


@st.composite
def steps(draw: st.DrawFn) -> StepRecord:
    begin_ns = draw(_INT64)
    members = draw(st.lists(st.integers(0, 2**64 - 1), max_size=MAX_STEP_MEMBERS))
    return StepRecord(
        number=draw(st.integers(0, 2**64 - 1)),
        kind=draw(st.sampled_from(list(StepKind))),
        begin_ns=begin_ns,
        end_ns=draw(st.integers(begin_ns, 2**63 - 1)),
        tokens=draw(st.integers(0, 2**64 - 1)),
        size=draw(st.integers(len(members), 2**32 - 1)),
        members=tuple(members),
    )


_CLOCKS = st.builds(
    ClockRecord,
    t_ns=_INT64,
    peer=st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    peer_clock_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=90),
    offset_ns=_INT64,
    error_ns=st.integers(0, 2**64 - 1),
)


def encode(record: StepRecord | ClockRecord) -> bytes:
    if isinstance(record, StepRecord):
        return codec.encode_step(
            record.kind,
            record.number,
            record.begin_ns,
            record.end_ns,
            tokens=record.tokens,
            members=list(record.members),
            size=record.size,
        )
    body, cut = codec.encode_clock(
        record.peer, record.peer_clock_id, record.offset_ns, record.error_ns, record.t_ns
    )
    assert not cut
    return body


@given(written=st.lists(steps() | _CLOCKS, max_size=8))
def test_steps_and_clock_samples_come_back_as_they_were(
    written: list[StepRecord | ClockRecord],
):
    writer, buffer = memory_ring(RingCapacity(blocks=4, block_bytes=2**20))
    for record in written:
        writer.append(encode(record))
    reader = RingReader.over(buffer)
    assert reader.read() == written
    assert (reader.missed, reader.torn, reader.unknown) == (0, 0, 0)


@given(
    record=steps() | _CLOCKS,
    data=st.data(),
)
def test_a_body_that_cannot_be_is_counted_as_unknown_and_never_raises(
    record: StepRecord | ClockRecord, data: st.DataObject
):
    """Right checksums over wrong bodies: what another writer, or none, would have left."""
    body = bytearray(encode(record))
    how = data.draw(st.sampled_from(["cut", "flip", "noise", "longer"]))
    if how == "cut":
        del body[data.draw(st.integers(BODY_HEAD.size, len(body) - 1)) :]
    elif how == "flip":
        body[data.draw(st.integers(1, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    elif how == "noise":
        body[1:] = data.draw(st.binary(min_size=BODY_HEAD.size, max_size=200))
    else:
        body += data.draw(st.binary(max_size=20))  # fields to come
    writer, buffer = memory_ring()
    writer.append(bytes(body))
    writer.append(bare_mark(1))
    reader = RingReader.over(buffer)
    *read, last = reader.read()
    assert time_of(last) == 1
    assert len(read) + reader.unknown == 1
    assert reader.torn == 0
    if how == "cut":
        assert reader.unknown == 1
    if how == "longer":
        assert read == [record]
    for one in read:
        assert not isinstance(one, StepRecord) or len(one.members) <= one.size


# Laps


@settings(max_examples=60)
@given(
    capacity=st.sampled_from([TINY, RingCapacity(blocks=7, block_bytes=4104)]),
    bursts=st.lists(st.integers(0, 3 * 4 * MARKS_PER_TINY_BLOCK), min_size=1, max_size=12),
    limit=st.sampled_from([1, 50, 65536]),
)
def test_a_lapped_reader_counts_exactly_what_it_missed(
    capacity: RingCapacity, bursts: list[int], limit: int
):
    writer, buffer = memory_ring(capacity)
    reader = RingReader.over(buffer)
    seen: list[int] = []
    written = 0
    for burst in bursts:
        for _ in range(burst):
            writer.append(bare_mark(written))
            written += 1
        before, missed = len(seen), reader.missed
        seen += times(reader.read(limit=limit))
        # What a burst brings is either read or missed, and what is read is the newest.
        if limit == 65536:
            assert len(seen) - before + reader.missed - missed == burst
            assert seen[before:] == list(range(written - (len(seen) - before), written))
    while more := reader.read(limit=limit):
        seen += times(more)
    assert len(seen) + reader.missed == written
    assert all(a < b for a, b in pairwise(seen))
    assert reader.torn == 0


class LappingBuffer(bytearray):
    """A ring whose writer laps the reader between its first look at a block and its copy."""

    on_copy: Callable[[], None] | None = None

    def __getitem__(self, key: object) -> bytearray:  # pyright: ignore[reportIncompatibleMethodOverride] only slices are read
        assert isinstance(key, slice)
        if self.on_copy is not None and key.stop - key.start > BLOCK_HEADER.size:
            lap, self.on_copy = self.on_copy, None
            lap()
        return super().__getitem__(key)


def test_a_reader_notes_whether_records_were_overwritten_or_damaged():
    writer, buffer = memory_ring()
    reader = RingReader.over(buffer)
    for number in range(3 * MARKS_PER_TINY_BLOCK):
        writer.append(bare_mark(number))
    at = buffer.index(bare_mark(5))
    buffer[at : at + 8] = bytes(8)
    [damaged] = [r for r in reader.read(losses=True) if isinstance(r, LossRecord)]
    assert damaged == LossRecord(count=1)
    for number in range(20 * MARKS_PER_TINY_BLOCK):
        writer.append(bare_mark(number))
    first = reader.read(losses=True)[0]
    assert isinstance(first, LossRecord)
    assert first.overwritten


@pytest.mark.parametrize("lapped", [4, 5, 9, 400])
def test_a_block_recycled_while_it_is_copied_is_missed_not_torn(lapped: int):
    buffer = LappingBuffer(TINY.file_bytes)
    writer = RingWriter(buffer, IDENTITY, TINY)
    reader = RingReader.over(buffer)
    for number in range(10):
        writer.append(bare_mark(number))
    written = 10 + lapped * MARKS_PER_TINY_BLOCK

    def lap() -> None:
        for number in range(10, written):
            writer.append(bare_mark(number))

    buffer.on_copy = lap
    got = times(reader.read())
    assert buffer.on_copy is None
    assert got == list(range(written - len(got), written))
    assert len(got) >= 3 * MARKS_PER_TINY_BLOCK
    assert (reader.missed, reader.torn) == (written - len(got), 0)


def test_a_block_being_recycled_is_missed_not_torn(monkeypatch: pytest.MonkeyPatch):
    """A reader looks while the writer is between taking the old header away and its new one."""
    writer, buffer = memory_ring()
    reader = RingReader.over(buffer)
    for number in range(4 * MARKS_PER_TINY_BLOCK):
        writer.append(bare_mark(number))
    got: list[int] = []
    notes: list[Record] = []

    def read(sequence: int, number: int) -> int:
        note, *records = reader.read(losses=True)
        notes.append(note)
        got.extend(times(records))
        return block_checksum(sequence, number)

    monkeypatch.setattr("pdtrace.ring.writer.block_checksum", read)
    writer.append(bare_mark(4 * MARKS_PER_TINY_BLOCK))
    assert notes == [LossRecord(count=MARKS_PER_TINY_BLOCK, overwritten=True)]
    assert got == list(range(MARKS_PER_TINY_BLOCK, 4 * MARKS_PER_TINY_BLOCK))
    assert (reader.missed, reader.torn) == (MARKS_PER_TINY_BLOCK, 0)


def test_records_of_an_earlier_lap_never_pass_for_later_ones():
    """A lap of exactly 65,536 records: the stale ones carry the numbers that come next."""
    capacity = RingCapacity(blocks=32, block_bytes=BLOCK_HEADER.size + 2048 * 32)
    writer, buffer = memory_ring(capacity)
    reader = RingReader.over(buffer)
    seen: list[int] = []
    for number in range(65_536 + 100):
        writer.append(bare_mark(number))
        if number % 1024 == 99:
            seen += times(reader.read())
    assert seen == list(range(65_536 + 100))
    assert reader.read(final=True) == []  # also when its writer was killed here
    assert (reader.missed, reader.torn) == (0, 0)


@pytest.mark.parametrize("unread", [0, 2])
@pytest.mark.parametrize("laps", [0, 1, 3])
def test_a_record_with_a_later_one_behind_it_is_on_its_way_not_torn(laps: int, unread: int):
    """A signal handler recorded while a record was reserved and not yet stored."""
    writer, buffer = memory_ring()
    reader = RingReader.over(buffer)
    before = laps * TINY.blocks * MARKS_PER_TINY_BLOCK + 5
    for number in range(before):
        writer.append(bare_mark(number))
    reader.read()
    missed = reader.missed
    for number in range(before, before + unread):
        writer.append(bare_mark(number))
    last = before + unread
    end = HEADER_BYTES + (writer.block % TINY.blocks + 1) * TINY.block_bytes
    place = slice(end - writer.block_room, end - writer.block_room + RECORD_HEADER.size)
    not_yet = buffer[place]
    writer.append(bare_mark(last))
    stored = buffer[place]
    writer.append(bare_mark(last + 1))
    buffer[place] = not_yet
    assert times(reader.read()) == list(range(before, last))
    buffer[place] = stored
    assert times(reader.read()) == [last, last + 1]
    assert (reader.missed, reader.torn) == (missed, 0)


def test_a_reader_waits_at_the_end_of_a_block_without_a_byte_to_spare():
    writer, buffer = memory_ring()
    reader = RingReader.over(buffer)
    room = TINY.block_bytes - BLOCK_HEADER.size
    for number in range(TINY.blocks):
        writer.append(bare_mark(number) + bytes(room - 32))
    assert writer.block_room == 0
    assert times(reader.read()) == list(range(TINY.blocks))
    assert reader.read() == []  # behind it the file ends
    writer.append(bare_mark(TINY.blocks))
    assert times(reader.read()) == [TINY.blocks]
    assert (reader.missed, reader.torn) == (0, 0)


def test_blocks_of_mixed_record_sizes_never_split_a_record():
    writer, buffer = memory_ring()
    reader = RingReader.over(buffer)
    encode = codec.build_encoders(Role.DECODE, on_error=fail, on_truncated=ignore)[Mark.WAITING]
    assert encode is not None
    seen = 0
    for number in range(3000):
        writer.append(encode(1, 7, number, ("s" * (number % 250), "r")))
        if number % 11 == 0:
            got = reader.read()
            assert times(got) == list(range(seen, number + 1))
            seen = number + 1
    assert (reader.missed, reader.torn) == (0, 0)


def test_a_record_larger_than_a_block_is_refused():
    writer, buffer = memory_ring()
    with pytest.raises(RecordError, match="larger than a block"):
        writer.append(bytes(4096))
    writer.append(bare_mark(0))
    assert times(RingReader.over(buffer).read()) == [0]


def test_a_reader_resumes_where_another_stopped():
    writer, buffer = memory_ring()
    first = RingReader.over(buffer)
    for number in range(200):
        writer.append(bare_mark(number))
    assert times(first.read()) == list(range(200))
    saved = msgspec.json.decode(msgspec.json.encode(first.position()), type=RingPosition)
    assert saved.number == 200
    for number in range(200, 300):
        writer.append(bare_mark(number))
    second = RingReader.over(buffer)
    second.seek(saved)
    assert times(second.read()) == list(range(200, 300))
    # Lapped since the position was saved: the difference is counted.
    for number in range(300, 1300):
        writer.append(bare_mark(number))
    third = RingReader.over(buffer)
    third.seek(saved)
    got = times(third.read())
    assert got[-1] == 1299
    assert third.missed == got[0] - 200


@pytest.mark.parametrize(
    "position",
    [
        RingPosition(block=-1),
        RingPosition(number=-1),
        RingPosition(offset=0),
        RingPosition(offset=25),
        RingPosition(offset=4104),
        RingPosition(block=10**6),
    ],
)
def test_a_position_that_cannot_be_is_refused(position: RingPosition):
    _, buffer = memory_ring()
    with pytest.raises(RingError, match="no position"):
        RingReader.over(buffer).seek(position)


# Damage


def damaged_ring() -> tuple[bytearray, dict[int, Record]]:
    """A closed ring of two laps of mixed records, and what is in it by time."""
    writer, buffer = memory_ring()
    encode = codec.build_encoders(Role.DECODE, on_error=fail, on_truncated=ignore)[Mark.WAITING]
    assert encode is not None
    for number in range(250):
        if number % 17 == 5:
            members = list(range(number % 7))
            step = codec.encode_step(
                StepKind.DECODE, 3, number, number, tokens=number, members=members, size=number
            )
            writer.append(step)
        elif number % 17 == 8:
            writer.append(codec.encode_clock("gateway-0", "host/boot", 5, 6, number)[0])
        elif number % 3:
            writer.append(bare_mark(number))
        else:
            values = ("decode.reserve", "kv_pages", number, None, 3, 4, "b" * (number % 40))
            writer.append(encode(1, 7, number, values))
    intact = {time_of(record): record for record in RingReader.over(buffer).read()}
    writer.close()
    return buffer, intact


_RING, _INTACT = damaged_ring()
_WRITTEN = 250


def read_damaged(data: bytearray) -> tuple[list[Record], RingReader]:
    reader = RingReader.over(data)
    records: list[Record] = []
    while got := reader.read(limit=100, final=True):
        records += got
    return records, reader


@settings(max_examples=400)
@given(
    flips=st.lists(
        st.tuples(st.integers(HEADER_BYTES, len(_RING) - 1), st.integers(1, 255)),
        min_size=1,
        max_size=8,
    )
)
def test_flipped_bytes_never_raise_nor_pass_for_a_record(flips: list[tuple[int, int]]):
    data = bytearray(_RING)
    for offset, mask in flips:
        data[offset] ^= mask
    records, reader = read_damaged(data)
    for record in records:
        assert record == _INTACT[time_of(record)]
    assert len(set(times(records))) == len(records)
    assert len(records) + reader.missed + reader.torn + reader.unknown == _WRITTEN


@settings(max_examples=100)
@given(
    start=st.integers(HEADER_BYTES, len(_RING) - 1),
    junk=st.binary(min_size=1, max_size=6000),
)
def test_overwritten_stretches_cost_only_what_they_cover(start: int, junk: bytes):
    data = bytearray(_RING)
    data[start : start + len(junk)] = junk[: len(data) - start]
    records, reader = read_damaged(data)
    assert all(record == _INTACT[time_of(record)] for record in records)
    assert len(records) + reader.missed + reader.torn + reader.unknown == _WRITTEN


@given(offset=st.integers(0, IDENTITY_OFFSET + 200), mask=st.integers(1, 255))
def test_a_damaged_header_is_a_typed_error_or_harmless(offset: int, mask: int):
    data = bytearray(_RING)
    data[offset] ^= mask
    try:
        records, reader = read_damaged(data)
    except (RingFormatError, RingVersionError):
        return
    assert all(record == _INTACT[time_of(record)] for record in records)
    assert reader.identity == IDENTITY
    reader.counters()
    reader.gauges()


@given(flip=st.integers(0, 31), mask=st.integers(1, 255))
@example(flip=0, mask=25)  # the damaged length points past an intact record
def test_one_damaged_record_in_a_live_block_costs_one_record(flip: int, mask: int):
    writer, buffer = memory_ring()
    for number in range(5):
        writer.append(bare_mark(number))
    third = HEADER_BYTES + BLOCK_HEADER.size + 2 * 32
    buffer[third + flip] ^= mask
    reader = RingReader.over(buffer)
    got = times(reader.read())
    # A damaged length hides where the next record begins until the block is complete.
    assert got in ([0, 1, 3, 4], [0, 1])
    for number in range(5, 5 + MARKS_PER_TINY_BLOCK):
        writer.append(bare_mark(number))
    got += times(reader.read())
    assert got == [0, 1, *range(3, 5 + MARKS_PER_TINY_BLOCK)]
    assert (reader.torn, reader.missed) == (1, 0)


def test_a_record_on_its_way_is_not_torn_but_read_later():
    writer, buffer = memory_ring()
    writer.append(bare_mark(0))
    writer.append(bare_mark(1))
    second = HEADER_BYTES + BLOCK_HEADER.size + 32
    complete = bytes(buffer[second : second + 32])
    reader = RingReader.over(buffer)
    # The first word is there, the body is not yet: possible where stores are reordered.
    buffer[second + 8 : second + 32] = bytes(24)
    assert times(reader.read()) == [0]
    buffer[second : second + 8] = bytes(8)
    assert reader.read() == []
    buffer[second : second + 32] = complete
    assert times(reader.read()) == [1]
    assert reader.torn == 0


def test_final_read_looks_behind_a_record_that_its_writer_left_half_written():
    writer, buffer = memory_ring()
    for number in range(3):
        writer.append(bare_mark(number))
    second = HEADER_BYTES + BLOCK_HEADER.size + 32
    buffer[second : second + 8] = bytes(8)
    reader = RingReader.over(buffer)
    assert times(reader.read()) == [0]
    assert times(reader.read(final=True)) == [2]
    assert reader.torn == 1


# Versions


def test_another_format_version_is_named_in_the_error():
    data = bytearray(_RING)
    data[8:12] = (99).to_bytes(4, "little")
    with pytest.raises(RingVersionError, match="ring format 99, this pdtrace reads format 2"):
        RingReader.over(data)


Spoil = Callable[[bytes], bytes]
_NO_RINGS: list[tuple[Spoil, str]] = [
    (lambda data: b"", "is not a pdtrace ring"),
    (lambda data: data[:20], "is not a pdtrace ring"),
    (lambda data: b"GIF89a" + data[6:], "is not a pdtrace ring"),
    (lambda data: data[:-1], "cut short"),
    (lambda data: data[:HEADER_BYTES], "cut short"),
    (lambda data: data[:16] + b"\xff" * 4 + data[20:], "damaged header"),
    (lambda data: data[:24] + b"\xff" * 4 + data[28:], "damaged header"),
]


@pytest.mark.parametrize(("spoil", "message"), _NO_RINGS)
def test_what_is_no_ring_is_refused(spoil: Spoil, message: str, tmp_path: Path):
    path = tmp_path / "x.ring"
    path.write_bytes(spoil(bytes(_RING)))
    with pytest.raises(RingFormatError, match=message) as raised:
        RingReader(path)
    assert str(path) in str(raised.value)


def test_a_file_cut_short_under_a_reader_is_an_error_not_a_signal(tmp_path: Path):
    path = tmp_path / "x.ring"
    path.write_bytes(_RING)
    with RingReader(path) as reader:
        os.truncate(path, HEADER_BYTES + 100)
        with pytest.raises(RingFormatError, match="was cut short at byte"):
            reader.read()


def test_attributes_are_matched_by_key_across_versions():
    """A writer of another version: attributes in another order, more and fewer of them."""
    schema = {
        **codec.SCHEMA,
        int(Mark.PAGES_RESERVED): [
            ("pd.to.come", "str"),
            ("pd.kv.free_pages", "int"),
            ("pd.kv.colour", "float"),
        ],
        239: [("pd.unknown.mark", "int")],
    }
    identity = msgspec.structs.replace(IDENTITY, schema=schema)
    writer, buffer = memory_ring(identity=identity)
    head = codec.BODY_HEAD.pack
    writer.append(
        head(Mark.PAGES_RESERVED, 0b111, 1, 7, 1)
        + b"\x03"
        + (5).to_bytes(8, "little")
        + bytes(8)
        + b"new"
    )
    writer.append(head(239, 1, 1, 7, 2) + bytes(8))  # a mark this version does not know
    writer.append(head(250, 0, 1, 7, 3))  # a control record it does not know
    writer.append(bare_mark(4))
    reader = RingReader.over(buffer)
    reserved, last = reader.read()
    assert isinstance(reserved, MarkRecord)
    assert reserved.values == (None, 5)
    assert time_of(last) == 4
    assert (reader.unknown, reader.torn) == (2, 0)


def test_a_mark_with_values_of_a_type_to_come_keeps_its_time():
    schema = {**codec.SCHEMA, int(Mark.PAGES_RESERVED): [("pd.kv.pages", "decimal")]}
    identity = msgspec.structs.replace(IDENTITY, schema=schema)
    writer, buffer = memory_ring(identity=identity)
    writer.append(codec.BODY_HEAD.pack(Mark.PAGES_RESERVED, 1, 1, 7, 3) + b"12.5")
    (reserved,) = RingReader.over(buffer).read()
    assert isinstance(reserved, MarkRecord)
    assert (reserved.t_ns, reserved.values) == (3, (None, None))


def test_an_attribute_that_changed_its_type_is_left_out():
    schema = {**codec.SCHEMA, int(Mark.PAGES_RESERVED): [("pd.kv.pages", "str")]}
    identity = msgspec.structs.replace(IDENTITY, schema=schema)
    writer, buffer = memory_ring(identity=identity)
    writer.append(codec.BODY_HEAD.pack(Mark.PAGES_RESERVED, 1, 1, 7, 3) + b"\x04many")
    (reserved,) = RingReader.over(buffer).read()
    assert isinstance(reserved, MarkRecord)
    assert reserved.values == (None, None)


def test_a_step_of_a_kind_to_come_is_counted_as_unknown():
    writer, buffer = memory_ring()
    body = bytearray(codec.encode_step(StepKind.DECODE, 1, 1, 2, tokens=1, members=[1], size=1))
    body[1] = len(StepKind)
    writer.append(bytes(body))
    reader = RingReader.over(buffer)
    assert reader.read() == []
    assert reader.unknown == 1


def test_an_identity_that_only_another_version_understands_is_a_version_error(tmp_path: Path):
    path = tmp_path / "new.ring"
    writer, path = create_ring(tmp_path, IDENTITY, TINY)
    writer.close()
    data = bytearray(path.read_bytes())
    length = FIXED_HEADER.unpack_from(data)[5]
    identity = bytes(data[IDENTITY_OFFSET : IDENTITY_OFFSET + length]).replace(
        b'"role":"decode"', b'"role":"oracle"'
    )
    data[IDENTITY_OFFSET : IDENTITY_OFFSET + length] = identity
    FIXED_HEADER.pack_into(data, 0, *FIXED_HEADER.unpack_from(data)[:6], crc32(identity))
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(RingVersionError, match="written by another pdtrace version") as got:
        RingReader(path)
    assert str(path) in str(got.value)


def test_a_reader_that_knows_less_counts_what_is_new_and_reads_the_rest():
    """This version's ring, read by one that has never heard of steps."""
    rings = MemoryRings()
    record_request(rings.recorders, steps=True, output_tokens=5, waits={"decode.queue": {}})
    reader = rings.reader(Role.DECODE)
    decoders = list(codec.build_decoders(codec.SCHEMA))
    decoders[codec.KIND_STEP] = None
    reader._decoders = decoders  # pyright: ignore[reportPrivateUsage] as an older build has it
    records = reader.read()
    assert reader.unknown == 4
    assert not any(isinstance(record, StepRecord) for record in records)
    assert {r.mark for r in records if isinstance(r, MarkRecord)} >= {
        Mark.RESERVE_RECEIVED,
        Mark.WAITING,
        Mark.DECODE_FINISHED,
    }


def test_mark_values_leave_room_for_control_records():
    assert max(Mark) < codec.FIRST_CONTROL_KIND
    assert max(len(spec.attrs) for spec in MARKS.values()) <= 16  # presence bits


# Gauges and counters


@given(values=st.dictionaries(st.sampled_from(list(Gauge)), st.integers(-(2**63) + 1, 2**63 - 1)))
def test_gauges_read_back_and_unset_ones_are_absent(values: dict[Gauge, int]):
    writer, buffer = memory_ring()
    for gauge, value in values.items():
        writer.gauges[gauge] = value
    assert RingReader.over(buffer).gauges() == values


def test_counters_say_what_was_written_and_whether_the_end_was_clean():
    writer, buffer = memory_ring()
    reader = RingReader.over(buffer)
    for number in range(300):
        writer.append(bare_mark(number))
    writer.count(Counter.DROPPED, 3)
    assert not reader.closed
    writer.close()
    writer.close()
    assert reader.closed
    counters = reader.counters()
    assert (counters[Counter.WRITTEN], counters[Counter.DROPPED]) == (300, 3)
    with pytest.raises(RingClosedError):
        writer.append(bare_mark(0))


# Files


def test_ring_files_are_private_complete_and_never_written_over(tmp_path: Path):
    directory = tmp_path / "run" / "rings"
    rings = [create_ring(directory, IDENTITY, TINY) for _ in range(3)]
    assert [path.name for _, path in rings] == [
        "decode-0-4711.ring",
        "decode-0-4711-2.ring",
        "decode-0-4711-3.ring",
    ]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for writer, path in rings:
        assert stat.S_IMODE(path.stat().st_mode) == 0o400  # nor cut short by a slip
        assert path.stat().st_size == TINY.file_bytes
        assert path.stat().st_blocks * 512 >= TINY.file_bytes  # no holes: disk space is taken
        with RingReader(path) as reader:
            assert reader.identity == IDENTITY
            assert reader.writer_state() is WriterState.ALIVE
            writer.close()
            assert reader.writer_state() is WriterState.CLOSED
            assert not reader.writer_alive()
    assert scan_rings(directory) == sorted(path for _, path in rings)
    assert len(list(directory.iterdir())) == 3  # no drafts left


def test_scan_of_a_missing_directory_is_empty(tmp_path: Path):
    assert scan_rings(tmp_path / "nowhere") == []


@pytest.mark.parametrize("instance", ["../../etc/x", "a/b:c", "ü 語", "x" * 400, ".."])
def test_any_instance_name_stays_in_the_directory(instance: str, tmp_path: Path):
    identity = msgspec.structs.replace(IDENTITY, instance=instance)
    writer, path = create_ring(tmp_path, identity, TINY)
    writer.close()
    assert path.parent == tmp_path
    assert scan_rings(tmp_path) == [path]
    with RingReader(path) as reader:
        assert reader.identity.instance == instance


def test_a_directory_that_is_a_file_is_a_clear_error(tmp_path: Path):
    blocked = tmp_path / "rings"
    blocked.write_text("not a directory")
    with pytest.raises(RingCreateError, match="Give a directory that this user may write to"):
        create_ring(blocked, IDENTITY, TINY)


def test_no_room_for_the_file_is_a_clear_error_and_leaves_nothing(tmp_path: Path):
    """A file size limit stands in for a full disk: both fail the allocation."""
    code = f"""
        import resource, sys
        sys.path.insert(0, {str(Path.cwd())!r})
        from pdtrace import Recorder, RingCreateError, Role
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            Recorder.open({str(tmp_path)!r}, role=Role.DECODE, instance="d")
        except RingCreateError as error:
            print(error.code, error)
    """
    done = run_python(code)
    assert done.stdout.startswith("ring_create_failed cannot create a ring of 4210688 bytes in")
    assert "has room" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(RingCreateError, match="No space left on device") as got:
        create_ring(tmp_path, IDENTITY, TINY)
    assert "has room, or a smaller capacity, or record nothing" in str(got.value)
    assert list(tmp_path.iterdir()) == []
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_disk_that_fills_up_later_cannot_kill_the_writer(tmp_path: Path):
    """A page without a block on disk would be a SIGBUS at the first store to it."""
    writer, path = create_ring(tmp_path, IDENTITY, TINY)
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(TINY.file_bytes)

    def first_hole(of: Path) -> int:
        with of.open("rb") as file:
            return os.lseek(file.fileno(), 0, os.SEEK_HOLE)

    assert first_hole(sparse) == 0  # the look sees what is missing
    assert first_hole(path) == TINY.file_bytes
    taken = path.stat().st_blocks
    assert taken * 512 >= TINY.file_bytes
    for number in range(3 * 4 * MARKS_PER_TINY_BLOCK):
        writer.append(bare_mark(number))
    assert path.stat().st_blocks == taken  # three laps needed no more
    writer.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_a_kernel_may_not_know_how_to_touch_pages_but_must_not_fail_to(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Mapping(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(mmap, "mmap", Mapping)
    if code == errno.EFAULT:  # the first store would be a SIGBUS
        with pytest.raises(RingCreateError, match="Bad address"):
            create_ring(tmp_path, IDENTITY, TINY)
        assert list(tmp_path.iterdir()) == []
        return
    writer, path = create_ring(tmp_path, IDENTITY, TINY)
    writer.append(bare_mark(3))
    writer.close()
    with RingReader(path) as reader:
        assert times(reader.read()) == [3]


def test_an_identity_too_large_for_the_header_is_refused(tmp_path: Path):
    identity = msgspec.structs.replace(IDENTITY, resource={"k": "v" * 20_000})
    with pytest.raises(RingCreateError, match="set fewer or shorter ones"):
        create_ring(tmp_path, identity, TINY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("blocks", "block_bytes"), [(3, 4096), (70_000, 4096), (4, 4095), (4, 2048), (4, 2**20 + 8)]
)
def test_impossible_capacities_are_refused(blocks: int, block_bytes: int):
    with pytest.raises(ValueError, match="must be"):
        RingCapacity(blocks=blocks, block_bytes=block_bytes)


# Other processes


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def start_writer(directory: Path, code: str) -> subprocess.Popen[str]:
    preamble = f"""
        import sys
        sys.path.insert(0, {str(Path.cwd())!r})
        from pdtrace import *
        recorder = Recorder.open({str(directory)!r}, role=Role.DECODE, instance="d",
            capacity=RingCapacity(blocks=8, block_bytes=8192), budget=None, raise_errors=True)
        trace = recorder.begin(RequestContext.create(request_id="r"))
        print(recorder.path, flush=True)
    """
    script = textwrap.dedent(preamble) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_reader_follows_a_writer_at_full_speed(tmp_path: Path):
    """Every record is read whole or counted as missed, while the ring laps many times."""
    total = 150_000
    writer = start_writer(
        tmp_path,
        f"""
        for number in range({total}):
            trace.mark(Mark.PAGES_RESERVED, number, number * 3, at_ns=number)
        recorder.close()
        """,
    )
    assert writer.stdout is not None
    with writer, RingReader(writer.stdout.readline().strip()) as reader:
        records: list[Record] = []
        finished = False
        deadline = time.monotonic() + 60
        while not finished and time.monotonic() < deadline:
            finished = reader.closed
            records += reader.read()
        counters = reader.counters()
    assert finished
    marks = [record for record in records if isinstance(record, MarkRecord)]
    assert all(record.values == (record.t_ns, record.t_ns * 3) for record in marks)
    assert all(a.t_ns < b.t_ns for a, b in pairwise(marks))
    assert marks[-1].t_ns == total - 1
    assert reader.torn == reader.unknown == 0
    assert len(records) + reader.missed == counters[Counter.WRITTEN]
    # The ring lapped at least 60 times, and each lap repeats the one OPEN record.
    assert counters[Counter.WRITTEN] > total + 60


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05])
def test_kill_9_loses_nothing_that_was_written(tmp_path: Path, delay_s: float):
    writer = start_writer(
        tmp_path,
        """
        number = 0
        while True:
            for _ in range(50):
                trace.mark(Mark.PAGES_RESERVED, number, number, at_ns=number)
                number += 1
            sys.stdout.write(f"{number}\\n")
            sys.stdout.flush()
        """,
    )
    assert writer.stdout is not None
    path = writer.stdout.readline().strip()
    with writer, RingReader(path) as reader:
        first = writer.stdout.readline()
        assert reader.writer_alive()
        # Announced through a pipe that is not drained: the writer stops at some point or is killed.
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        announced = int(([first, *writer.stdout.read().splitlines()][:-1] or [first])[-1])
        writer.wait(timeout=60)
        assert reader.writer_state() is WriterState.DEAD
        assert not reader.writer_alive()
        assert not reader.closed
        records = reader.read(final=True)
        assert time_of(records[-1]) >= announced - 1
        marks = [record for record in records if isinstance(record, MarkRecord)]
        assert all(record.values == (record.t_ns, record.t_ns) for record in marks)
        assert [b.t_ns - a.t_ns for a, b in pairwise(marks)] == [1] * (len(marks) - 1)
        assert reader.torn == 0


def test_gauges_of_a_stopped_process_can_be_read(tmp_path: Path):
    writer = start_writer(
        tmp_path,
        """
        recorder.gauge(Gauge.RUNNING, 3)
        print("set", flush=True)
        sys.stdin.read()
        """,
    )
    assert writer.stdout is not None
    with writer, RingReader(writer.stdout.readline().strip()) as reader:
        assert writer.stdout.readline() == "set\n"
        writer.send_signal(signal.SIGSTOP)
        try:
            assert reader.gauges()[Gauge.RUNNING] == 3
            assert reader.writer_alive()
        finally:
            writer.kill()


def test_a_signal_handler_may_record_in_the_middle_of_a_record():
    writer, buffer = memory_ring(RingCapacity(blocks=64, block_bytes=64 * 1024))
    reader = RingReader.over(buffer)
    interruptions = 0

    def interrupt(*_: object) -> None:
        nonlocal interruptions
        interruptions += 1
        writer.append(bare_mark(-interruptions))

    previous = signal.signal(signal.SIGALRM, interrupt)
    seen: list[int] = []
    written = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        while interruptions < 100 and written < 2_000_000:
            for _ in range(1000):
                writer.append(bare_mark(written))
                written += 1
            seen += times(reader.read())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    seen += times(reader.read(final=True))
    assert interruptions > 0
    assert [number for number in seen if number >= 0] == list(range(written))
    interrupting = [number for number in seen if number < 0]
    # In the middle of turning to the next block there is no place: dropped, and counted.
    dropped = reader.counters()[Counter.DROPPED]
    assert len(interrupting) + dropped == interruptions
    assert len(set(interrupting)) == len(interrupting)
    assert (reader.torn, reader.missed) == (0, 0)


class _Interrupting:
    """The words of a ring, and a smaller record that a signal handler writes before one of them."""

    def __init__(self, words: Any, store: int, interrupt: Callable[[], None]) -> None:
        self._words = words
        self._left = store
        self._interrupt = interrupt

    def __setitem__(self, index: int, word: int) -> None:
        if self._left == 0:
            self._interrupt()
        self._left -= 1
        self._words[index] = word

    def release(self) -> None:
        self._words.release()


@pytest.mark.parametrize("store", range(4))
def test_a_signal_handler_may_record_less_than_what_did_not_fit(store: int):
    """There is room for its record at the end of the block that is being left."""
    writer, buffer = memory_ring()
    reader = RingReader.over(buffer)
    writer.append(bare_mark(0) + bytes(writer.block_room - 32 - 64))
    assert writer.block_room == 64
    writer._heads = _Interrupting(  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
        writer._heads,  # pyright: ignore[reportPrivateUsage]
        store,
        lambda: writer.append(bare_mark(-1)),
    )
    for number in range(1, 4):
        writer.append(bare_mark(number) + bytes(64))
    seen = times(reader.read())
    assert [number for number in seen if number >= 0] == [0, 1, 2, 3]
    assert seen.count(-1) + reader.counters()[Counter.DROPPED] == 1
    reader.read(final=True)
    assert (reader.torn, reader.missed) == (0, 0)


def test_the_fixed_header_is_where_older_readers_look():
    assert FIXED_HEADER.unpack_from(_RING)[:5] == (b"PDTRING\n", 2, HEADER_BYTES, 4096, 4)


@given(st.lists(st.sampled_from(["append", "read", "read one block", "seek"]), max_size=120))
def test_a_glance_tells_of_everything_that_a_read_would_give(steps: list[str]):
    """Who reads only after a glance has said so, and until nothing comes, misses nothing."""
    writer, buffer = memory_ring(RingCapacity(blocks=8, block_bytes=4096))
    glancing, reading = (RingReader.over(buffer) for _ in range(2))
    number, got, whole = 0, list[int](), list[int]()
    for step in [*steps, "read"]:
        if step == "append":
            for _ in range(50):  # several laps of the ring, within 120 steps
                writer.append(bare_mark(number))
                number += 1
        elif step == "seek":
            glancing.seek(glancing.position())
        else:
            limit = 1 if step == "read one block" else 10_000
            whole += times(reading.read(limit=limit))
            if glancing.glance()[0]:
                got += times(glancing.read(limit=limit))
            assert got == whole
            assert glancing.missed == reading.missed


def test_a_glance_finds_nothing_where_nothing_was_written_since():
    writer, buffer = memory_ring()
    reader = RingReader.over(buffer)
    for _ in range(3 * MARKS_PER_TINY_BLOCK):
        reader.glance()
        reader.read()
        assert reader.glance() == (False, False)
        writer.append(bare_mark(0))
        assert reader.glance() == (True, False)
    writer.close()
    assert RingReader.over(buffer).glance() == (True, True)


def test_an_empty_ring_is_not_copied_at_every_look():
    _, buffer = memory_ring()
    reader = RingReader.over(buffer)
    sizes: list[int] = []
    read_at = reader._read_at  # pyright: ignore[reportPrivateUsage]

    def counting(offset: int, size: int) -> bytes:
        sizes.append(size)
        return read_at(offset, size)

    reader._read_at = counting  # pyright: ignore[reportPrivateUsage]
    assert reader.read() == []
    assert max(sizes) < 100
