"""In which stage a slow prefill/decode request stalled, why, and who was in its way.

This module exports what an instrumented program needs: record marks (`Recorder`), carry a request's
identity (`RequestContext`), and read rings back (`RingReader`). The vocabulary is `pdtrace.stages`;
tests use `pdtrace.testing`. Importing it loads neither OpenTelemetry nor anything of a server.
"""

from pdtrace.clock import SYSTEM_CLOCK, Clock, ClockAnchor, SystemClock
from pdtrace.errors import (
    PdtraceError,
    RecordError,
    RingClosedError,
    RingCreateError,
    RingError,
    RingFormatError,
    RingVersionError,
    SourceError,
)
from pdtrace.propagation import RemoteParent, RequestContext, extract, inject
from pdtrace.recorder import Recorder, RequestTrace
from pdtrace.ring import (
    ClockRecord,
    EndRecord,
    MarkRecord,
    OpenRecord,
    Record,
    RingCapacity,
    RingIdentity,
    RingPosition,
    RingReader,
    StepRecord,
    WriterState,
    scan_rings,
)
from pdtrace.stages import Gauge, Kind, Mark, Mode, Outcome, Role, Stage, StepKind, WaitReason

__version__ = "0.1.0"

__all__ = [
    "SYSTEM_CLOCK",
    "Clock",
    "ClockAnchor",
    "ClockRecord",
    "EndRecord",
    "Gauge",
    "Kind",
    "Mark",
    "MarkRecord",
    "Mode",
    "OpenRecord",
    "Outcome",
    "PdtraceError",
    "Record",
    "RecordError",
    "Recorder",
    "RemoteParent",
    "RequestContext",
    "RequestTrace",
    "RingCapacity",
    "RingClosedError",
    "RingCreateError",
    "RingError",
    "RingFormatError",
    "RingIdentity",
    "RingPosition",
    "RingReader",
    "RingVersionError",
    "Role",
    "SourceError",
    "Stage",
    "StepKind",
    "StepRecord",
    "SystemClock",
    "WaitReason",
    "WriterState",
    "__version__",
    "extract",
    "inject",
    "scan_rings",
]
