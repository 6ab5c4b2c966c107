"""What becomes of finished requests: lines in the sink's files, and spans to the exporters.

Owns the order of the two, and the sampling decision that goes with both. Every request is written
first; the exporters get it with the position behind its line, so that what they cannot take waits
in the files (`pdtrace.export.spill`), over restarts too. The agent decides what is finished; this
module neither blocks on a collector nor raises into the agent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pdtrace.assembly.collected import CollectedRequest
from pdtrace.export.queue import ExporterState, ExportQueue
from pdtrace.export.settings import ExportPlan
from pdtrace.export.sink import MAX_FILE_BYTES, MAX_FILES, FileSink, SinkPosition, lines_since
from pdtrace.export.spill import CURSORS_NAME, Spill
from pdtrace.logtext import one_line
from pdtrace.otlp.json_lines import encode_line
from pdtrace.spans import Span

TRACES_NAME = "traces"

_log = logging.getLogger(__name__)


class Delivery:
    """Takes finished requests. One thread delivers; totals() may be called from any.

    out   run directory: files in `<out>/traces`, the exporters' cursors in `<out>`; None: no files,
          and what the exporters cannot take in time is dropped and counted
    plan  exporters; None: files only

    Raises SinkError when `out` cannot be written or has another agent.
    """

    def __init__(
        self,
        *,
        out: str | Path | None,
        plan: ExportPlan | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        self.errors = 0
        self._plan = plan
        self._sink: FileSink | None = None
        self._queue: ExportQueue | None = None
        self._failed = False
        spill = None
        if out is not None:
            directory = Path(out) / TRACES_NAME
            self._sink = FileSink(directory, max_file_bytes=max_file_bytes, max_files=max_files)
            spill = Spill(directory, Path(out) / CURSORS_NAME, self._sink.position)
        if plan is not None:
            self._queue = ExportQueue(plan.targets, limits=plan.limits, spill=spill)
            if self._sink is not None:
                self._sink.before_delete = self._queue.file_deleted

    @property
    def position(self) -> SinkPosition | None:
        """Where the files end; None without files."""
        return None if self._sink is None else self._sink.position

    @property
    def owns_files(self) -> bool:
        """Whether the run directory is still this delivery's; without files there is none to own.
        What cannot be known counts as yes."""
        try:
            return self._sink is None or self._sink.holds_lock()
        except OSError:
            return True

    @property
    def lines_lost(self) -> int:
        """Requests that could not be written to the files."""
        return 0 if self._sink is None else self._sink.lines_lost

    def lines_since(self, position: SinkPosition | None = None) -> Iterator[bytes]:
        """Lines of the files behind a position; none without files."""
        if self._sink is not None:
            yield from lines_since(self._sink.directory, position)

    def deliver(self, built: Sequence[tuple[CollectedRequest, Sequence[Span]]]) -> None:
        """Writes and exports requests with their spans, in this order."""
        ready: list[tuple[Sequence[Span], bool]] = []
        lines: list[bytes] = []
        for request, spans in built:
            sampled = (
                request.sampled if self._plan is None else self._plan.is_sampled(request, spans)
            )
            if self._sink is not None:
                try:
                    lines.append(encode_line(spans, sampled=sampled))
                except Exception as error:  # a span that OTLP cannot carry costs its request
                    self._fault(request, error)
                    continue
            ready.append((spans, sampled))
        ends: Sequence[SinkPosition | None] = [None] * len(ready)
        if self._sink is not None:
            ends = self._sink.write(lines)
        if self._queue is not None:
            for (spans, sampled), end in zip(ready, ends, strict=True):
                self._queue.submit(spans, sampled=sampled, end=end)

    def totals(self) -> Mapping[str, int]:
        """Counts by what became of spans, lines and files, for the log and for metrics."""
        totals = {} if self._queue is None else dict(self._queue.totals())
        if self._sink is not None:
            totals["lines_lost"] = self._sink.lines_lost
            totals["files_deleted"] = self._sink.files_deleted
        return totals

    def exporters(self) -> Sequence[ExporterState]:
        """How each exporter stands; none without exporters."""
        return () if self._queue is None else self._queue.exporters()

    def dropped(self) -> Mapping[str, int]:
        """Spans that no exporter will send, by reason; empty without exporters."""
        return {} if self._queue is None else self._queue.dropped()

    def close(self, timeout_s: float) -> None:
        """Exports for at most `timeout_s` seconds; the rest waits in the files. Idempotent."""
        if self._queue is not None:
            self._queue.close(timeout_s)
        if self._sink is not None:
            self._sink.close()

    def _fault(self, request: CollectedRequest, error: Exception) -> None:
        self.errors += 1
        if not self._failed:
            self._failed = True
            _log.error(
                "the spans of request %s cannot be written, further ones are counted: %s",
                one_line(request.request_id),
                one_line(str(error)),
            )
