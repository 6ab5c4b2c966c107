"""Where traces to analyse come from: a run directory, a file, a folder, standard input, a Jaeger.

Owns opening, sniffing (content decides, never the name), decompression, counting what could not be
read. Joining spans into traces is `pdtrace.analysis.trace_store`'s, one OTLP object
`pdtrace.otlp.json_lines`'s; the odd forms of other writers are `pdtrace.otlp.foreign`'s, asking a
Jaeger is `pdtrace.analysis.jaeger`'s.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol, cast

import msgspec

from pdtrace.analysis.jaeger import FoundTraces, read_jaeger
from pdtrace.analysis.time_range import TraceQuery
from pdtrace.analysis.trace_store import MAX_HELD_SPANS, TraceStore
from pdtrace.errors import SourceError
from pdtrace.otlp import json_lines
from pdtrace.otlp.foreign import ForeignSpans, NotTraces, decode_foreign
from pdtrace.otlp.jaeger_json import mended
from pdtrace.patience import Progress, no_progress
from pdtrace.ring import scan_rings
from pdtrace.ring.losses import STATE_NAME
from pdtrace.spans import Span, Trace
from pdtrace.web_answers import without_credentials

NO_QUERY = TraceQuery()
DEFAULT_RUN = "run"
RUN_VARIABLE = "PDTRACE_RUN"
TRACES_FOLDER = "traces"
RINGS_FOLDER = "rings"
LATEST_RUN = "latest"
"""Link to the newest of the run directories in a folder, kept by the server's launcher."""
_BESIDE_TRACES = frozenset({STATE_NAME, "agent.json", "server.json", "export-cursors.json"})
"""Files of a run directory that are no traces."""

SUPPORTED = (
    "a run directory, OTLP JSON lines or a Jaeger's JSON (file or folder, plain or gzip), the "
    "http://HOST:PORT of a Jaeger or of an agent, or - for stdin"
)

MAX_LINE_BYTES = 256 * 1024 * 1024
"""A longer line, or a document of several lines, is refused rather than held in memory."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_MAGICS = (
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd: decompress it first (zstd -d)"),
    (b"\x04\x22\x4d\x18", "is compressed with lz4: decompress it first"),
    (b"BZh", "is compressed with bzip2: decompress it first"),
    (b"\xfd7zXZ\x00", "is compressed with xz: decompress it first"),
    (b"PK\x03\x04", "is a zip archive: unpack it first"),
    (b"\xff\xfe", "is UTF-16 text: convert it to UTF-8 first"),
    (b"\xfe\xff", "is UTF-16 text: convert it to UTF-8 first"),
)
_MAX_BAD_LINES = 100
_MAX_WARNINGS = 3
_CHUNK_BYTES = 256 * 1024
_TELL_EVERY = 100


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that could not be used; `line` counts from 1."""

    file: str
    line: int
    reason: str


@dataclass(slots=True, kw_only=True)
class Problems:
    """What a recording lost on the way in.

    bad_lines        the first hundred; `bad_line_count` counts all
    cut_files        files whose end is missing: a cut last line, a cut gzip stream
    bad_spans        spans without usable ids or times, left out of their lines
    duplicates       spans read again, counted once
    conflicts        span ids that came with two contents; the longer span counts
    other_signals    lines of metrics or logs, passed over
    skipped_files    files of a folder that hold no JSON
    unread           sentences on what a store holds beyond what was asked for
    warnings         what a Jaeger says of spans and traces, with how often
    """

    bad_lines: list[BadLine] = field(default_factory=list[BadLine])
    bad_line_count: int = 0
    cut_files: list[str] = field(default_factory=list[str])
    bad_spans: int = 0
    duplicates: int = 0
    conflicts: int = 0
    other_signals: int = 0
    skipped_files: list[str] = field(default_factory=list[str])
    unread: list[str] = field(default_factory=list[str])
    warnings: Counter[str] = field(default_factory=Counter[str])

    def __bool__(self) -> bool:
        return any(
            (
                self.bad_line_count,
                self.cut_files,
                self.bad_spans,
                self.duplicates,
                self.conflicts,
                self.other_signals,
                self.skipped_files,
                self.unread,
                self.warnings,
            )
        )

    @property
    def lossy(self) -> bool:
        """Whether something that may have held spans was not used."""
        return bool(self.bad_line_count or self.cut_files or self.bad_spans or self.conflicts)

    def sentences(self) -> list[str]:
        """One sentence per kind of problem."""
        found: list[str] = []
        if self.bad_line_count:
            first = self.bad_lines[0]
            found.append(
                f"{_many(self.bad_line_count, 'line')} could not be read; "
                f"the first: {first.file}:{first.line}: {first.reason}."
            )
        found += [f"The end of {name} is missing." for name in self.cut_files]
        if self.bad_spans:
            found.append(f"{_many(self.bad_spans, 'span')} without usable ids or times left out.")
        if self.duplicates:
            found.append(f"{_many(self.duplicates, 'span')} came more than once, counted once.")
        if self.conflicts:
            found.append(f"{_many(self.conflicts, 'span id')} came with different contents.")
        if self.other_signals:
            found.append(f"{_many(self.other_signals, 'line')} of metrics or logs passed over.")
        if self.skipped_files:
            found.append(f"{_many(len(self.skipped_files), 'file')} without JSON skipped.")
        told = self.warnings.most_common(_MAX_WARNINGS)
        found += [
            f"Jaeger warns{f' {count} times' if count > 1 else ''}: {warning.rstrip('.')}."
            for warning, count in told
        ]
        if len(self.warnings) > len(told):
            found.append(f"Jaeger has {len(self.warnings) - len(told)} further warnings.")
        return [*found, *self.unread]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Traces of one source, by begin. `lines` counts the non-blank ones.

    traces       many of them lie in a file: each is made anew whenever it is asked for
    from_jaeger  what of it a Jaeger answered, now or when a file was saved: that may be a choice
    """

    source: str
    traces: Sequence[Trace]
    files: int
    lines: int
    spans: int
    problems: Problems
    from_jaeger: tuple[str, ...] = ()


def default_source(environ: Mapping[str, str] = os.environ) -> str:
    """`$PDTRACE_RUN`, else `run` in the working directory: the newest run in it."""
    return environ.get(RUN_VARIABLE) or DEFAULT_RUN


def resolve_run(path: Path) -> Path:
    """A folder of runs means the newest of them: its `latest`, else the one written to last. Any
    other path means itself, and so does a folder with a recording of its own; an agent that found
    nothing to write leaves none."""
    if not path.is_dir() or _holds_recording(path):
        return path
    if (path / LATEST_RUN).is_dir():
        return path / LATEST_RUN
    try:
        children = [child for child in path.iterdir() if not child.name.startswith(".")]
        if any(_is_traces_file(child) for child in children):
            return path
        runs = [child for child in children if _is_run(child)]
    except OSError:
        return path  # who opens it says why
    with_something = [run for run in runs if _holds_recording(run)]
    return max(with_something or runs, key=_written_ns, default=path)


def shown_run(source: str | Path) -> str:
    """The name to show for a source: of a folder of runs, the run that it means now, and that by
    its own name rather than `latest`."""
    if str(source) == "-" or "://" in str(source):
        return without_credentials(str(source))
    path = Path(source)
    run = resolve_run(path)
    if run == path:
        return str(source)
    try:
        real = run.resolve()
        return str(path / real.name if real.parent == path.resolve() else run)
    except (OSError, RuntimeError):
        return str(run)


def _is_run(path: Path) -> bool:
    return any((path / name).is_dir() for name in (TRACES_FOLDER, RINGS_FOLDER))


def _holds_recording(path: Path) -> bool:
    """Whether a folder has rings, or traces that are not empty."""
    try:
        if scan_rings(path / RINGS_FOLDER) or scan_rings(path):
            return True
        return any(
            not file.name.startswith(".") and file.is_file() and file.stat().st_size
            for file in (path / TRACES_FOLDER).iterdir()
        )
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # who opens it says why


def _is_traces_file(path: Path) -> bool:
    return path.is_file() and path.name not in _BESIDE_TRACES and _may_hold_json(path)


def _written_ns(run: Path) -> tuple[int, str]:
    """When something was last begun in a run directory; its name where that is the same."""
    times = [
        (run / name).stat().st_mtime_ns
        for name in (TRACES_FOLDER, RINGS_FOLDER)
        if (run / name).is_dir()
    ]
    return max(times, default=0), run.name


def read_source(source: str | Path | None = None, *, stdin: IO[bytes] | None = None) -> Recording:
    """Read every trace of a source; None means `default_source()`, `-` standard input.

    Broken lines are counted, not raised. Raises SourceError if there is nothing to read: no such
    file, an unsupported form, or not one usable line.
    """
    return read_sources([default_source() if source is None else source], stdin=stdin)


def read_sources(
    sources: Sequence[str | Path],
    *,
    stdin: IO[bytes] | None = None,
    progress: Progress = no_progress,
    query: TraceQuery = NO_QUERY,
    max_held: int = MAX_HELD_SPANS,
) -> Recording:
    """Read several sources as one, such as the run directories of several hosts: spans of one trace
    come together whatever source they are in. `query` is what a Jaeger is asked for; the others are
    read whole. `max_held` spans stay in memory at most. Raises SourceError as `read_source`, for
    each, and StoreError where more spans than that cannot be put into a temporary file."""
    reader = _Reader(progress, max_held)
    names: list[str] = []
    for source in sources:
        name = str(source)
        if name == "-":
            name = "standard input"
            reader.read(name, stdin or sys.stdin.buffer)
        elif "://" in name:
            name = without_credentials(name)
            progress(f"asking {name}", None)
            reader.take(name, read_jaeger(str(source), query), query)
        else:
            for path in reader.expecting(_files(Path(name), reader.problems)):
                try:
                    with path.open("rb") as file:
                        reader.read(str(path), file)
                except OSError as error:
                    raise SourceError(f"{path}: {error.strerror or error}") from error
            name = shown_run(source)
        names.append(name)
    return reader.recording(" + ".join(names))


def rings_folder(run: Path) -> Path:
    """Where the rings of a run directory are; a folder that holds rings itself is its own."""
    inner = run / RINGS_FOLDER
    return inner if inner.is_dir() else run


def run_directories(sources: Iterable[str | Path]) -> list[Path]:
    """The run directories among sources: folders that rings or an agent's state stand in, or that
    hold rings themselves."""
    found: list[Path] = []
    for source in sources:
        if str(source) == "-" or "://" in str(source):
            continue
        run = resolve_run(Path(source))
        is_run = (run / RINGS_FOLDER).is_dir() or (run / STATE_NAME).is_file()
        if is_run or scan_rings(run):
            found.append(run)
    return found


def empty_recording(sources: Iterable[str | Path]) -> Recording:
    """Sources that hold no trace yet."""
    name = " + ".join(shown_run(source) for source in sources)
    return Recording(source=name, traces=(), files=0, lines=0, spans=0, problems=Problems())


def _files(path: Path, problems: Problems) -> list[Path]:
    """The files to read behind a path."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        hint = f"; give {SUPPORTED}" if isinstance(error, FileNotFoundError) else ""
        raise SourceError(f"{path}: {error.strerror or error}{hint}") from error
    if not stat.S_ISDIR(mode):
        return [path]
    path = resolve_run(path)
    traces = path / TRACES_FOLDER
    folder = traces if traces.is_dir() else path
    try:
        entries = sorted(folder.iterdir())
        candidates = [p for p in entries if p.is_file() and not p.name.startswith(".")]
        found = [p for p in candidates if _may_hold_json(p)]
    except OSError as error:
        raise SourceError(f"{folder}: {error.strerror or error}") from error
    problems.skipped_files += [str(p) for p in candidates if p not in set(found)]
    if not found:
        if folder is traces:
            what = "no trace was recorded yet"
        elif rings := _rings_of(folder):
            what = f"holds rings, no traces: run `pdtrace agent --rings {rings} --out DIR` first"
        else:
            what = f"no trace file; give {SUPPORTED}"
        raise SourceError(f"{folder}: {what}")
    return found


def _rings_of(folder: Path) -> Path | None:
    """The directory of rings that a folder is, or has; None if there is none."""
    return next((d for d in (folder, folder / RINGS_FOLDER) if scan_rings(d)), None)


def _may_hold_json(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(_GZIP):
        return True
    return head.removeprefix(_BOM).lstrip()[:1] in {b"{", b"["}


class _Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...


class _Gunzipped(io.RawIOBase):
    """What a gzip stream holds, to the byte at which it is cut or damaged; `damage` says so then.
    `gzip.GzipFile` gives nothing of a line whose end is missing, which may be the whole file."""

    def __init__(self, packed: IO[bytes]) -> None:
        super().__init__()
        self.damage: str | None = None
        self._packed = packed
        self._unpack = _member()
        self._rest = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ended:
            packed = self._rest or self._packed.read(_CHUNK_BYTES)
            if self._unpack.eof:  # another stream may follow, or bytes that fill a block
                packed = packed.lstrip(b"\0")
                if packed:
                    self._unpack = _member()
            if not packed:
                if not self._unpack.eof:
                    self.damage = "it ends before its end"
                break
            try:
                found = self._unpack.decompress(packed, len(buffer))
            except zlib.error as error:
                self.damage = str(error)
                break
            self._rest = self._unpack.unconsumed_tail or self._unpack.unused_data
            if found:
                buffer[: len(found)] = found
                return len(found)
        self._ended = True
        return 0


def _member():
    return zlib.decompressobj(zlib.MAX_WBITS | 16)  # with the head and sum of a gzip stream


class _Reader:
    """Reads files one after another and keeps what they hold."""

    def __init__(self, progress: Progress, max_held: int) -> None:
        self._progress = progress
        self._store = TraceStore(max_held)
        self._expected_bytes = 0
        self._done_bytes = 0
        self.problems = Problems()
        self.files = 0
        self.lines = 0
        self.usable = 0
        self.hint: str | None = None
        self.from_jaeger: list[str] = []

    def expecting(self, paths: Sequence[Path]) -> Iterator[Path]:
        """The same files, so that it is known how far through them the reader is."""
        sizes = [_size_of(path) for path in paths]
        self._expected_bytes += sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            yield path
            self._done_bytes += size

    def _tell(self, file: IO[bytes]) -> None:
        """Says how far it is. `file`: the one that is read, as opened."""
        share = None
        if self._expected_bytes and file.seekable():
            share = (self._done_bytes + file.tell()) / self._expected_bytes
        self._progress("reading traces", share)

    def recording(self, source: str) -> Recording:
        if self.usable == 0:
            if self.hint:
                raise SourceError(f"{source}: {self.hint}")
            if self.problems.bad_lines:
                first = self.problems.bad_lines[0]
                raise SourceError(f"{first.file}:{first.line}: {first.reason}; give {SUPPORTED}")
            if self.problems.other_signals:
                raise SourceError(f"{source}: holds metrics or logs, no traces")
            raise SourceError(f"{source}: is empty")
        self._progress(f"joining {len(self._store)} spans", None)
        joined = self._store.joined()
        self.problems.duplicates += joined.duplicates
        self.problems.conflicts += joined.conflicts
        return Recording(
            source=source,
            traces=joined.traces,
            files=self.files,
            lines=self.lines,
            spans=joined.spans,
            problems=self.problems,
            from_jaeger=tuple(dict.fromkeys(self.from_jaeger)),
        )

    def take(self, name: str, found: FoundTraces, query: TraceQuery) -> None:
        """What a Jaeger gave; a trace counts as a line."""
        self.from_jaeger.append(name)
        self.lines += len(found.traces)
        self.usable += len(found.traces)
        self.problems.bad_spans += found.bad_spans
        if found.cut:
            self.problems.unread.append(
                f"{name} was asked for its latest {query.limit} traces of that time; earlier ones "
                "were not looked at (--limit, --since, --until)."
            )
        for spans in found.traces.values():
            self._store.add(map(_rooted, spans))

    def read(self, name: str, file: IO[bytes]) -> None:
        self.files += 1
        stream = io.BufferedReader(cast("io.RawIOBase", file))
        try:
            head = stream.peek(6)
            for magic, what in _MAGICS:
                if head.startswith(magic):
                    self.hint = self.hint or what
                    self._bad(name, 1, what)
                    return
            gunzipped = _Gunzipped(stream) if head.startswith(_GZIP) else None
            lines = stream if gunzipped is None else io.BufferedReader(gunzipped)
            self._read_lines(name, lines, lambda: self._tell(file))
            if gunzipped is not None and gunzipped.damage is not None:
                if name not in self.problems.cut_files:
                    self.problems.cut_files.append(name)
                self.hint = self.hint or f"the gzip stream is damaged: {gunzipped.damage}"
        finally:
            stream.detach()  # the caller closes its file

    def _read_lines(self, name: str, stream: _Lines, tell: Callable[[], None]) -> None:
        lines = self._numbered(name, stream, tell)
        for number, line in lines:
            if _opens_document(line):
                self._read_document(name, number, line, lines)
                return
            self._read_line(name, number, line)
            break
        for number, line in lines:
            self._read_line(name, number, line)

    def _numbered(
        self, name: str, stream: _Lines, tell: Callable[[], None]
    ) -> Iterator[tuple[int, bytes]]:
        """Non-blank lines with their numbers, newline included where there is one."""
        number = 0
        while True:
            number += 1
            if number % _TELL_EVERY == 0:
                tell()
            line = stream.readline(MAX_LINE_BYTES)
            if not line:
                return
            if number == 1:
                line = line.removeprefix(_BOM)
            if len(line) >= MAX_LINE_BYTES and not line.endswith(b"\n"):
                self._bad(name, number, f"longer than {MAX_LINE_BYTES} bytes")
                while line and not line.endswith(b"\n"):
                    line = stream.readline(MAX_LINE_BYTES)
                continue
            if line.strip():
                self.lines += 1
                yield number, line

    def _read_document(
        self, name: str, number: int, first: bytes, lines: Iterator[tuple[int, bytes]]
    ) -> None:
        """Read one document written over several lines; if it is none, read it line by line."""
        held = [(number, first)]
        size = len(first)
        for following in lines:
            held.append(following)
            size += len(following[1])
            if size > MAX_LINE_BYTES:
                break
        text = b"".join(line for _, line in held)
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            is_one = len(held) == 1 or not _is_json(held[1][1])
            if is_one and self._take_mended(name, text):
                return
            for at, line in chain(held, lines):
                self._read_line(name, at, line)
        else:
            self.lines -= len(held) - 1
            self._read_line(name, number, text)

    def _read_line(self, name: str, number: int, line: bytes) -> None:
        try:
            spans = json_lines.decode_line(line)
        except (ValueError, RecursionError):
            spans = []
        # No spans may mean another writer's words for them.
        if not spans:
            try:
                foreign = decode_foreign(msgspec.json.decode(line))
            except msgspec.DecodeError as error:
                if not self._take_mended(name, line):
                    self._bad_json(name, number, line, str(error))
                return
            except RecursionError:
                self._bad(name, number, "not OTLP: nested too deeply")
                return
            except NotTraces as other:
                if other.other_signal:
                    self.problems.other_signals += 1
                else:
                    self.hint = self.hint or other.hint
                    self._bad(name, number, str(other))
                return
            self._take_foreign(name, number, foreign)
            return
        self.usable += 1
        self._store.add(map(_rooted, spans))

    def _take_foreign(self, name: str, number: int, foreign: ForeignSpans) -> None:
        spans = foreign.spans
        self.problems.bad_spans += foreign.bad_spans
        self.problems.warnings += foreign.warnings
        if foreign.errors:
            why = "; ".join(foreign.errors)
            self._bad(name, number, f"Jaeger could not answer whole: {why}")
            if not spans:
                return
        if foreign.bad_spans and not spans:
            self._bad(name, number, "no span has usable ids and times")
            return
        if foreign.from_jaeger:
            self.from_jaeger.append(name)
        self.usable += 1
        self._store.add(map(_rooted, spans))

    def _take_mended(self, name: str, line: bytes) -> bool:
        """The whole spans of a Jaeger's document whose end is missing, if there are some."""
        text = mended(line)
        try:
            foreign = decode_foreign(msgspec.json.decode(text or b""))
        except (msgspec.DecodeError, RecursionError, NotTraces):
            return False
        if not foreign.spans:
            return False
        self.problems.cut_files.append(name)
        self._take_foreign(name, 1, foreign)
        return True

    def _bad_json(self, name: str, number: int, line: bytes, reason: str) -> None:
        if not line.endswith(b"\n") and b"truncated" in reason.encode():
            self.problems.cut_files.append(name)
        self._bad(name, number, f"not JSON: {reason}")

    def _bad(self, name: str, number: int, reason: str) -> None:
        self.problems.bad_line_count += 1
        if len(self.problems.bad_lines) < _MAX_BAD_LINES:
            self.problems.bad_lines.append(BadLine(name, number, reason))


def _size_of(path: Path) -> int:
    """In bytes; 0 for what cannot be asked, opening it says why."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _rooted(span: Span) -> Span:
    """A parent id of zeros, or the span's own, means that there is no parent."""
    if span.parent_id and (span.parent_id == span.span_id or not span.parent_id.strip("0")):
        return msgspec.structs.replace(span, parent_id=None)
    return span


def _opens_document(line: bytes) -> bool:
    """Whether a line may be the first of a document written over several lines."""
    if line.lstrip()[:1] not in {b"{", b"["}:
        return False
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return True
    except RecursionError:
        return False
    return False


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
