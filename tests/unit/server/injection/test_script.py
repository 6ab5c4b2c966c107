"""Faults as text: what they mean, and errors that say where."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from server.config import Settings
from server.errors import StartError
from server.injection.fault import (
    Corrupt,
    Damage,
    Delay,
    Direction,
    Drop,
    Fault,
    Freeze,
    Pause,
    Place,
    Raise,
    Reorder,
    Repeat,
    ShiftClock,
    Shrink,
    name_of,
)
from server.injection.script import parse_faults, read_faults
from tests.support.server import ROOT

EVERY_KIND: tuple[Fault, ...] = (
    Drop(at="decode", message="CopyDone", nth=2, count=None),
    Delay(message="Handoff", ms=300, direction=Direction.SENT),
    Repeat(message="Tokens"),
    Reorder(at="prefill-0", message="PagesReserved", ms=20),
    Raise(place=Place.MESSAGE, message="Abort", count=3),
    Freeze(at="decode-0", stage="decode.queue", ms=40, nth=2, count=None, request="slow-"),
    Corrupt(at="transfer", copy=Damage.ALTERED, nth=3),
    Pause(ms=2000, after_ms=100),
    ShiftClock(at="decode", seconds=-2.5),
    Shrink(at="prefill", pages=500, after_ms=100),
)


def parse(text: str) -> tuple[Fault, ...]:
    return parse_faults(text, source="f.json")


def test_a_list_of_every_kind_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_bytes(msgspec.json.encode(EVERY_KIND))
    assert read_faults(path) == EVERY_KIND


def test_one_fault_alone_and_none_at_all_are_fine() -> None:
    assert parse('{"kind": "drop", "message": "Handoff"}') == (Drop(message="Handoff"),)
    assert parse("[]") == ()


def test_names_say_what_is_hit() -> None:
    assert [name_of(fault) for fault in EVERY_KIND] == [
        "drop.CopyDone",
        "delay.Handoff",
        "repeat.Tokens",
        "reorder.PagesReserved",
        "raise.message",
        "freeze.decode.queue",
        "corrupt.altered",
        "pause",
        "clock",
        "shrink",
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", r"f.json: Input data was truncated"),
        ('[\n  {"kind": "drop",,}\n]', r"f.json, line 2, column 19: JSON is malformed"),
        ('["é", }', r"f.json, line 1, column 7: JSON is malformed"),
        ("3", r"f.json: expected a list of faults, got a number"),
        ("null", r"f.json: expected a list of faults, got null"),
        ("[" * 100_000, r"f.json: nested too deeply"),
        ("[3]", r"f.json: fault 1: Expected `object`, got `int`"),
        ('[{"message": "Handoff"}]', r"f.json: fault 1: Object missing required field `kind`"),
        (
            '[{"kind": "explode"}]',
            r"f.json: fault 1.kind: 'explode' is no fault, expected one of .*pause",
        ),
        ('[{"kind": []}]', r"f.json: fault 1.kind: \[\] is no fault"),
        ('[{"kind": "pause", "ms": 1}, {"kind": "pause"}]', r"fault 2: .* required field `ms`"),
        ('[{"kind": "pause", "ms": -1}]', r"fault 1.ms: Expected `int` >= 0"),
        ('[{"kind": "pause", "ms": 1e99}]', r"fault 1.ms: Expected `int`"),
        ('[{"kind": "drop", "message": "Handoff", "nth": 0}]', r"fault 1.nth: Expected `int` >= 1"),
        ('[{"kind": "drop", "message": "Handoff", "count": 0}]', r"fault 1.count: Expected `int`"),
        (
            '[{"kind": "drop", "message": "Handof"}]',
            r"fault 1.message: 'Handof' is no message, exp",
        ),
        ('[{"kind": "drop", "message": "InjectFaults"}]', r"fault 1.message: 'InjectFaults' is no"),
        ('[{"kind": "drop", "mesage": "Handoff"}]', r"fault 1: Object contains unknown field"),
        (
            '[{"kind": "freeze", "stage": "decode.nap", "ms": 1}]',
            r"fault 1.stage: 'decode.nap' cannot be held, expected one of decode.first",
        ),
        ('[{"kind": "clock", "seconds": 1e7}]', r"fault 1.seconds: Expected `float` <= 1000000"),
        ('[{"kind": "shrink", "pages": 0}]', r"fault 1.pages: Expected `int` >= 1"),
        ('[{"kind": "corrupt", "copy": "blue"}]', r"fault 1.copy: Invalid enum value 'blue'"),
        ('[{"kind": "raise", "place": "nowhere"}]', r"fault 1.place: Invalid enum value 'nowhere'"),
        (
            '[{"kind": "drop", "message": "Handoff", "direction": "up"}]',
            r"fault 1.direction: Invalid enum value 'up'",
        ),
    ],
)
def test_an_error_says_where_it_is(text: str, error: str) -> None:
    with pytest.raises(StartError, match=error):
        parse(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"none.json cannot be read: No such file"):
        read_faults(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(StartError, match=r"binary cannot be read: it is no UTF-8"):
        read_faults(tmp_path / "binary")


@pytest.mark.parametrize("at", ["", "gateway", "gateway-0", "prefill-1", "decode", "transfer-0"])
def test_settings_take_faults_of_processes_that_there_are(at: str) -> None:
    faults = (Pause(at=at, ms=1),)
    assert Settings(allow_faults=True, prefill=2, faults=faults).faults == faults


@pytest.mark.parametrize("at", ["agent", "prefill-1", "worker", "decode-"])
def test_settings_refuse_faults_of_other_processes(at: str) -> None:
    with pytest.raises(StartError, match=rf"fault 2 \(pause\): at is '{at}', expected one of dec"):
        Settings(allow_faults=True, faults=(Drop(message="Abort"), Pause(at=at, ms=1)))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (ShiftClock(at="gateway", seconds=1), "decode, decode-0, prefill, prefill-0, transfer, tr"),
        (Shrink(at="transfer-0", pages=1), "decode, decode-0, prefill, prefill-0$"),
        (Corrupt(at="decode", copy=Damage.SHORT), "transfer, transfer-0$"),
    ],
)
def test_settings_refuse_faults_of_processes_that_cannot_have_them(
    fault: Fault, expected: str
) -> None:
    with pytest.raises(StartError, match=rf"at is '{fault.at}', expected one of {expected}"):
        Settings(allow_faults=True, faults=(fault,))


def test_settings_refuse_faults_that_nobody_can_have() -> None:
    faults = (Pause(ms=1), Corrupt(copy=Damage.SHORT))
    with pytest.raises(StartError, match=r"fault 2 \(corrupt\): no process here can have it"):
        Settings(allow_faults=True, mode="colocated", faults=faults)


def test_the_example_is_a_file_for_a_server_as_it_comes() -> None:
    faults = read_faults(ROOT / "examples" / "02_faults.json")
    assert Settings(allow_faults=True, faults=faults).faults == faults
    assert len({type(fault) for fault in faults}) == len(EVERY_KIND)


def test_settings_refuse_faults_unless_they_are_allowed() -> None:
    with pytest.raises(StartError, match="--allow-faults"):
        Settings(faults=(Pause(ms=1),))
