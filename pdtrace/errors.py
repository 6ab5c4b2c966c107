"""The exception tree of `pdtrace`. Each class has a stable `code`, used as `error.type`.

    PdtraceError                pdtrace_error
    ├── RingError               ring_error          a ring file
    │   ├── RingCreateError     ring_create_failed  cannot be created (disk, permissions, size)
    │   ├── RingFormatError     ring_format         is not a ring, or its header is damaged
    │   ├── RingVersionError    ring_version        was written in another format version
    │   └── RingClosedError     ring_closed         is used after close()
    ├── RecordError             bad_record          a mark, value or call that cannot be recorded
    ├── SourceError             source_error        traces that cannot be read for analysis
    ├── LiveError               live_error          what is in flight cannot be known
    ├── SloError                bad_slo             objectives that cannot be used
    └── ShippedError            shipped_error       files of pdtrace: absent, or in the way

Recording calls (`RequestTrace.mark` and friends) raise none of these while serving: the recorder's
guard counts them. `Recorder.open` and the readers raise.
"""

from __future__ import annotations

from typing import ClassVar


class PdtraceError(Exception):
    """Base of every error that pdtrace raises on purpose."""

    code: ClassVar[str] = "pdtrace_error"


class RingError(PdtraceError):
    """A ring file cannot be created, opened or used."""

    code: ClassVar[str] = "ring_error"


class RingCreateError(RingError):
    """The ring file cannot be created; the message says what to do."""

    code: ClassVar[str] = "ring_create_failed"


class RingFormatError(RingError):
    """The file is no ring, is cut short, or its header is damaged."""

    code: ClassVar[str] = "ring_format"


class RingVersionError(RingError):
    """The ring was written in a format version that this pdtrace does not read."""

    code: ClassVar[str] = "ring_version"


class RingClosedError(RingError):
    """The ring was closed, or belongs to the parent of a forked process."""

    code: ClassVar[str] = "ring_closed"


class RecordError(PdtraceError):
    """A mark, value or call that the recorder cannot record: a bug of the instrumented program."""

    code: ClassVar[str] = "bad_record"


class SourceError(PdtraceError):
    """Traces to analyse cannot be read; the message names the file, line and reason."""

    code: ClassVar[str] = "source_error"


class LiveError(PdtraceError):
    """There are no rings to look at, or an agent does not answer; the message says which."""

    code: ClassVar[str] = "live_error"
