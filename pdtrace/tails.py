"""Tails every ring of a directory into a request tracker.

Owns finding rings, reading them in an order that respects causes, noticing that a writer is gone,
and where to go on after a restart. Knows nothing of spans.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdtrace.errors import RingError
from pdtrace.resource import process_of
from pdtrace.ring import RingPosition, RingReader, WriterState, scan_rings
from pdtrace.sink import SinkPosition
from pdtrace.stages import Role
from pdtrace.tracker import RequestTracker

_MAX_READS = 64
"""Reads of one ring in one round: a writer faster than the reader must not hold up the others."""

_MANY = 1_000
"""Finished requests whose first position may be kept behind one that is in flight for long."""

_log = logging.getLogger(__name__)


class RingState(msgspec.Struct, frozen=True, kw_only=True):
    """Where to go on in a ring; `made_ns` tells it from an earlier ring of the same name.

    last_key  highest key seen: marks with keys up to it belong to requests that are finished, or
              whose OPEN records follow `position`
    """

    made_ns: int
    position: RingPosition
    last_key: int = 0
    finished: bool = False


@dataclass(slots=True)
class TailCounts:
    """Totals since the start. `missed` were overwritten before they were read, `torn` damaged."""

    rings: int = 0
    records: int = 0
    missed: int = 0
    torn: int = 0
    unreadable: int = 0


@dataclass(slots=True)
class _Tail:
    reader: RingReader
    made_ns: int
    seen_alive: bool = False
    missed: int = 0
    torn: int = 0
    since: dict[str, tuple[RingPosition, SinkPosition]] = field(
        default_factory=dict[str, tuple[RingPosition, SinkPosition]]
    )
    """Where this ring and the sink stood before each request in flight appeared here."""

    @property
    def is_gateway(self) -> bool:
        return self.reader.identity.role is Role.GATEWAY


class RingTails:
    """The rings of `directory`, fed into `tracker`. Not thread-safe.

    known   states of a former agent: finished rings are left alone, others go on where they were
    counts  totals
    """

    def __init__(
        self,
        directory: str | Path,
        tracker: RequestTracker,
        *,
        known: Mapping[str, RingState] | None = None,
    ) -> None:
        self.counts = TailCounts()
        self.directory = Path(directory)
        self._tracker = tracker
        self._known = dict(known or {})
        self._tails: dict[str, _Tail] = {}
        self._left_alone: dict[str, tuple[int, int]] = {}
        self._said: set[str] = set()

    @property
    def num_live(self) -> int:
        """Rings that are still read."""
        return len(self._tails)

    @property
    def num_finished(self) -> int:
        """Rings whose writer is gone and which are read to their end."""
        return sum(1 for state in self._known.values() if state.finished)

    def read(self, now_ns: int, sink_position: SinkPosition | None) -> bool:
        """Reads what the rings hold, and takes leave of those whose writer is gone; whether all of
        it was read. `sink_position` is kept for `states`; None where nobody will ask.

        Gateways come first, once: whatever led to the end of a request is then in the other rings
        already, also in those that are found only afterwards.
        """
        self._find()
        gateways = [name for name, tail in self._tails.items() if tail.is_gateway]
        gone = {name: self._gone(name) for name in gateways}
        drained = {
            name: self._drain(
                name, now_ns, sink_position, max_reads=1, final=gone.get(name) is not None
            )
            for name in gateways
            if name in self._tails
        }
        self._find()
        caught_up = True
        for name in [name for name, tail in self._tails.items() if not tail.is_gateway]:
            gone[name] = self._gone(name)
            if name in self._tails:
                drained[name] = self._drain(
                    name, now_ns, sink_position, final=gone[name] is not None
                )
                caught_up = caught_up and drained[name]
        for name, reason in gone.items():
            if reason is not None and drained.get(name) and name in self._tails:
                seen = self._tails[name].seen_alive
                self._leave(name, time.monotonic_ns() if seen else None, reason)
        return caught_up

    def _gone(self, name: str) -> str | None:
        """Why a ring's writer records no more; None while it may."""
        tail = self._tails[name]
        try:
            state = tail.reader.writer_state()
        except (OSError, RingError) as error:
            self._damaged(name, error)
            return None
        if state is WriterState.ALIVE:
            tail.seen_alive = True
            return None
        return "process_exited" if state is WriterState.CLOSED else "process_lost"

    def states(self, sink: SinkPosition) -> tuple[dict[str, RingState], SinkPosition]:
        """Where to go on so that nothing in flight is lost, and since when the sink may hold
        requests that will then be read again."""
        states = {name: state for name, state in self._known.items() if state.finished}
        for name, tail in self._tails.items():
            position = tail.reader.position()
            oldest = self._oldest(tail)
            if oldest is not None:
                position, sink_at = oldest
                sink = min(sink, sink_at, key=lambda at: (at.number, at.offset))
            states[name] = RingState(
                made_ns=tail.made_ns, position=position, last_key=self._tracker.last_key(name)
            )
        return states, sink

    def _oldest(self, tail: _Tail) -> tuple[RingPosition, SinkPosition] | None:
        """Where the first request in flight of a ring appeared: positions only grow."""
        since, is_open = tail.since, self._tracker.is_open
        if len(since) > 2 * self._tracker.num_open + _MANY:
            tail.since = since = {root: at for root, at in since.items() if is_open(root)}
        while since:
            root = next(iter(since))
            if is_open(root):
                return since[root]
            del since[root]
        return None

    def close(self) -> None:
        """Closes the files. Idempotent."""
        for tail in self._tails.values():
            tail.reader.close()
        self._tails.clear()

    def _find(self) -> None:
        try:
            paths = scan_rings(self.directory)
        except OSError as error:
            self._say_once(f"cannot list {self.directory}: {error.strerror}")
            return
        names = {path.name for path in paths}
        for path in paths:
            if path.name not in self._tails:
                self._open(path)
        for name in set(self._known) - names - set(self._tails):
            del self._known[name]
            self._left_alone.pop(name, None)

    def _open(self, path: Path) -> None:
        name = path.name
        try:
            stat = path.stat()
            look = (stat.st_ino, stat.st_mtime_ns)
            if self._left_alone.get(name) == look:
                return
            self._left_alone[name] = look
            reader = RingReader(path)
        except FileNotFoundError:
            return
        except (OSError, RingError) as error:
            self.counts.unreadable += 1
            _log.error("a ring cannot be read, its requests are left out: %s", error)
            return
        made_ns = reader.identity.anchor.wall_ns
        known = self._known.get(name)
        handled_key = 0
        if known is not None and known.made_ns == made_ns:
            if known.finished:
                reader.close()
                return
            try:
                reader.seek(known.position)
                handled_key = known.last_key
            except RingError as error:
                self._say_once(f"{error}: it is read from its begin")
        self._left_alone.pop(name, None)
        self._known.pop(name, None)
        self._tails[name] = _Tail(reader, made_ns)
        process = process_of(reader.identity, os.environ)
        self._tracker.add_ring(name, process, handled_key=handled_key)
        self.counts.rings += 1

    def _drain(
        self,
        name: str,
        now_ns: int,
        sink_position: SinkPosition | None,
        *,
        max_reads: int = _MAX_READS,
        final: bool = False,
    ) -> bool:
        """Feeds what a ring holds; whether it was read to its end."""
        tail = self._tails[name]
        for _ in range(max_reads):
            position = tail.reader.position()
            try:
                records = tail.reader.read(final=final)
            except (OSError, RingError) as error:
                self._damaged(name, error)
                return True
            self._count_losses(name, tail)
            if not records:
                return True
            self.counts.records += len(records)
            appeared = self._tracker.feed(name, records, now_ns)
            if sink_position is not None:
                for root in appeared:
                    tail.since.setdefault(root, (position, sink_position))
        return False

    def _count_losses(self, name: str, tail: _Tail) -> None:
        missed, torn = tail.reader.missed - tail.missed, tail.reader.torn - tail.torn
        if not missed and not torn:
            return
        tail.missed, tail.torn = tail.reader.missed, tail.reader.torn
        self.counts.missed += missed
        self.counts.torn += torn
        self._tracker.records_missed(name, missed + torn)
        if missed:
            self._say_once(
                f"{tail.reader.identity.instance} records faster than the agent reads: records "
                "were overwritten, and are counted. Give its recorder a larger ring"
            )

    def _damaged(self, name: str, error: Exception) -> None:
        self.counts.unreadable += 1
        _log.error("a ring is left out from here: %s", error)
        self._leave(name, None, "ring_damaged")

    def _leave(self, name: str, gone_ns: int | None, reason: str) -> None:
        tail = self._tails.pop(name)
        self._tracker.ring_gone(name, gone_ns, reason)
        self._known[name] = RingState(
            made_ns=tail.made_ns, position=tail.reader.position(), finished=True
        )
        tail.reader.close()

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning("%s", message)
