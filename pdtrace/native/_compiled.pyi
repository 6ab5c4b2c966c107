"""What is in C. See the Python that each stands in for."""

from collections.abc import Callable
from typing import Any

from pdtrace.ring.cursor import PlainCursor
from pdtrace.ring.records import MarkRecord, Record
from pdtrace.stages import Mark

Cursor = PlainCursor

class Marking:
    """`pdtrace.marking.PlainMarking`, which its subclass names `_mark_slowly`."""

class Layout:
    """Values of one mark as bytes. Called, it calls `checked`."""

    def __init__(self, mark: Mark, types: str, checked: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any) -> Any: ...

def scan(
    data: bytes,
    pos: int,
    number: int,
    decoders: list[Any],
    records: list[Record],
    made: type[MarkRecord],
    /,
) -> tuple[int, int]:
    """Appends the records from byte `pos` on, the first of which has that number, up to one that is
    not intact or cannot be decoded; where that is, and its number."""

def add_attributes(
    parts: list[bytes],
    attributes: dict[str, Any],
    tag: int,
    keys: dict[str, bytes],
    pair: Callable[[str, Any], bytes | None],
    /,
) -> int:
    """`pdtrace.otlp.wire.Attributes.add`; `pair` makes what is not plain text or a number, or has a
    key that is not among `keys`."""

def told_fields(
    records: list[MarkRecord],
    told: tuple[tuple[Any, ...], ...],
    tag: int,
    keys: dict[str, bytes],
    /,
) -> list[bytes | None]:
    """`pdtrace.otlp.wire.Attributes.told`."""

def crc32(data: bytes, seed: int = 0, /) -> int: ...
