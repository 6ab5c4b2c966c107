"""What became of the processes of a run, and what their recorders and the agent lost.

Owns reading the agent's totals together with the headers of the rings: these also tell of a
process that died while no agent was there to notice. Which of it breaks a rule is
`pdtrace.check`'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdtrace.analysis.sources import RINGS_FOLDER, TRACES_FOLDER, rings_folder
from pdtrace.errors import LiveError, RingError
from pdtrace.export.sink import has_writer
from pdtrace.export.spill import CURSORS_NAME, Waiting, read_waiting
from pdtrace.inflight import ProcessState
from pdtrace.live.looks import RingLooks, unlisted
from pdtrace.live.process_view import process_now, standing
from pdtrace.ring import Counter, RingReader, WriterState, scan_rings
from pdtrace.ring.losses import Losses, RingLosses, WriterEnd, read_losses
from pdtrace.stages import Gauge

_UNDER_WAY_NS = 10_000_000_000
"""Spans that have waited for less are under way, if an agent is there."""

_LOST_WORDS = {
    "missed": "overwritten before they were read",
    "torn": "torn",
    "unknown": "of kinds that this version does not know",
    "dropped": "that could not be written",
}
"""Kinds of lost records, in words."""

_SHED_WORDS = {
    "shed_steps": "steps",
    "shed_waits": "waits",
    "shed_attributes": "marks' attributes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHealth:
    """One recording process; `losses` are totals by kind (`pdtrace.ring.losses.KINDS`).

    ended          None while it lives, or where nobody saw its end
    standing       why it cannot go on though it lives, a clause; None if it can
    last_sign_ns   Unix time at which its loop last went round, of one that cannot go on or ended
                   without a word; None where its ring does not say
    open_requests  requests that it had open when it ended
    """

    role: str
    instance: str
    pid: int
    ended: WriterEnd | None = None
    standing: str | None = None
    last_sign_ns: int | None = None
    open_requests: int = 0
    open_ids: tuple[str, ...] = ()
    losses: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def vanished(self) -> str:
        """`decode-0 (pid 12) was killed, or ended without a word, with 3 requests open`."""
        return (
            f"{self.instance} (pid {self.pid}) was killed, or ended without a word, with "
            f"{_many(self.open_requests, 'request')} open"
        )

    @property
    def lost(self) -> str | None:
        """`lost 123 records (97 overwritten before they were read, 26 torn)`, or None."""
        counts = {word: self.losses.get(kind, 0) for kind, word in _LOST_WORDS.items()}
        total = sum(counts.values())
        clauses = [f"{count} {word}" for word, count in counts.items() if count]
        what = f"lost {_many(total, 'record')} ({', '.join(clauses)})" if total else ""
        if errors := self.losses.get("errors", 0):
            what += f"{' and ' if what else ''}swallowed {_many(errors, 'recording error')}"
        return what or None

    @property
    def shed(self) -> str | None:
        """What its recorder left out to keep within its budget, or None."""
        clauses = [
            f"{count} {word}"
            for kind, word in _SHED_WORDS.items()
            if (count := self.losses.get(kind, 0))
        ]
        return f"left out {', '.join(clauses)} to keep within its budget" if clauses else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHealth:
    """One run directory.

    unreadable  why it could not be read, or not to its end, by name of the ring
    losses      the agent's totals; `losses.problem` where there are none
    """

    run: str
    processes: tuple[ProcessHealth, ...]
    unreadable: Mapping[str, str]
    losses: Losses
    waiting: Sequence[Waiting] = ()
    has_agent: bool = False

    @property
    def is_ill(self) -> bool:
        """Whether a process vanished, records were lost or a ring cannot be read."""
        return bool(self.unreadable) or any(
            process.ended is WriterEnd.LOST or process.lost for process in self.processes
        )

    @property
    def unseen(self) -> tuple[str, ...]:
        """A sentence on requests that ended and that the traces lack; none where they lack none."""
        missing = self.losses.evicted + self.losses.lines_lost
        if not missing:
            return ()
        were = "request was" if missing == 1 else "requests were"
        return (f"{self.run}: {missing} {were} given up or could not be written: no trace.",)


def read_health(run: Path) -> RunHealth:
    """What is known of a run directory. Never raises; what cannot be read is said."""
    losses = read_losses(run)
    known = dict(losses.rings)
    unreadable = {name: ring.unreadable for name, ring in known.items() if ring.unreadable}
    if (trouble := unlisted(rings_folder(run))) is not None:
        unreadable[RINGS_FOLDER] = trouble
    unnoticed: set[str] = set()
    standings: dict[str, str | None] = {}
    last_signs: dict[str, int | None] = {}
    for path in scan_rings(rings_folder(run)):
        try:
            with RingReader(path) as reader:
                writer = reader.writer_state()
                is_unread = writer is WriterState.CLOSED and _is_begun(losses.rings.get(path.name))
                standings[path.name] = _standing(reader, writer)
                if writer is WriterState.DEAD or standings[path.name] is not None:
                    last_signs[path.name] = _last_sign(reader)
                known[path.name], ended_unseen = _merged(known.get(path.name), reader)
        except FileNotFoundError:
            continue  # the agent has deleted it since: it was delivered
        except RingError as error:
            unreadable[path.name] = str(error)
        except OSError as error:
            unreadable[path.name] = f"{path}: {error.strerror or error}"
        else:
            if ended_unseen:
                unnoticed.add(path.name)
            elif is_unread:
                unreadable[path.name] = (
                    "no agent has read it to its end: pdtrace agent --until-closed "
                    f"--rings {rings_folder(run)} --out {run}"
                )
    open_then = _open_requests(run) if unnoticed else {}
    processes = [
        ProcessHealth(
            role=ring.role,
            instance=ring.instance,
            pid=ring.pid,
            ended=ring.ended,
            standing=standings.get(name),
            last_sign_ns=last_signs.get(name),
            open_requests=open_then.get((ring.instance, ring.pid), 0)
            if name in unnoticed
            else ring.open_requests,
            open_ids=ring.open_ids,
            losses=ring.counts(),
        )
        for name, ring in known.items()
        if ring.instance
    ]
    processes += [
        ProcessHealth(role=ring.role, instance=ring.instance, pid=ring.pid, losses=ring.counts())
        for ring in losses.earlier.values()
    ]
    processes.sort(key=lambda process: (process.instance, process.pid))
    has_agent = has_writer(run / TRACES_FOLDER)
    return RunHealth(
        run=str(run),
        processes=tuple(processes),
        unreadable=unreadable,
        losses=losses,
        waiting=_waiting(run, has_agent=has_agent),
        has_agent=has_agent,
    )


def _standing(reader: RingReader, writer: WriterState) -> str | None:
    if writer is not WriterState.ALIVE:
        return None  # `ended` tells
    return standing(process_now(reader.identity, writer, reader.gauges(), open_requests=0))


def _last_sign(reader: RingReader) -> int | None:
    progress_ns = reader.gauges().get(Gauge.LAST_PROGRESS_NS)
    return None if progress_ns is None else reader.identity.anchor.to_wall_ns(progress_ns)


def _waiting(run: Path, *, has_agent: bool) -> list[Waiting]:
    found = read_waiting(run / TRACES_FOLDER, run / CURSORS_NAME)
    lately_ns = time.time_ns() - _UNDER_WAY_NS
    return [
        waiting
        for waiting in found
        if not has_agent or waiting.failing is not None or waiting.since_unix_ns < lately_ns
    ]


def _is_begun(known: RingLosses | None) -> bool:
    """Whether an agent has read a ring, but not to where its writer ended."""
    return known is not None and known.ended is None


_HEADER = {
    "dropped": Counter.DROPPED,
    "errors": Counter.ERRORS,
    "truncated": Counter.TRUNCATED,
    "shed_steps": Counter.SHED_STEPS,
    "shed_waits": Counter.SHED_WAITS,
    "shed_attributes": Counter.SHED_ATTRIBUTES,
}


def _merged(known: RingLosses | None, reader: RingReader) -> tuple[RingLosses, bool]:
    """What the agent wrote down, brought up to date from the ring's header; and whether its writer
    was lost without the agent having noticed."""
    identity = reader.identity
    made_ns = identity.anchor.wall_ns
    if known is None or known.made_ns != made_ns:
        known = RingLosses(
            made_ns=made_ns, role=identity.role.value, instance=identity.instance, pid=identity.pid
        )
    counters = reader.counters()
    counts = {kind: counters.get(counter, 0) for kind, counter in _HEADER.items()}
    unseen = known.ended is None and reader.writer_state() is WriterState.DEAD
    if unseen:
        return msgspec.structs.replace(known, ended=WriterEnd.LOST, **counts), True
    return msgspec.structs.replace(known, **counts), False


def _open_requests(run: Path) -> dict[tuple[str, int], int]:
    """How many requests lost processes had open, by instance and pid, from their rings."""
    try:
        looks = RingLooks(run)
    except LiveError:
        return {}
    try:
        return {
            (process.instance, process.pid): process.open_requests
            for process in looks.look().processes
            if process.state is ProcessState.LOST
        }
    finally:
        looks.close()


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
