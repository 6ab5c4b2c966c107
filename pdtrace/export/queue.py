"""A bounded queue and a thread for each exporter; what does not fit waits in the sink's files.

Owns what a target is, and what happens to spans between the agent and one: batches, back-off,
refusals, falling behind and catching up, and the counts of all that. Nothing here blocks or raises
into the agent. The targets are `pdtrace.export.targets`', the files `pdtrace.export.spill`'s.

A lane is *live* while its queue holds all that is not handled yet. When the queue is full it falls
*behind*: requests stay in the files, and its thread reads them from there as room appears, until it
has caught up. Without files, what does not fit is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

from pdtrace.assembly.orderly import OrderlySpans
from pdtrace.export.sink import SinkPosition
from pdtrace.export.spill import Failing, Spill
from pdtrace.spans import Span, SpanBatch

MAX_QUEUED_SPANS = 65_536
MAX_BATCH_SPANS = 2_048
"""About a megabyte. With the SDK's 512, the cost of a call is shared by a quarter as many."""
BATCH_DELAY_S = 1.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 5.0
MIN_RETRY_AFTER_S = 0.05
SILENT_S = 5.0
"""Who has not answered for so long is said not to take spans."""
MAX_RETRY_AFTER_S = 60.0
"""A collector that asks for longer is tried again all the same."""
CLOSING_BACKOFF_S = 0.1

_log = logging.getLogger(__name__)


class Sent(Enum):
    """What became of a batch."""

    OK = "ok"
    RETRY = "retry"  # nobody took it; may be sent again
    REFUSED = "refused"  # sending it again cannot help
    TOO_LARGE = "too_large"  # parts of it may be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a batch and why.

    reason         one line: the collector's words, or what is wrong with the connection
    code           short kind of the answer: an HTTP or gRPC status, "unreachable", …
    retry_after_s  how long the collector wants to be left alone; None: it did not say
    rejected       spans that the collector left out of a batch that it took (partial success)
    """

    sent: Sent
    reason: str = ""
    code: str = ""
    retry_after_s: float | None = None
    rejected: int = 0


TAKEN = Answer(sent=Sent.OK)


class Target(Protocol):
    """A place that takes spans. send() belongs to one thread; shutdown() may be called from another
    and makes a send() in progress return soon, where it can.

    name  for the log, with the address
    kind  of exporter, for what is kept over restarts: otlp, console
    """

    name: str
    kind: str

    def send(self, spans: Sequence[Span]) -> Answer:
        """What became of the batch. May raise: then the spans cannot be encoded."""
        ...

    def shutdown(self) -> None:
        """Lets go of connections."""
        ...


class DropReason(StrEnum):
    """Why spans were never exported."""

    QUEUE_FULL = "queue full"  # no files to wait in
    DISK_FULL = "disk full"  # not in the files, and no room in memory
    FILE_DELETED = "file deleted"  # rotated away before its turn, or removed or damaged
    REFUSED = "refused"  # by the collector, for good
    REJECTED = "rejected"  # by the collector, out of a batch that it took
    TOO_LARGE = "too large"  # one request is more than the collector takes at once
    BROKEN = "not encodable"
    EXIT = "not taken before exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of an export queue: spans, spans, seconds. One request may exceed them by itself.

    A batch has at most twice as many spans, events and links as `max_batch`: receivers take 4 MB
    at once, and a span may have a hundred events.
    """

    max_queued: int = MAX_QUEUED_SPANS
    max_batch: int = MAX_BATCH_SPANS
    delay_s: float = BATCH_DELAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterState:
    """How one exporter stands.

    takes_spans    false from when it did not take a batch, or has not answered for a while, until
                   it takes one
    reason         its last words, or what is wrong with the connection; "" while it takes spans
    since_unix_ns  since when it does not; None while it does
    spans_waiting  in memory and in the files
    """

    name: str
    takes_spans: bool
    reason: str
    since_unix_ns: int | None
    spans_waiting: int


@dataclass(slots=True)
class _Entry:
    """A request in the queue. Everything before `end` in the files is handled once this one is;
    `file` is the number of the one that has its line, 0 for none."""

    spans: Sequence[Span]
    end: SinkPosition | None
    file: int
    replayed: bool = False


def backoff_s(failures: int, retry_after_s: float | None) -> float:
    """Seconds until the next try, after `failures` in a row: the collector's wish, bounded."""
    if retry_after_s is not None:
        return min(max(retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
    return min(FIRST_BACKOFF_S * 2 ** min(failures, 8), MAX_BACKOFF_S)


class ExportQueue:
    """Hands requests to each target's lane. A request is exported whole or not at all.

    spill  files in which requests wait; None: in memory only
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        limits: QueueLimits | None = None,
        spill: Spill | None = None,
    ) -> None:
        self._unsampled = 0
        self._lanes = [_Lane(target, limits or QueueLimits(), spill) for target in targets]

    def submit(
        self, spans: Sequence[Span], *, sampled: bool = True, end: SinkPosition | None = None
    ) -> None:
        """Takes a request's spans; `end` is the position behind its line, None if it has none."""
        if not sampled:
            self._unsampled += len(spans)
        for lane in self._lanes:
            lane.put(spans, sampled, end)

    def file_deleted(self, number: int) -> None:
        """A file of the spill is about to go."""
        for lane in self._lanes:
            lane.file_deleted(number)

    def close(self, timeout_s: float) -> None:
        """Sends what there is for at most `timeout_s`. What is left waits in the files; what is in
        none is dropped. Logs how much and why."""
        deadline_s = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.begin_closing(deadline_s)
        for lane in self._lanes:
            lane.finish_closing(deadline_s)

    def totals(self) -> Mapping[str, int]:
        """Spans by what became of them; the targets' counts are added up."""
        lanes = self._lanes
        dropped = self.dropped()
        return {
            "spans_exported": sum(lane.exported for lane in lanes),
            "spans_replayed": sum(lane.replayed for lane in lanes),
            "spans_unsampled": self._unsampled,
            "spans_waiting": sum(lane.num_waiting for lane in lanes),
            "spans_dropped": sum(dropped.values()),
            **{
                f"spans_dropped_{reason.replace(' ', '_')}": count
                for reason, count in dropped.items()
                if count
            },
        }

    def exporters(self) -> Sequence[ExporterState]:
        """How each exporter stands."""
        return [lane.state() for lane in self._lanes]

    def dropped(self) -> Mapping[str, int]:
        """Spans dropped by reason; every reason is there."""
        return {
            reason.value: sum(lane.dropped[reason] for lane in self._lanes) for reason in DropReason
        }


class _Lane:
    """One target, its queue and its thread. Everything is guarded by `_changed`, except where only
    the lane's own thread looks."""

    def __init__(self, target: Target, limits: QueueLimits, spill: Spill | None) -> None:
        self.exported = 0
        self.replayed = 0
        self.dropped: Counter[DropReason] = Counter()
        self._target = target
        self._limits = limits
        self._max_batch = limits.max_batch
        self._spill = spill
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._num_queued = 0
        self._sending: list[_Entry] = []
        self._closing_until_s: float | None = None
        self._abandoned = False
        self._failing = ""
        self._trouble: Failing | None = None
        self._asked_ns: int | None = None
        self._said: set[str] = set()
        # The files: where to read on while behind, what was delivered, what is not read yet.
        self._read: SinkPosition | None = None
        self._end = SinkPosition()
        self._unread: Counter[int] = Counter()
        self._oldest = 1
        self._stock: tuple[SinkPosition, SinkPosition] | None = None
        if spill is not None:
            cursor = spill.open_cursor(target.kind)
            self._end = spill.end
            if cursor < spill.end:
                self._read = cursor
                self._stock = (cursor, spill.end)
        # A daemon: a send that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="pdtrace-export", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return (
                self._num_queued
                + sum(len(entry.spans) for entry in self._sending)
                + sum(self._unread.values())
            )

    def state(self) -> ExporterState:
        trouble, asked_ns = self._trouble, self._asked_ns
        if trouble is None and asked_ns is not None:
            silent_s = (time.time_ns() - asked_ns) / 1e9
            if silent_s > SILENT_S:
                trouble = self._failure(f"it has not answered for {silent_s:.0f} s", asked_ns)
        return ExporterState(
            name=self._target.name,
            takes_spans=trouble is None,
            reason="" if trouble is None else trouble.reason,
            since_unix_ns=None if trouble is None else trouble.since_unix_ns,
            spans_waiting=self.num_waiting,
        )

    # -- called by the agent ------------------------------------------------------------------

    def put(self, spans: Sequence[Span], sampled: bool, end: SinkPosition | None) -> None:
        with self._changed:
            if end is None or self._spill is None:
                if sampled:
                    self._put_in_memory(spans)
            else:
                before, self._end = self._end, end
                if self._read is None and (not sampled or self._has_room(spans)):
                    self._put_stored(spans if sampled else (), end)
                else:
                    self._leave_in_file(spans if sampled else (), before, end)
            self._changed.notify()

    def file_deleted(self, number: int) -> None:
        with self._changed:
            self._oldest = max(self._oldest, number + 1)
            if self._read is None:
                return  # all that matters is in memory
            if self._stock is not None and self._spill is not None:
                try:
                    self._unread.update(self._spill.count(*self._stock, only=number))
                except OSError:
                    pass  # nobody can say how many there were
            self._drop(DropReason.FILE_DELETED, self._unread.pop(number, 0))
            self._read = max(self._read, SinkPosition(number=self._oldest))

    def begin_closing(self, deadline_s: float) -> None:
        with self._changed:
            if self._closing_until_s is None:
                self._closing_until_s = deadline_s
            self._changed.notify()

    def finish_closing(self, deadline_s: float) -> None:
        self._thread.join(max(deadline_s - time.monotonic(), 0))
        with self._changed:
            first = not self._abandoned
            self._abandoned = True
            hangs = bool(self._sending) and not self._failing
        _guarded(self._target.shutdown)
        self._thread.join(0.1)
        if first:
            self._count_rest("it did not answer in time" if hangs else self._failing)

    # -- under the lock -----------------------------------------------------------------------

    def _put_in_memory(self, spans: Sequence[Span]) -> None:
        if self._closing_until_s is not None:
            self._drop(DropReason.EXIT, len(spans))
        elif self._has_room(spans):
            self._append(_Entry(spans, None, 0))
        else:
            reason = DropReason.QUEUE_FULL if self._spill is None else DropReason.DISK_FULL
            self._drop(reason, len(spans))

    def _put_stored(self, spans: Sequence[Span], end: SinkPosition) -> None:
        if spans or not self._queue:
            self._append(_Entry(spans, end, end.number))
        else:
            self._queue[-1].end = end  # nothing to send: it goes with the one before

    def _leave_in_file(
        self, spans: Sequence[Span], before: SinkPosition, end: SinkPosition
    ) -> None:
        if self._read is None:
            self._read = max(before, SinkPosition(number=self._oldest))
            self._say_once(
                "behind",
                logging.WARNING,
                "%s does not keep up: further spans wait in the files",
                self._target.name,
            )
        if end.number < self._oldest:  # rotated away within this very write
            self._drop(DropReason.FILE_DELETED, len(spans))
        elif spans:
            self._unread[end.number] += len(spans)

    def _has_room(self, spans: Sequence[Span]) -> bool:
        return not self._num_queued or self._num_queued + len(spans) <= self._limits.max_queued

    def _is_stored(self, entry: _Entry) -> bool:
        return entry.file >= self._oldest

    def _append(self, entry: _Entry) -> None:
        self._queue.append(entry)
        self._num_queued += len(entry.spans)

    def _drop(self, reason: DropReason, num_spans: int) -> None:
        if not num_spans:
            return
        self.dropped[reason] += num_spans
        self._say_once(
            f"dropped {reason}",
            logging.WARNING,
            "%s: spans are dropped (%s); further ones are counted",
            self._target.name,
            reason.value,
        )

    def _say_once(self, what: str, level: int, message: str, *arguments: object) -> None:
        """Once; "failing" once in an outage."""
        if what not in self._said:
            self._said.add(what)
            _log.log(level, message, *arguments)

    # -- the lane's thread --------------------------------------------------------------------

    def _run(self) -> None:
        self._take_stock()
        while (batch := self._next_batch()) is not None:
            if not self._send(batch):
                return

    def _take_stock(self) -> None:
        """Counts what former agents left in the files."""
        if self._stock is None or self._spill is None:
            return
        try:
            counts = self._spill.count(*self._stock)
        except OSError:
            counts = {}  # reading them will say why
        with self._changed:
            self._stock = None
            self._unread.update({n: c for n, c in counts.items() if n >= self._oldest})
            waiting = sum(self._unread.values())
        _log.info("%s: %d spans wait in the files and are sent now", self._target.name, waiting)

    def _next_batch(self) -> list[_Entry] | None:
        """Waits for a full batch or the delay; None when closing and empty, or abandoned."""
        while True:
            with self._changed:
                while not self._queue and self._read is None and self._closing_until_s is None:
                    self._changed.wait()
                if self._abandoned:
                    return None
                read, end = self._read, self._end
                if read is None or self._num_queued >= self._max_batch:
                    if not self._queue:
                        return None
                    self._wait_for_more()
                    return None if self._abandoned else self._take()
            read_on = self._read_on(read, end)
            with self._changed:
                if self._queue:
                    return None if self._abandoned else self._take()
                if not read_on and self._closing_until_s is not None:
                    return None

    def _wait_for_more(self) -> None:
        due_s = time.monotonic() + self._limits.delay_s
        while self._num_queued < self._max_batch and self._closing_until_s is None:
            if not self._changed.wait(max(due_s - time.monotonic(), 0)):
                break

    def _take(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size = num_parts = 0
        while self._queue:
            spans = self._queue[0].spans
            num_parts += _num_parts(spans)
            if batch and (size + len(spans) > self._max_batch or num_parts > 2 * self._max_batch):
                break
            batch.append(self._queue.popleft())
            size += len(spans)
        self._num_queued -= size
        self._sending = batch
        return batch

    def _read_on(self, start: SinkPosition, end: SinkPosition) -> bool:
        """Moves requests from the files to the queue; goes live again at their end. False if they
        cannot be read."""
        assert self._spill is not None
        try:
            stretch = self._spill.read(start, end, max_spans=self._max_batch)
        except OSError as error:
            self._wait_for_files(error)
            return False
        with self._changed:
            for spans, behind in stretch.requests:
                if behind.number < self._oldest:
                    continue  # deleted while it was read, and counted so
                self._unread[behind.number] -= len(spans)
                self._append(_Entry(spans, behind, behind.number, replayed=True))
            self._read = max(stretch.end, SinkPosition(number=self._oldest))
            if self._read >= self._end:
                self._read = None
                # What was not found where it was written: somebody removed or damaged a file.
                self._drop(DropReason.FILE_DELETED, max(sum(self._unread.values()), 0))
                self._unread.clear()
        return True

    def _wait_for_files(self, error: OSError) -> None:
        with self._changed:
            self._say_once(
                "unreadable",
                logging.ERROR,
                "%s: the files cannot be read: %s. What waits in them is tried again",
                self._target.name,
                error,
            )
            self._changed.wait_for(lambda: self._closing_until_s is not None, MAX_BACKOFF_S)

    def _send(self, batch: list[_Entry]) -> bool:
        """Whether to go on; False leaves the batch to the next agent."""
        failures = 0
        while True:
            answer = self._answer(batch)
            if answer.sent is not Sent.OK:
                self._note_trouble(answer)
            with self._changed:
                if self._abandoned:
                    return False
                if answer.sent is not Sent.RETRY:
                    break
                self._say_failing(answer)
                if not self._wait_to_retry(batch, backoff_s(failures, answer.retry_after_s)):
                    return False
            failures += 1
        if answer.sent is Sent.OK:
            self._sent(batch, answer)
        elif answer.sent is Sent.TOO_LARGE and len(batch) > 1:
            return self._send_halves(batch, answer)
        else:
            self._refused(batch, answer)
        return True

    def _answer(self, batch: list[_Entry]) -> Answer:
        spans = SpanBatch([entry.spans for entry in batch])
        if not spans:
            return Answer(sent=Sent.OK)
        self._asked_ns = time.time_ns()
        try:
            return self._target.send(spans)
        except Exception as error:  # spans that cannot be encoded, or an exporter's bug
            reason = f"{type(error).__name__}: {error}"
            return Answer(sent=Sent.TOO_LARGE, reason=reason, code=DropReason.BROKEN)
        finally:
            self._asked_ns = None

    def _note_trouble(self, answer: Answer) -> None:
        """What does not fit or cannot be encoded is the batch's fault."""
        if answer.sent is Sent.TOO_LARGE or self._abandoned:
            return
        since_ns = time.time_ns() if self._trouble is None else self._trouble.since_unix_ns
        self._trouble = self._failure(answer.reason or "no reason given", since_ns)
        if self._spill is not None:
            self._spill.note_failing(self._target.kind, self._trouble)

    def _failure(self, reason: str, since_ns: int) -> Failing:
        return Failing(name=self._target.name, reason=reason, since_unix_ns=since_ns)

    def _send_halves(self, batch: list[_Entry], answer: Answer) -> bool:
        middle = len(batch) // 2
        with self._changed:
            if answer.code != DropReason.BROKEN:
                self._max_batch = max(sum(len(entry.spans) for entry in batch) // 2, 1)
            later = batch[middle:]
            self._queue.extendleft(reversed(later))
            self._num_queued += sum(len(entry.spans) for entry in later)
            self._sending = batch[:middle]
        return self._send(batch[:middle])

    def _wait_to_retry(self, batch: Sequence[_Entry], delay_s: float) -> bool:
        """Under the lock. Whether to send again; when closing, once more, and go on only with what
        no file holds."""
        closing = self._closing_until_s
        if closing is None:
            self._changed.wait_for(lambda: self._closing_until_s is not None, delay_s)
            return not self._abandoned
        if all(self._is_stored(entry) for entry in batch):
            return False
        if time.monotonic() + CLOSING_BACKOFF_S >= closing:
            return False
        self._changed.wait_for(lambda: self._abandoned, CLOSING_BACKOFF_S)
        return not self._abandoned

    def _sent(self, batch: Sequence[_Entry], answer: Answer) -> None:
        num_spans = sum(len(entry.spans) for entry in batch)
        rejected = min(answer.rejected, num_spans)
        with self._changed:
            self.exported += num_spans - rejected
            self.replayed += sum(len(entry.spans) for entry in batch if entry.replayed)
            self.dropped[DropReason.REJECTED] += rejected
            recovered = bool(self._failing) and num_spans > 0
            if recovered:
                self._failing = ""
                self._said.discard("failing")
            dropped = sum(self.dropped.values())
            if answer.reason or rejected:
                self._say_once(
                    "partial",
                    logging.WARNING,
                    "%s took a batch but for %d spans: %s; further ones are counted",
                    self._target.name,
                    rejected,
                    answer.reason or "no reason given",
                )
        if num_spans:
            self._trouble = None
            if self._spill is not None:
                self._spill.note_failing(self._target.kind, None)
        if recovered:
            _log.warning("%s takes spans again; %d were dropped so far", self._target.name, dropped)
        self._settle(batch)

    def _refused(self, batch: Sequence[_Entry], answer: Answer) -> None:
        if answer.code == DropReason.BROKEN:
            reason = DropReason.BROKEN
        elif answer.sent is Sent.TOO_LARGE:
            reason = DropReason.TOO_LARGE
        else:
            reason = DropReason.REFUSED
        with self._changed:
            self.dropped[reason] += sum(len(entry.spans) for entry in batch)
            self._say_once(
                f"refused {answer.code}",
                logging.ERROR,
                "%s does not take spans: %s. They are dropped, further ones are counted",
                self._target.name,
                answer.reason or "no reason given",
            )
        self._settle(batch)

    def _settle(self, batch: Sequence[_Entry]) -> None:
        end = next((entry.end for entry in reversed(batch) if entry.end is not None), None)
        with self._changed:
            self._sending = []
        if end is not None and self._spill is not None:
            self._spill.move(self._target.kind, end)

    def _say_failing(self, answer: Answer) -> None:
        self._failing = answer.reason or "no reason given"
        self._say_once(
            "failing",
            logging.ERROR,
            "%s does not take spans: %s. %s",
            self._target.name,
            self._failing,
            "They wait in memory" if self._spill is None else "They wait in the files",
        )

    def _count_rest(self, cause: str) -> None:
        with self._changed:
            rest = [*self._sending, *self._queue]
            # What is stored waits for the next agent, like what was not read yet.
            self._sending = []
            self._queue = deque(entry for entry in rest if self._is_stored(entry))
            stored = self._num_queued = sum(len(entry.spans) for entry in self._queue)
            unstored = sum(len(entry.spans) for entry in rest) - stored
            self.dropped[DropReason.EXIT] += unstored
            waiting = stored + sum(self._unread.values())
        if waiting and cause and self._trouble is None and self._spill is not None:
            self._spill.note_failing(self._target.kind, self._failure(cause, time.time_ns()))
        because = f": {cause}" if cause else ""
        if unstored:
            _log.warning(
                "%s: %d spans were not exported and are lost%s",
                self._target.name,
                unstored,
                because,
            )
        if waiting:
            _log.warning(
                "%s: %d spans were not exported and wait in %s for the next agent%s",
                self._target.name,
                waiting,
                "the files" if self._spill is None else self._spill.directory,
                because,
            )


def _num_parts(spans: Sequence[Span]) -> int:
    """Spans with their events and links."""
    if isinstance(spans, OrderlySpans):
        return spans.num_parts
    return len(spans) + sum([len(s.events) + len(s.links) for s in spans if s.events or s.links])


def _guarded(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # nothing that an exporter does at its end may stop the agent's
        _log.warning("an exporter failed at its end: %s", error)
