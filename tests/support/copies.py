"""Changed copies of what the tests are about, whatever kind of record it is."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import msgspec

_Record = TypeVar("_Record")


def replace(record: _Record, **changes: Any) -> _Record:
    """A copy with other fields; of a dataclass or a struct."""
    if isinstance(record, msgspec.Struct):
        return cast("_Record", msgspec.structs.replace(record, **changes))
    return cast("_Record", dataclasses.replace(cast("Any", record), **changes))
