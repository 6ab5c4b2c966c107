"""The sink's files as what exporters have not taken yet: positions, and reading from there.

Owns the cursor of each exporter (up to where everything was taken or refused for good), the small
file that keeps the cursors over restarts, reading requests back between two positions, and telling
what waits to those who look at a run directory (`read_waiting`). Knows nothing of collectors
(`pdtrace.export.queue`) or of writing (`pdtrace.export.sink`).

An exporter that is new to a directory begins at its end. A cursor is noted after each batch,
without a sync: an agent that is killed sends at most that batch again whose answer it had not noted
yet. Agents that run without an exporter leave its cursor alone: it goes on from there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdtrace.export.sink import SinkPosition, file_number, span_files
from pdtrace.otlp.json_lines import count_sampled, decode_line
from pdtrace.spans import Span

CURSORS_NAME = "export-cursors.json"

_STRETCH_BYTES = 8 * 1024 * 1024
"""Read at once at most, so that a long stretch of unsampled requests can be interrupted."""

_log = logging.getLogger(__name__)


class StoredRequest(NamedTuple):
    """Sampled spans of one line; `end` lies behind it and the unsampled lines that follow."""

    spans: list[Span]
    end: SinkPosition


class Stretch(NamedTuple):
    """Requests in the order of the files, and where to read on."""

    requests: list[StoredRequest]
    end: SinkPosition


class Failing(msgspec.Struct, frozen=True, kw_only=True):
    """An exporter that does not take spans: since when, and its last words.

    name  of the exporter, with its address
    """

    name: str
    reason: str
    since_unix_ns: int


class _CursorsFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    cursors: dict[str, SinkPosition] = {}
    failing: dict[str, Failing] = {}


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What one exporter has not taken of a run directory's files.

    kind            of the exporter
    spans           sampled ones behind its cursor
    since_unix_ns   when the first of these ended
    failing         why it took none; None where it did not say, or nobody asked it
    """

    kind: str
    spans: int
    since_unix_ns: int
    failing: Failing | None = None


class Spill:
    """The files of one sink, for its exporters. Thread-safe.

    directory  of the sink
    path       of the file with the cursors
    end        where the sink stood at the begin
    """

    def __init__(self, directory: Path, path: Path, end: SinkPosition) -> None:
        self.directory = directory
        self._path = path
        self.end = end
        self._lock = threading.Lock()
        try:
            kept = _load(path)
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s cannot be used, export begins with the next request: %s", path, error)
            kept = _CursorsFile()
        self._cursors = dict(kept.cursors)
        self._failing = dict(kept.failing)
        self._said: set[str] = set()

    def open_cursor(self, kind: str) -> SinkPosition:
        """The cursor of an exporter; one that is not known starts at the end and is noted."""
        known = self._cursors.get(kind)
        if known is None:
            self.move(kind, self.end)
            return self.end
        if known > self.end:  # somebody removed files: what comes behind the end is new
            self.move(kind, self.end)
        return min(known, self.end)

    def move(self, kind: str, cursor: SinkPosition) -> None:
        """Notes that everything before `cursor` is done with."""
        with self._lock:
            self._cursors[kind] = cursor
            self._write()

    def note_failing(self, kind: str, failing: Failing | None) -> None:
        """Notes why an exporter takes nothing, for who looks at the run directory; None: it does.
        Of an outage that a former agent noted already, the begin stays."""
        with self._lock:
            before = self._failing.get(kind)
            if failing is None:
                self._failing.pop(kind, None)
            elif before is not None and before.name == failing.name:
                since_ns = before.since_unix_ns
                self._failing[kind] = msgspec.structs.replace(failing, since_unix_ns=since_ns)
            else:
                self._failing[kind] = failing
            if self._failing.get(kind) != before:
                self._write()

    def _write(self) -> None:
        draft = self._path.with_suffix(".draft")
        kept = _CursorsFile(cursors=self._cursors, failing=self._failing)
        try:
            draft.write_bytes(msgspec.json.encode(kept))
            draft.replace(self._path)
        except OSError as error:
            self._say_once(
                "unwritable",
                f"cannot write {self._path}: {error.strerror}. "
                "A restarted agent exports again what was exported since",
            )

    def count(
        self, start: SinkPosition, end: SinkPosition, *, only: int | None = None
    ) -> dict[int, int]:
        """Sampled spans between two positions by file; of the file `only` if that is given."""
        counts: dict[int, int] = {}
        for line, behind in _lines_between(self.directory, start, end, only=only):
            counts[behind.number] = counts.get(behind.number, 0) + self._count(line, behind)
        return counts

    def read(self, start: SinkPosition, end: SinkPosition, *, max_spans: int) -> Stretch:
        """Sampled requests from `start`, until `end` or about `max_spans`; blocks on the disk."""
        requests: list[StoredRequest] = []
        num_spans = num_bytes = 0
        for line, behind in _lines_between(self.directory, start, end):
            spans = self._decode(line, behind)
            if spans or not requests:
                requests.append(StoredRequest(spans, behind))
            else:
                requests[-1] = requests[-1]._replace(end=behind)
            num_spans += len(spans)
            num_bytes += len(line)
            if num_spans >= max_spans or num_bytes >= _STRETCH_BYTES:
                return Stretch(requests, behind)
        return Stretch(requests, end)

    def _count(self, line: bytes, behind: SinkPosition) -> int:
        try:
            return count_sampled(line)
        except ValueError as error:
            self._say_unreadable(behind, error)
            return 0

    def _decode(self, line: bytes, behind: SinkPosition) -> list[Span]:
        if not self._count(line, behind):
            return []
        try:
            return decode_line(line)
        except ValueError as error:
            self._say_unreadable(behind, error)
            return []

    def _say_unreadable(self, behind: SinkPosition, error: ValueError) -> None:
        self._say_once(
            "unreadable",
            f"{self.directory}: the line of file {behind.number} that ends at byte "
            f"{behind.offset} is not exported: {error}",
        )

    def _say_once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("%s", message)


def read_waiting(directory: Path, path: Path) -> list[Waiting]:
    """What the exporters of a run have not taken, exporter by exporter; those that took all are
    left out. Never raises: what cannot be read waits for nobody.

    directory  of the sink
    path       of the file with the cursors
    """
    try:
        kept = _load(path)
        files = span_files(directory)
        number = file_number(files[-1]) if files else 0
        end = SinkPosition(number=number, offset=files[-1].stat().st_size if files else 0)
        found = [_waiting(directory, kind, kept, end) for kind in sorted(kept.cursors)]
    except (OSError, msgspec.MsgspecError):
        return []
    return [waiting for waiting in found if waiting is not None]


def _waiting(directory: Path, kind: str, kept: _CursorsFile, end: SinkPosition) -> Waiting | None:
    spans = 0
    since_ns = 0
    for line, _ in _lines_between(directory, kept.cursors[kind], end):
        try:
            count = count_sampled(line)
            if count and not spans:
                since_ns = max(span.end_ns for span in decode_line(line))
        except ValueError:
            continue  # nor will it be exported
        spans += count
    if not spans:
        return None
    return Waiting(kind=kind, spans=spans, since_unix_ns=since_ns, failing=kept.failing.get(kind))


def _load(path: Path) -> _CursorsFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_CursorsFile)
    except FileNotFoundError:
        return _CursorsFile()


def _lines_between(
    directory: Path, start: SinkPosition, end: SinkPosition, *, only: int | None = None
) -> Iterator[tuple[bytes, SinkPosition]]:
    """Lines with the position behind each. Files that are gone are passed over."""
    for path in span_files(directory):
        number = file_number(path)
        if not start.number <= number <= end.number or (only is not None and number != only):
            continue
        offset = start.offset if number == start.number else 0
        try:
            with path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    offset += len(line)
                    behind = SinkPosition(number=number, offset=offset)
                    if behind > end or not line.endswith(b"\n"):
                        break
                    yield line, behind
        except FileNotFoundError:
            continue  # rotated away meanwhile
