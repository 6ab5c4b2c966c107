"""The hot paths in C give what those in Python give: bytes written, records read, attributes sent,
errors counted."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace import Mark, Outcome, Recorder, Role, StepKind, WaitReason
from pdtrace.native import compiled, hot_path
from pdtrace.ring import codec
from pdtrace.ring.layout import HEADER_BYTES, RingCapacity
from pdtrace.semconv import AttrType
from pdtrace.stages import MARKS
from tests.support.both_paths import load_native, load_plain

BOTH = {"C": load_native(), "Python": load_plain()}
TINY = RingCapacity(blocks=4, block_bytes=4096)
_IDS = {
    "request_id": "req-1",
    "handoff_id": "hand-1",
    "trace_id": "1" * 32,
    "root_span_id": "2" * 16,
    "attempt_span_id": "3" * 16,
}


def native() -> Any:
    """The extension; the gate has a compiler, so it has this."""
    assert compiled is not None, "no extension: is there a C compiler? (make setup)"
    return compiled


def test_both_paths_are_there() -> None:
    assert hot_path() == BOTH["C"]["native"].hot_path() == "C"
    assert BOTH["Python"]["native"].hot_path() == "Python"
    assert BOTH["Python"]["recorder"].Recorder is not Recorder
    assert issubclass(BOTH["C"]["ring.writer"].RingWriter, native().Cursor)
    assert not issubclass(BOTH["Python"]["ring.writer"].RingWriter, native().Cursor)


# Rings written by both


@dataclass
class Ticking:
    """A clock that goes on by 7 ns whenever it is read, and sometimes has nothing to say."""

    now_ns: int = 1_000_000
    answers: list[object] = field(default_factory=list[object])

    def monotonic_ns(self) -> Any:
        self.now_ns += 7
        if self.answers:
            answer = self.answers.pop()
            if isinstance(answer, Exception):
                raise answer
            return answer
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns


class Side:
    """A recorder of one of both, over a small ring in memory."""

    def __init__(self, modules: Mapping[str, ModuleType], role: Role) -> None:
        recorder, layout = modules["recorder"], modules["ring.layout"]
        capacity = layout.RingCapacity(blocks=TINY.blocks, block_bytes=TINY.block_bytes)
        identity = layout.RingIdentity(
            role=layout.Role(role.value),
            instance="one",
            pid=1,
            host_id="host",
            host_name="name",
            boot_id="boot",
            anchor=layout.ClockAnchor(monotonic_ns=1, wall_ns=2),
            service_name="pd",
            schema=codec.SCHEMA,
        )
        self.buffer = bytearray(capacity.file_bytes)
        self.clock = Ticking()
        writer = modules["ring.writer"].RingWriter(self.buffer, identity, capacity)
        self.recorder = recorder.Recorder(
            identity.role, "one", lambda: (writer, None), clock=self.clock, raise_errors=False
        )
        self._context = recorder.RequestContext
        self.traces: list[Any] = []
        self.raised: list[str] = []

    def begin(self, attempt: int) -> None:
        self.traces.append(self.recorder.begin(self._context(**_IDS, attempt=attempt)))

    def mark(self, at: int, mark: Any, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        trace = self.traces[at % len(self.traces)]
        try:
            trace.mark(mark, *values, **named)
        except Exception as error:
            self.raised.append(f"{type(error).__name__}: {error}")


class Number(int):
    """An integer that is of a class of its own."""


class Text(str):
    """A text whose bytes would be others, if anybody asked it."""

    __slots__ = ()

    def encode(self, *_: object, **__: object) -> bytes:
        raise AssertionError


class Index:
    def __index__(self) -> int:
        return 11


class Broken:
    def __index__(self) -> int:
        raise ZeroDivisionError

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


ANY_VALUE: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=40),
    st.text("\ud800aé€😀", max_size=300),
    st.sampled_from(
        [WaitReason.KV_PAGES, Outcome.COMPLETED, Number(5), Text("text"), Index(), b"bytes", [1]]
    ),
)
_FITTING: Mapping[AttrType, st.SearchStrategy[Any]] = {
    AttrType.INT: st.integers(-(2**63), 2**63 - 1),
    AttrType.FLOAT: st.floats(),
    AttrType.BOOL: st.booleans(),
    AttrType.STR: st.text(max_size=90),
}


@st.composite
def marks(draw: st.DrawFn) -> tuple[Any, tuple[Any, ...]]:
    """A mark with values that are mostly its own."""
    mark = draw(st.sampled_from(list(Mark)))
    types = [attr.type for attr in MARKS[mark].attrs]
    values = [draw(_FITTING[kind] | st.none()) for kind in types]
    values = values[: draw(st.integers(0, len(values)))]
    if draw(st.integers(0, 3)) == 0:
        values = draw(st.lists(ANY_VALUE, max_size=len(types) + 2))
    return draw(st.sampled_from([mark, int(mark)])), tuple(values)


_AT_NS = st.one_of(st.none(), st.integers(0, 2**63 - 1), ANY_VALUE)
_CALLS = st.one_of(
    st.tuples(st.just("begin"), st.integers(-1, 2**33)),
    st.tuples(st.just("mark"), st.integers(0, 9), marks()),
    st.tuples(st.just("mark"), st.integers(0, 9), marks(), _AT_NS),
    st.tuples(st.just("odd"), st.integers(0, 9), ANY_VALUE),
    st.tuples(st.just("clock"), st.sampled_from([1.5, 2**70, OSError("no clock")])),
    st.tuples(st.just("wait"), st.integers(0, 9), st.integers(0, 3), st.text(max_size=3)),
    st.tuples(st.just("step"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 9)),
)


@settings(max_examples=100, deadline=None)
@given(role=st.sampled_from(list(Role)), calls=st.lists(_CALLS, max_size=60), lap=st.booleans())
def test_both_write_the_same_bytes(role: Role, calls: list[Any], lap: bool) -> None:
    """Whatever a program says, sense or nonsense, in whatever order, over laps of the ring."""
    sides = [Side(modules, role) for modules in BOTH.values()]
    for side in sides:
        side.begin(1)
        for _ in range(600 if lap else 0):
            side.mark(0, Mark.WAITING, ("decode.queue", "kv_pages", 1, None, 2), {})
        for call in calls:
            _apply(side, call)
    one, other = sides
    assert one.buffer[HEADER_BYTES:] == other.buffer[HEADER_BYTES:]
    assert one.buffer[:HEADER_BYTES] == other.buffer[:HEADER_BYTES]
    assert (one.recorder.errors, one.raised) == (other.recorder.errors, other.raised)
    assert one.clock.now_ns == other.clock.now_ns


def _apply(side: Side, call: tuple[Any, ...]) -> None:
    match call:
        case ("begin", attempt):
            side.begin(attempt)
        case ("mark", at, (mark, values)):
            side.mark(at, mark, values, {})
        case ("mark", at, (mark, values), at_ns):
            side.mark(at, mark, values, {"at_ns": at_ns})
        case ("odd", at, value):
            side.mark(at, value, (1,), {})
            side.mark(at, Mark.KV_NOTICED, (), {"at": value})
            side.mark(at, Mark.KV_NOTICED, (), {"at_ns": 5, "more": value})
        case ("clock", answer):
            side.clock.answers.append(answer)
            side.mark(0, Mark.KV_NOTICED, (), {})
        case ("wait", at, needed, blocker):
            trace = side.traces[at % len(side.traces)]
            trace.wait("decode.queue", WaitReason.SLOTS, needed=needed, blocker=blocker)
        case ("step", size):
            members = side.traces[:size]
            side.recorder.step(StepKind.DECODE, members, tokens=1, begin_ns=1, end_ns=2)
        case _:
            side.traces[call[1] % len(side.traces)].end()


def test_a_mark_by_keyword_and_one_without_any_are_what_python_makes_of_them() -> None:
    sides = [Side(modules, Role.DECODE) for modules in BOTH.values()]
    for side in sides:
        side.begin(1)
        side.traces[0].mark(mark=Mark.KV_NOTICED, at_ns=5)
        with pytest.raises(TypeError, match="required positional argument: 'mark'"):
            side.traces[0].mark()
        with pytest.raises(TypeError, match="multiple values for argument 'mark'"):
            side.traces[0].mark(Mark.KV_NOTICED, mark=Mark.KV_NOTICED)
    assert sides[0].buffer == sides[1].buffer


# Rings read by both


_BODIES = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(
            st.sampled_from([*map(int, Mark), 240, 241, 242, 243, 250]),
            st.integers(0, 2**16 - 1),
            st.binary(max_size=120),
        ).map(lambda parts: bytes((parts[0], 0)) + parts[1].to_bytes(2, "little") + parts[2]),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(
    bodies=_BODIES,
    damage=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=6),
    unfinished=st.booleans(),
)
def test_both_read_the_same_records(
    bodies: list[bytes], damage: list[tuple[int, int]], unfinished: bool
) -> None:
    """Intact, damaged, half written, of unknown kinds, with bodies that no writer writes."""
    side = Side(BOTH["Python"], Role.DECODE)
    side.begin(1)
    for number, body in enumerate(bodies):
        side.mark(0, Mark.TOKEN_GAP, (number, 0.5, "x" * (number % 9), None, 4), {})
        side.recorder._append(body)
    for offset, byte in damage:
        side.buffer[HEADER_BYTES + offset] = byte
    found: list[Any] = []
    for modules in BOTH.values():
        reader = modules["ring.reader"].RingReader.over(side.buffer)
        records = reader.read(final=not unfinished, losses=True)
        found.append(
            (
                [(type(record).__name__, _plain(record)) for record in records],
                (reader.missed, reader.torn, reader.unknown, _plain(reader.position())),
            )
        )
    assert found[0] == found[1]


def _plain(record: Any) -> str:
    return repr(msgspec.to_builtins(record))  # equal also where values are no numbers


# What both send


@settings(max_examples=100, deadline=None)
@given(
    attributes=st.dictionaries(
        st.one_of(st.sampled_from(["pd.stage", "pd.begin_ns", ""]), st.text(max_size=200)),
        st.one_of(
            ANY_VALUE,
            st.integers(-(2**63), 2**63 - 1),
            st.text(min_size=3000, max_size=5000),
            st.lists(st.text(max_size=5), max_size=3).map(tuple),
            st.lists(ANY_VALUE, max_size=3),
        ),
        max_size=12,
    )
)
def test_both_encode_the_same_attributes(attributes: dict[str, Any]) -> None:
    encoded: list[tuple[int, bytes]] = []
    for modules in BOTH.values():
        encoder = modules["otlp.wire"].Attributes(b"\x4a")
        for _ in range(2):  # a key that comes again takes another way
            parts: list[bytes] = [b"before"]
            encoded.append((encoder.add(parts, attributes), b"".join(parts)))
    assert encoded[0] == encoded[1] == encoded[2] == encoded[3]


def test_attributes_beyond_one_buffer_keep_their_order() -> None:
    attributes: dict[str, Any] = {f"key.{n}": "v" * (n % 250) for n in range(400)}
    attributes["key.50"] = ("one",)
    for modules in BOTH.values():
        encoder = modules["otlp.wire"].Attributes(b"\x4a")
        encoder.add([], attributes)
        parts: list[bytes] = []
        assert encoder.add(parts, attributes) == 0
        found = b"".join(parts)
        places = [found.index(f"\x0a{chr(len(key))}{key}".encode()) for key in attributes]
        assert places == sorted(places)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(ANY_VALUE | st.text(min_size=1500, max_size=2000), min_size=1, max_size=6))
def test_what_marks_say_is_encoded_as_attributes_are(values: list[Any]) -> None:
    """Or left to those, where a value is not plain or another record may have it."""
    encoder = BOTH["C"]["otlp.wire"].Attributes(b"\x4a")
    told = tuple((f"key.{n}", 0, n, ()) for n in range(len(values)))
    encoder.add([], {one[0]: 1 for one in told})
    record = SimpleNamespace(values=tuple(values))
    elsewhere = (*told, ("key.0", 1, 0, ((0, 0),)))
    found = encoder.told([record, SimpleNamespace(values=(None,))], (told, (), elsewhere))
    parts: list[bytes] = []
    said = {one[0]: value for one, value in zip(told, values, strict=True) if value is not None}
    encoder.add(parts, said)
    assert found[0] in (None, b"".join(parts))
    assert found[1:] == [b"", None]
    plain = all(type(value) in (int, float, bool) and abs(value) < 2**63 for value in said.values())
    assert found[0] is not None or not plain


# The pieces alone


@given(data=st.binary(max_size=600), seed=st.integers(0, 2**64 - 1))
def test_checksum_is_that_of_zlib(data: bytes, seed: int) -> None:
    assert native().crc32(data, seed) == crc32(data, seed & 0xFFFF_FFFF)


_GROUP = (("a", 0, 0, ()),)
_WRONG: list[Callable[[Any], object]] = [
    lambda c: c.Cursor(),
    lambda c: c.Cursor(b"read only"),
    lambda c: c.Cursor(memoryview(bytearray(64))[1:33]),
    lambda c: c.Cursor(5),
    lambda c: c.Layout(1, "x", None),
    lambda c: c.Layout(1, "q" * 17, None),
    lambda c: c.Layout(256, "q", None),
    lambda c: c.Layout("1", "q", None),
    lambda c: c.Layout(1, "q", int).__init__(2, "qq", int),
    lambda c: c.Layout.__new__(c.Layout)(),
    lambda c: c.Cursor.__new__(c.Cursor).append(b"body"),
    lambda c: c.Cursor.__new__(c.Cursor).append("text"),
    lambda c: c.Marking().mark(Mark.KV_NOTICED),
    lambda c: c.Marking().mark(Mark.KV_NOTICED, at_ns=5),
    lambda c: delattr(c.Marking(), "ring"),
    lambda c: c.scan("text", 0, 0, [], [], int),
    lambda c: c.scan(b"", 0, 0, (), [], int),
    lambda c: c.scan(_intact(), 0, 0, [], [], int),
    lambda c: c.add_attributes([], [], 1, {}, int),
    lambda c: c.add_attributes([], {"a": 1}, 1, {"a": "no bytes"}, int),
    lambda c: c.add_attributes([], {"a": 1}, 1, {}, int),
    lambda c: c.told_fields([], (5,), 1, {}),
    lambda c: c.told_fields([], ((5,),), 1, {}),
    lambda c: c.told_fields([], (_GROUP,), 1, {}),
    lambda c: c.told_fields([5], (_GROUP,), 1, {}),
    lambda c: c.told_fields([SimpleNamespace(values=[1])], (_GROUP,), 1, {}),
    lambda c: c.told_fields([SimpleNamespace(values=())], (_GROUP,), 1, {}),
    lambda c: c.told_fields([SimpleNamespace(values=(1,))], (_GROUP,), 1, {"a": "no bytes"}),
]


@pytest.mark.parametrize("wrong", _WRONG)
def test_wrong_use_raises_and_does_no_harm(wrong: Callable[[Any], object]) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError, IndexError, BufferError)):
        wrong(native())


@pytest.mark.parametrize(
    "attributes",
    [{"ring": 5}, {"ring": None}, {"key": -1}, {"key": 2**64}, {"key": "1"}, {"_encoders": ()}],
)
def test_what_cannot_be_recorded_is_left_to_python(attributes: Mapping[str, Any]) -> None:
    side = Side(BOTH["C"], Role.DECODE)
    side.begin(1)
    for name, value in attributes.items():
        setattr(side.traces[0], name, value)
    left: list[Any] = []
    side.traces[0]._append = left.append
    side.traces[0].mark(Mark.KV_NOTICED)
    assert len(left) + side.recorder.errors == 1


def _intact() -> bytes:
    body = codec.pack_head(Mark.KV_NOTICED, 0, 1, 7, 5)
    return (len(body) + 8).to_bytes(4, "little") + crc32(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("pos", [-1, -(2**62), 0, 8, 31, 32, 2**62])
def test_scan_stays_within_its_data(pos: int) -> None:
    records: list[Any] = []
    decoders = codec.build_decoders(codec.SCHEMA)
    found = native().scan(_intact(), pos, 0, decoders, records, _record)
    assert found == ((32, 1) if pos == 0 else (pos, 0))
    assert len(records) == (pos == 0)


def _record(*fields: Any) -> tuple[Any, ...]:
    return fields


def test_a_cursor_stays_within_its_buffer_whatever_its_numbers_say() -> None:
    cursor = native().Cursor(bytearray(64))
    for pos, end in ((0, 10**9), (-8, 64), (40, 10**9), (4, 64), (2**62, 2**63 - 1)):
        cursor._owner = threading.get_ident()
        cursor._pos, cursor._end = pos, end
        with pytest.raises(AttributeError, match="_make_room"):  # a subclass has it
            cursor.append(bytes(24 if pos == 4 else 100))


def test_a_ring_cannot_be_unmapped_under_a_cursor(tmp_path: Path) -> None:
    import mmap

    path = tmp_path / "ring"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
        cursor = native().Cursor(mapped)
        with pytest.raises(BufferError):
            mapped.close()
        cursor.let_go()
        cursor.let_go()
        mapped.close()


# Nothing is kept


def _use(side: Side, times: int) -> None:
    trace = side.traces[0]
    for number in range(times):
        trace.mark(Mark.TOKEN_GAP, number + 1000, 0.25, "cause", 0.5, 7, 8, "req-0123")
        trace.mark(Mark.KV_NOTICED)
        trace.mark(Mark.KV_NOTICED, at_ns=5)
        trace.mark(Mark.DECODE_FINISHED, 2**70)  # by way of Python
        trace.mark(Mark.RECEIVED)  # not of this role
        trace.wait("decode.queue", WaitReason.SLOTS, needed=number)


def _read(side: Side) -> None:
    reader = BOTH["C"]["ring.reader"].RingReader.over(side.buffer)
    assert reader.read()


def _encode() -> None:
    encoder = BOTH["C"]["otlp.wire"].Attributes(b"\x4a")
    for number in range(50):
        encoder.add([], {"a": number + 1000, "b": f"text {number}", "c": 0.5, "d": ("one",)})


def test_nothing_leaks() -> None:
    side = Side(BOTH["C"], Role.DECODE)
    side.begin(1)
    shared = (Mark.TOKEN_GAP, "cause", 0.25, side.traces[0].ring, None, True, _read)
    for _ in range(2):  # what is kept once
        _use(side, 300)
        _read(side)
        _encode()
    gc.collect()
    counts = [sys.getrefcount(one) for one in shared]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20):
        _use(side, 300)
        _read(side)
        _encode()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000, f"{grown} bytes more after 36,000 marks: one object each takes 24"
    moved = [now - then for now, then in zip(map(sys.getrefcount, shared), counts, strict=True)]
    assert all(abs(one) < 1_000 for one in moved), moved


def test_a_recorder_and_what_it_refers_to_are_collected() -> None:
    side = Side(BOTH["C"], Role.DECODE)
    side.begin(1)
    _use(side, 3)
    seen = [weakref.ref(side.recorder), weakref.ref(side.clock)]
    layouts = sum(type(one) is native().Layout for one in gc.get_objects())
    del side
    gc.collect()
    assert [one() for one in seen] == [None, None]
    left = sum(type(one) is native().Layout for one in gc.get_objects())
    assert left < layouts
