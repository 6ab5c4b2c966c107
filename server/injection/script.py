"""Faults as text: a JSON list, or one fault alone.

Owns the syntax and errors that say where; what a fault is stands in `server.injection.fault`.

    [
      {"kind": "drop", "at": "decode", "message": "CopyDone", "nth": 2},
      {"kind": "pause", "at": "prefill-0", "ms": 2000, "after_ms": 5000}
    ]
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec

from server.errors import StartError
from server.faults import FAULT_STAGES
from server.injection.fault import Delay, Drop, Fault, Freeze, Raise, Reorder, Repeat
from server.wire.messages import AnyMessage, FaultReport, InjectFaults

MESSAGE_NAMES = frozenset(
    kind.__name__ for kind in get_args(AnyMessage) if kind not in (InjectFaults, FaultReport)
)
"""Messages that can be hit: all but those that speak of faults."""

KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(Fault))

_BYTE = re.compile(r" \(byte (\d+)\)$")
_PATH = re.compile(r" - at `\$(.*)`$")


def read_faults(path: Path) -> tuple[Fault, ...]:
    """The faults in a file. Raises StartError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise StartError(f"faults in {path} cannot be read: {reason}") from error
    return parse_faults(text, source=str(path))


def parse_faults(text: str, *, source: str) -> tuple[Fault, ...]:
    """The faults in `text`. Raises StartError, which names `source` and the place in it."""
    try:
        items = msgspec.json.decode(text.encode())
    except msgspec.DecodeError as error:
        raise StartError(f"{source}{_where(text, str(error))}") from error
    except RecursionError as error:
        raise StartError(f"{source}: nested too deeply") from error
    if isinstance(items, dict):
        items = [items]
    if not isinstance(items, list):
        raise StartError(f"{source}: expected a list of faults, got {_kind(items)}")
    faults: list[Fault] = []
    for number, item in enumerate(items, 1):  # pyright: ignore[reportUnknownArgumentType]  any JSON
        where = f"{source}: fault {number}"
        _check_kind(item, where)
        try:
            fault = msgspec.convert(item, Fault)
        except msgspec.ValidationError as error:
            raise StartError(f"{where}{_field(str(error))}") from error
        _check_message(fault, where)
        _check_stage(fault, where)
        faults.append(fault)
    return tuple(faults)


def _check_kind(item: Any, where: str) -> None:
    if isinstance(item, dict) and "kind" in item and item["kind"] not in KINDS:
        raise StartError(
            f"{where}.kind: {item['kind']!r} is no fault, expected one of {', '.join(KINDS)}"
        )


def _check_message(fault: Fault, where: str) -> None:
    if not isinstance(fault, (Drop, Delay, Repeat, Reorder, Raise)):
        return
    if isinstance(fault, Raise) and not fault.message:
        return
    if fault.message not in MESSAGE_NAMES:
        raise StartError(
            f"{where}.message: {fault.message!r} is no message, expected one of "
            f"{', '.join(sorted(MESSAGE_NAMES))}"
        )


def _check_stage(fault: Fault, where: str) -> None:
    if isinstance(fault, Freeze) and fault.stage not in FAULT_STAGES:
        raise StartError(
            f"{where}.stage: {fault.stage!r} cannot be held, expected one of "
            f"{', '.join(sorted(FAULT_STAGES))}"
        )


def _where(text: str, message: str) -> str:
    """`message` of a JSON error, with line and column in front in place of its byte offset."""
    found = _BYTE.search(message)
    if found is None:
        return f": {message}"
    before = text.encode()[: int(found[1])].decode(errors="replace")
    line = before.count("\n") + 1
    column = len(before) - (before.rfind("\n") + 1) + 1
    return f", line {line}, column {column}: {message[: found.start()]}"


def _field(message: str) -> str:
    """`message` of a wrong field, with the field's name in front."""
    found = _PATH.search(message)
    if found is None:
        return f": {message}"
    return f"{found[1]}: {message[: found.start()]}"


def _kind(value: Any) -> str:
    return {str: "text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
