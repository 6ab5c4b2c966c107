"""The ring file: one process appends records to it, any number of readers follow.

`layout` describes the bytes, `codec` the record bodies, `identity` who writes; `writer` and
`reader` do the work, `files` makes and finds rings on disk. Instrumented programs use
`pdtrace.recorder`.
"""

from pdtrace.ring.files import create_ring, scan_rings
from pdtrace.ring.layout import FORMAT_VERSION, Counter, RingCapacity, RingIdentity
from pdtrace.ring.reader import RingPosition, RingReader, WriterState
from pdtrace.ring.records import (
    ClockRecord,
    EndRecord,
    MarkRecord,
    OpenRecord,
    Record,
    StepRecord,
    Value,
)
from pdtrace.ring.writer import RingWriter

__all__ = [
    "FORMAT_VERSION",
    "ClockRecord",
    "Counter",
    "EndRecord",
    "MarkRecord",
    "OpenRecord",
    "Record",
    "RingCapacity",
    "RingIdentity",
    "RingPosition",
    "RingReader",
    "RingWriter",
    "StepRecord",
    "Value",
    "WriterState",
    "create_ring",
    "scan_rings",
]
