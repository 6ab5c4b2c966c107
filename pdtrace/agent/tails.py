"""Tails every ring of a directory into a request tracker.

Owns finding rings, reading them in an order that respects causes, noticing that a writer is gone,
where to go on after a restart, and deleting what nobody needs any more.
Knows nothing of spans.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdtrace.assembly.collected import Process
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.steps import ChosenStep, Member
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.errors import RingError
from pdtrace.export.sink import SinkPosition
from pdtrace.inflight import ProcessNow
from pdtrace.live.process_view import halted, process_now, processes_gone
from pdtrace.logtext import one_line
from pdtrace.ring import RingPosition, RingReader, WriterState, scan_rings
from pdtrace.ring.files import remove_drafts
from pdtrace.ring.losses import LossBook, Losses, WriterEnd
from pdtrace.ring.records import LossRecord, OpenRecord, Record, StepRecord
from pdtrace.stages import Role

DEFAULT_KEEP_RINGS = 16
"""Finished rings that are kept, the newest."""

_READ_RECORDS = 16_384
"""Records of one read: how long others may have to wait for the tracker."""

_MAX_READS = 64
"""Reads of one ring in one round: a writer faster than the reader must not hold up the others."""

_MANY = 1_000
"""Finished requests whose first position may be kept behind one that is in flight for long."""

_DRAFT_KEPT_S = 60.0

_SETTLED_S = 2.0
"""A folder that has changed may change again without that its time of change tells: file systems
keep it as whole ticks, some as whole seconds. Until then it is listed whenever it is looked at."""

_THOROUGH_S = 1.0
"""Nothing is taken for unchanged for longer, neither the folder nor a ring in it."""

_FOR_A_WHILE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of this host, not of a ring."""

_OTHER_FILES = 128
"""Open files that are no rings: the agent's own, its connections, those of who asks it."""

_NO_LOOK = (0, 0)

_log = logging.getLogger(__name__)


class RingState(msgspec.Struct, frozen=True, kw_only=True):
    """Where to go on in a ring; `made_ns` tells it from an earlier ring of the same name.

    last_key   highest key seen: marks with keys up to it belong to requests that are finished, or
               whose OPEN records follow `position`
    counted    number of the record up to which losses were counted, beyond `position`
    last_step  number of the last forward pass that was looked at
    finished   its writer is gone, and all requests in it were handed on
    """

    made_ns: int
    position: RingPosition
    last_key: int = 0
    counted: int = 0
    last_step: int = 0
    finished: bool = False


@dataclass(slots=True)
class TailCounts:
    """Totals since the start. `missed` were overwritten before they were read, `torn` damaged."""

    rings: int = 0
    records: int = 0
    missed: int = 0
    torn: int = 0
    unreadable: int = 0


FileLook = tuple[int, int]

Since = dict[str, tuple[RingPosition, SinkPosition]]
"""Where a ring and the sink stood before each request in flight appeared in the ring, by root."""


@dataclass(slots=True)
class _Tail:
    """A ring that is read.

    at_end     the last read found nothing further
    caught_up  it has been there once: what is read from then on, no former agent has seen
    has_more   whether there seemed to be something to read when the writer was last looked at
    gave       whether the last read gave anything: a writer that records is alive
    """

    reader: RingReader
    process: Process
    made_ns: int
    counted: int = 0
    last_step: int = 0
    seen_alive: bool = False
    at_end: bool = False
    caught_up: bool = False
    has_more: bool = True
    gave: bool = False
    missed: int = 0
    torn: int = 0
    unknown: int = 0
    since: Since = field(default_factory=Since)

    @property
    def is_gateway(self) -> bool:
        return self.reader.identity.role is Role.GATEWAY

    @property
    def has_steps(self) -> bool:
        return self.reader.identity.role in {Role.PREFILL, Role.DECODE, Role.WORKER}


@dataclass(slots=True)
class _Left:
    """A ring that was read to its end while requests in it are in flight in other rings. They stay
    its business: a restarted agent has to read them again."""

    state: RingState
    since: Since


@dataclass(slots=True)
class _Round:
    """A round through the rings.

    gone     why a ring's writer records no more, as found before the ring was read
    drained  whether a ring was read to its end
    left     rings that are still to be read
    """

    gone: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    drained: dict[str, bool] = field(default_factory=dict[str, bool])
    left: deque[str] = field(default_factory=deque[str])


class RingTails:
    """The rings of `directory`, fed into `tracker`. One thread reads; any may ask `processes` and
    `losses`.

    known   states of a former agent: finished rings are left alone, others go on where they were
    floor   where the sink stood when these were valid: requests that a former agent has read and
            finished stand behind it
    losses  what former agents found to be lost
    choose  whether a forward pass is to become a span; asked once for each, by ring and process
    again   called before a ring whose known state cannot be is read from its begin: the tracker has
            to learn of all that was ever finished. Whether it has; until then the ring waits
    counts  totals
    lock    held while the tracker changes: who asks the tracker from another thread holds it
    """

    def __init__(
        self,
        directory: str | Path,
        tracker: RequestTracker,
        *,
        known: Mapping[str, RingState] | None = None,
        floor: SinkPosition | None = None,
        losses: Losses | None = None,
        choose: Callable[[str, Process, StepRecord], bool] | None = None,
        again: Callable[[], bool] | None = None,
    ) -> None:
        self.counts = TailCounts()
        self.directory = Path(directory)
        self.lock = threading.RLock()
        self._tracker = tracker
        self._known = dict(known or {})
        self._floor = SinkPosition() if floor is None else floor
        self._book = LossBook(losses)
        self._choose = choose
        self._again = again
        self._chosen: list[ChosenStep] = []
        self._tails: dict[str, _Tail] = {}
        self._left: dict[str, _Left] = {}
        self._left_alone: dict[str, FileLook] = {}
        self._waiting: set[str] = set()
        self._max_tails = _max_open_rings()
        self._said: set[str] = set()
        self._round: _Round | None = None
        self._passed_over: set[str] = set()
        self._folder: FileLook | None = None
        self._folder_since_s = self._listed_s = -math.inf
        self._thorough_s = -math.inf
        self._thorough = True

    @property
    def num_live(self) -> int:
        """Rings that are still read, or have to wait for that."""
        return len(self._tails) + len(self._waiting)

    @property
    def at_end(self) -> bool:
        """Whether the last round left nothing unread, gateways included."""
        return self._round is None and all(tail.at_end for tail in self._tails.values())

    @property
    def gateways_behind(self) -> bool:
        """Whether a gateway's ring holds what was not read yet."""
        return any(tail.is_gateway and not tail.at_end for tail in self._tails.values())

    @property
    def live(self) -> Collection[str]:
        """Their names."""
        return self._tails.keys()

    @property
    def num_finished(self) -> int:
        """Rings whose writer is gone and which are read to their end."""
        return len(self._left) + sum(1 for state in self._known.values() if state.finished)

    def read(
        self,
        now_ns: int,
        sink_position: SinkPosition,
        *,
        enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Reads what the rings hold, and takes leave of those whose writer is gone; whether all of
        it was read. `sink_position` is kept for `states`.

        Gateways come first, once: whatever led to the end of a request is then in the other rings
        already, also in those that are found only afterwards.

        enough  asked between reads: once it says so the round is left, and the next call goes on
                with it
        """
        if self._round is None:
            self._round = self._begin_round(now_ns, sink_position, enough)
        round = self._round
        while round.left:
            name = round.left[0]
            gone = round.gone[name] = self._gone(name)
            if name in self._tails:
                is_read = round.drained[name] = self._drain(
                    name, now_ns, sink_position, final=gone is not None, enough=enough
                )
                if not is_read and enough():
                    return False
            round.left.popleft()
            if round.left and enough():
                return False
        self._round = None
        for name, reason in round.gone.items():
            if reason is not None and round.drained.get(name) and name in self._tails:
                seen = self._tails[name].seen_alive
                self._leave(name, time.monotonic_ns() if seen else None, reason)
        return all(round.drained.values())

    def _begin_round(
        self, now_ns: int, sink_position: SinkPosition, enough: Callable[[], bool]
    ) -> _Round:
        """Reads the gateways; the other rings are left to be read to their end."""
        now_s = time.monotonic()
        self._thorough = now_s - self._thorough_s >= _THOROUGH_S
        if self._thorough:
            self._thorough_s = now_s
        self._find()
        round = _Round()
        drained: dict[str, bool] = {}
        gateways = [name for name, tail in self._tails.items() if tail.is_gateway]
        # Who had to wait in the last round comes first.
        for name in sorted(gateways, key=lambda name: name not in self._passed_over):
            if drained and enough():
                self._tails[name].at_end = False
                continue
            round.gone[name] = gone = self._gone(name)
            if name in self._tails:
                drained[name] = self._drain(
                    name, now_ns, sink_position, final=gone is not None, enough=enough
                )
        self._passed_over = set(gateways) - set(drained)
        self._find()
        # Only of one that is read to its end it takes leave.
        round.gone = {name: gone for name, gone in round.gone.items() if drained.get(name)}
        round.drained = dict.fromkeys(round.gone, True)
        round.left = deque(name for name, tail in self._tails.items() if not tail.is_gateway)
        return round

    def _gone(self, name: str) -> str | None:
        """Why a ring's writer records no more; None while it may, or if that cannot be read."""
        tail = self._tails[name]
        try:
            tail.has_more, closed = tail.reader.glance()
            if not closed:
                # One that was killed is found out as soon as its ring gives nothing more.
                if tail.has_more and tail.gave:
                    return None
                state = tail.reader.writer_state()
                if state is WriterState.ALIVE:
                    tail.seen_alive = True
                    return None
                closed = state is WriterState.CLOSED
        except (OSError, RingError) as error:
            self._damaged(name, error)
            return None
        return "process_exited" if closed else "process_lost"

    def states(self, sink: SinkPosition) -> tuple[dict[str, RingState], SinkPosition]:
        """Where to go on so that nothing in flight is lost, and since when the sink may hold
        requests that will then be read again."""
        states = {name: state for name, state in self._known.items() if state.finished}
        for name, left in list(self._left.items()):
            oldest = self._oldest(left)
            if oldest is None:
                del self._left[name]
                states[name] = self._known[name] = left.state
                continue
            position, sink_at = oldest
            sink = min(sink, sink_at)
            states[name] = msgspec.structs.replace(left.state, position=position, finished=False)
        for name, tail in self._tails.items():
            position = tail.reader.position()
            oldest = self._oldest(tail)
            if oldest is not None:
                position, sink_at = oldest
                sink = min(sink, sink_at)
            states[name] = msgspec.structs.replace(self._state(name, tail), position=position)
        return states, sink

    def _state(self, name: str, tail: _Tail) -> RingState:
        return RingState(
            made_ns=tail.made_ns,
            position=tail.reader.position(),
            last_key=self._tracker.last_key(name),
            counted=max(tail.counted, tail.reader.position().number),
            last_step=tail.last_step,
        )

    def _oldest(self, ring: _Tail | _Left) -> tuple[RingPosition, SinkPosition] | None:
        """Where the first request in flight of a ring appeared: positions only grow."""
        since, is_open = ring.since, self._tracker.is_open
        if len(since) > 2 * self._tracker.num_open + _MANY:
            ring.since = since = {root: at for root, at in since.items() if is_open(root)}
        while since:
            root = next(iter(since))
            if is_open(root):
                return since[root]
            del since[root]
        return None

    def take_steps(self) -> list[ChosenStep]:
        """Forward passes chosen since the last call."""
        chosen, self._chosen = self._chosen, []
        return chosen

    def losses(self, **totals: int) -> Losses:
        """What is known to be lost; `totals` are this agent's own fields of `Losses`."""
        with self.lock:
            for name, tail in self._tails.items():
                try:
                    self._book.header(name, tail.reader.counters())
                except (OSError, RingError):
                    continue  # reading says what is wrong with it
            self._book.tidy({*self._tails, *self._left, *self._known, *self._left_alone})
            return self._book.losses(**totals)

    def processes(self, needed: Set[str] = frozenset()) -> list[ProcessNow]:
        """Every process that records, and how the latest of each name ended that does not.

        needed  instances that requests in flight were sent to
        """
        with self.lock:
            shown: list[ProcessNow] = []
            for name, tail in self._tails.items():
                try:
                    gauges, writer = tail.reader.gauges(), tail.reader.writer_state()
                except (OSError, RingError):
                    continue  # reading says what is wrong with it
                identity = tail.reader.identity
                held = len(self._tracker.held_in(name))
                is_needed = identity.instance in needed
                shown.append(
                    process_now(identity, writer, gauges, open_requests=held, is_needed=is_needed)
                )
            rings = list(self._book.losses().rings.values())
        return shown + processes_gone(rings, {(seen.role, seen.instance) for seen in shown})

    def halted(self, name: str) -> str | None:
        """What keeps the process of a ring from running at this instant; None if nothing does."""
        tail = self._tails.get(name)
        return None if tail is None else halted(tail.reader.identity)

    def delete_old(self, keep: int) -> int:
        """Deletes finished rings but the `keep` newest; how many. Those with a request in flight,
        and those that could not be read, stay: somebody may still want them."""
        finished = [
            (state.made_ns, name)
            for name, state in self._known.items()
            if state.finished and not self._book.is_unreadable(name)
        ]
        deleted = 0
        for _, name in sorted(finished)[: max(0, len(finished) - keep)]:
            path = self.directory / name
            try:
                if self._left_alone.get(name) != _look(path):
                    continue  # another file under this name: not the one that was read
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                self._say_once(f"cannot delete {path}, whose requests are delivered: {error}")
                continue
            deleted += 1
        return deleted

    def delete_drafts(self) -> None:
        """Deletes rings whose writers died before these were made."""
        for draft in remove_drafts(self.directory, older_than_s=_DRAFT_KEPT_S):
            _log.info("%s is deleted: its writer died while it made it", one_line(draft.name))

    def close(self) -> None:
        """Closes the files. Idempotent."""
        for tail in self._tails.values():
            tail.reader.close()
        self._tails.clear()

    def _find(self) -> None:
        """Opens the rings that have come, and forgets those that are gone."""
        if not self._may_have_changed():
            return
        try:
            paths = scan_rings(self.directory)
        except OSError as error:
            self._say_once(f"cannot list {self.directory}: {error.strerror}")
            return
        names = {path.name for path in paths}
        for path in paths:
            if path.name not in self._tails:
                self._open(path)
        for name in (set(self._known) | set(self._left_alone)) - names - set(self._tails):
            self._known.pop(name, None)
            self._left_alone.pop(name, None)
        self._waiting &= names

    def _may_have_changed(self) -> bool:
        """Whether the folder may hold other files than when it was listed last."""
        try:
            folder = _look(self.directory)
        except OSError:
            folder = None
        now_s = time.monotonic()
        if folder != self._folder:
            self._folder, self._folder_since_s = folder, now_s
        elif (
            now_s - self._folder_since_s >= _SETTLED_S
            and now_s - self._listed_s < _THOROUGH_S
            and not self._waiting
        ):
            return False
        self._listed_s = now_s
        return True

    def _open(self, path: Path) -> None:
        name = path.name
        look = _NO_LOOK
        try:
            look = _look(path)
            if self._left_alone.get(name) == look:
                return
            if len(self._tails) >= self._max_tails:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            reader = RingReader(path)
        except FileNotFoundError:
            return
        except (OSError, RingError) as error:
            if isinstance(error, OSError) and error.errno in _FOR_A_WHILE:
                self._let_wait(name, error)
                return
            if self._left_alone.get(name) == look:
                return
            self._left_alone[name] = look
            self.counts.unreadable += 1
            self._book.unreadable(name, str(error))
            _log.error("a ring cannot be read, its requests are left out: %s", error)
            return
        self._left_alone[name] = look
        self._waiting.discard(name)
        made_ns = reader.identity.anchor.wall_ns
        left = self._left.get(name)
        if left is not None and left.state.made_ns == made_ns:
            reader.close()
            return
        known = self._known.get(name)
        tail = _Tail(reader, process_of(reader.identity, os.environ), made_ns)
        handled_key = 0
        if known is not None and known.made_ns == made_ns:
            if known.finished:
                reader.close()
                return
            try:
                reader.seek(known.position)
                handled_key = known.last_key
                reader.count_from = known.counted  # a former agent counted what lies before
                tail.counted, tail.last_step = known.counted, known.last_step
            except RingError as error:
                self._say_once(f"{error}: it is read from its begin")
                if self._again is not None and not self._again():
                    reader.close()
                    del self._left_alone[name]
                    self._folder = None  # it is looked for again
                    return
        with self.lock:
            self._left.pop(name, None)
            self._left_alone.pop(name, None)
            self._known.pop(name, None)
            self._tails[name] = tail
            self._book.begin(name, reader.identity)
            self._tracker.add_ring(name, tail.process, handled_key=handled_key)
        self.counts.rings += 1

    def _let_wait(self, name: str, error: OSError) -> None:
        """There are too many rings: this one is opened when others are finished."""
        if name in self._waiting:
            return
        self._waiting.add(name)
        self._book.unreadable(name, f"not read yet: {error.strerror}")
        self._say_once(
            f"{error.strerror}: some rings in {self.directory} have to wait until others are "
            f"finished. The limit (ulimit -n) allows for {self._max_tails}"
        )

    def _drain(
        self,
        name: str,
        now_ns: int,
        sink_position: SinkPosition,
        *,
        final: bool = False,
        enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Feeds what a ring holds; whether it was read to its end."""
        tail = self._tails[name]
        if not (tail.has_more or final or self._thorough):
            tail.caught_up, tail.gave = True, False
            if not tail.at_end:
                tail.at_end = True
                with self.lock:
                    self._tracker.read_to_end(name, now_ns)
            return True
        for _ in range(_MAX_READS):
            position = tail.reader.position()
            try:
                records = tail.reader.read(limit=_READ_RECORDS, final=final, losses=True)
            except (OSError, RingError) as error:
                self._damaged(name, error)
                return True
            with self.lock:
                notes = self._count_losses(name, tail, records)
                tail.at_end = len(records) < _READ_RECORDS
                tail.gave = bool(records)
                if not records:
                    tail.caught_up = True
                    self._tracker.read_to_end(name, now_ns)
                    return True
                if self._choose is not None and tail.has_steps:
                    self._choose_steps(name, tail, records, self._choose)
                appeared = self._tracker.feed(name, records, now_ns)
                if tail.at_end:
                    self._tracker.read_to_end(name, now_ns)
            self.counts.records += len(records) - notes
            # A request that begins behind the same position may be finished already, by a former
            # agent: its line has to be found again together with its records.
            since = (position, sink_position if tail.caught_up else self._floor)
            for root in appeared:
                tail.since.setdefault(root, since)
            tail.caught_up = tail.caught_up or tail.at_end
            if enough():
                break
        return False

    def _choose_steps(
        self,
        name: str,
        tail: _Tail,
        records: list[Record],
        choose: Callable[[str, Process, StepRecord], bool],
    ) -> None:
        """Before the tracker sees the records: after it, members that end in them have no name."""
        for record in records:
            if record.__class__ is not StepRecord or not isinstance(record, StepRecord):
                continue
            if record.number <= tail.last_step:
                continue  # looked at by a former agent
            tail.last_step = record.number
            if choose(name, tail.process, record):
                members = tuple(self._members(name, record, records))
                self._chosen.append(ChosenStep(tail.process, record, members))

    def _members(self, name: str, step: StepRecord, records: list[Record]) -> list[Member]:
        opened = {
            record.key: record.context for record in records if isinstance(record, OpenRecord)
        }
        members: list[Member] = []
        for key in step.members:
            if key in opened:
                context = opened[key]
                span_id = context.attempt_span_id
            elif (found := self._tracker.attempt_at(name, key)) is not None:
                context, span_id = found
            else:
                continue
            members.append(Member(context.request_id, context.trace_id, span_id, context.sampled))
        return members

    def _count_losses(self, name: str, tail: _Tail, records: list[Record]) -> int:
        """Counts what the last read has found to be lost; how many of its `records` say so."""
        reader = tail.reader
        missed, torn = reader.missed - tail.missed, reader.torn - tail.torn
        unknown = reader.unknown - tail.unknown
        tail.missed, tail.torn, tail.unknown = reader.missed, reader.torn, reader.unknown
        self.counts.missed += missed
        self.counts.torn += torn
        if missed or torn or unknown:
            self._book.count(name, missed=missed, torn=torn, unknown=unknown)
        if missed:
            self._say_once(
                f"{one_line(reader.identity.instance)} records faster than the agent reads: "
                "records were overwritten, and are counted. Give its recorder a larger ring"
            )
        return len([record for record in records if record.__class__ is LossRecord])

    def _damaged(self, name: str, error: Exception) -> None:
        self.counts.unreadable += 1
        self._book.unreadable(name, str(error))
        _log.error("a ring is left out from here: %s", error)
        self._leave(name, None, "ring_damaged")

    def _leave(self, name: str, gone_ns: int | None, reason: str) -> None:
        with self.lock:
            tail = self._tails[name]
            if reason != "ring_damaged":
                self._book_end(name, tail, reason)
            state = msgspec.structs.replace(self._state(name, tail), finished=True)
            del self._tails[name]
            self._tracker.ring_gone(name, gone_ns, reason)
            # Of the file that was read: another may have its name by now.
            self._left_alone[name] = _identified(tail.reader.stat())
            self._left[name] = _Left(state, tail.since)
            tail.reader.close()

    def _book_end(self, name: str, tail: _Tail, reason: str) -> None:
        try:
            self._book.header(name, tail.reader.counters())
        except (OSError, RingError):
            pass  # cut short since the last read
        end = WriterEnd.CLOSED if reason == "process_exited" else WriterEnd.LOST
        self._book.ended(name, end, time.time_ns(), self._tracker.held_in(name))

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning("%s", message)


def _max_open_rings() -> int:
    """How many files may be open, less what the agent needs for everything else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(limit - _OTHER_FILES, limit // 2)


def _look(path: Path) -> FileLook:
    return _identified(path.stat())


def _identified(stat: os.stat_result) -> FileLook:
    """What tells a file from another under its name, and from itself when written to."""
    return stat.st_ino, stat.st_mtime_ns
