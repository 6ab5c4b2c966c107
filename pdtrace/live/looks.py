"""What is in flight right now: read from the rings of a run directory, or asked of an agent.

Owns following rings without an agent, what their headers say of the processes, and the request to
an agent's `/inflight`, of which HTTP is `pdtrace.web_answers`'. Only reads, so it works while any
process is stopped or dead. What is shown of it is `pdtrace.terminal.top`'s.
"""

from __future__ import annotations

import os
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pdtrace.analysis.recent import recent_requests
from pdtrace.analysis.sources import TRACES_FOLDER, resolve_run, rings_folder, shown_run
from pdtrace.assembly.collected import CollectedRequest
from pdtrace.assembly.request_spans import assemble
from pdtrace.assembly.resource import process_of
from pdtrace.assembly.tracker import RequestTracker
from pdtrace.errors import LiveError, RingError
from pdtrace.inflight import END_UNKNOWN, InFlight, Look, ProcessNow
from pdtrace.live.process_view import needed_by, now_ns_on, process_now
from pdtrace.live.stuck import RollingStageTimes, StuckPolicy
from pdtrace.ring import (
    EndRecord,
    MarkRecord,
    OpenRecord,
    Record,
    RingIdentity,
    RingReader,
    WriterState,
    scan_rings,
)
from pdtrace.ring.losses import STATE_NAME
from pdtrace.ring.records import LossRecord
from pdtrace.stages import Gauge, Role
from pdtrace.web_answers import Asked, Web

DEFAULT_TIMEOUT_S = 5.0
MAX_REQUESTS = 100_000
"""Asked of an agent at most."""
MAX_LEARNT = 200
"""Finished requests, the latest ones, that one look learns usual times from."""
MAX_KEPT = 5_000
"""Finished requests, the latest ones, kept to be asked for."""

_PATH = "/inflight"
_WITHOUT_AGENT = "the rings tell without an agent: give the run directory"
_ASKED = Asked(
    error=LiveError,
    give="give http://HOST:PORT as the agent prints it",
    late=_WITHOUT_AGENT,
    large=_WITHOUT_AGENT,
    refused=f"no agent listens there; {_WITHOUT_AGENT}",
    other="is it an agent?",
    proxies=False,  # no proxy knows an agent
)
_MAX_WORDS = 200
_MAX_READS = 64
_FEW = 1_000
_ROLES = tuple(Role)


class LookSource(Protocol):
    """Where looks come from; both sources here, and fakes in tests."""

    @property
    def name(self) -> str:
        """What is looked at, for people."""
        ...

    def look(self) -> Look:
        """What is in flight now. Raises LiveError if that cannot be known."""
        ...

    def close(self) -> None:
        """Lets go of files. Idempotent."""
        ...


class AgentLooks:
    """Looks of an agent: it has read every record since it began, rings only keep the latest.

    advise  whether errors say what to do instead

    Raises LiveError for what is no address.
    """

    def __init__(
        self, url: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, advise: bool = True
    ) -> None:
        self._asked = _ASKED if advise else _ASKED.plainly()
        self._web = Web(url, self._asked, timeout_s=timeout_s)
        self._web.url = self.name = self._web.url.removesuffix(_PATH)

    def look(self) -> Look:
        """What the agent knows. Raises LiveError if it does not answer as an agent does."""
        answer = self._web.get(_PATH, {"limit": str(MAX_REQUESTS)})
        if answer.status != HTTPStatus.OK:
            raise self._no_agent(f"answers {answer.status} {answer.reason}")
        try:
            return msgspec.json.decode(answer.body, type=Look)
        except (msgspec.MsgspecError, RecursionError) as error:
            words = str(error)[:_MAX_WORDS]
            raise self._no_agent(f"answers, but not as an agent does ({words})") from error

    def close(self) -> None:
        """Nothing is held between looks."""

    def _no_agent(self, what: str) -> LiveError:
        advice = f"; {self._asked.other}" if self._asked.other else ""
        return LiveError(f"{self.name}: {what}{advice}")


def _reason(error: object) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@dataclass(slots=True)
class _Ring:
    """A ring that is followed. `open_keys`: attempts that its process has not let go of.

    oldest_ns    when the oldest record was written that it still held at the first read; None if
                 it held everything from the begin
    overwritten  records that were lost between two reads here
    """

    identity: RingIdentity
    reader: RingReader | None
    state: WriterState = WriterState.ALIVE
    open_keys: set[int] = field(default_factory=set[int])
    gauges: dict[Gauge, int] = field(default_factory=dict[Gauge, int])
    seen_alive: bool = False
    caught_up: bool = False
    has_been_read: bool = False
    oldest_ns: int | None = None
    missed: int = 0
    overwritten: int = 0
    torn: int = 0

    @property
    def is_gateway(self) -> bool:
        return self.identity.role is Role.GATEWAY


class RingLooks:
    """Looks at the rings of run directories, without an agent and without disturbing one.

    The first look reads what the rings hold, later ones what was added. Not thread-safe.

    sources  run directories, folders of runs (the newest counts), or folders of rings; several
             where a request crosses hosts
    keep     whether finished requests are kept, for `find`
    policy   when a request is stuck; None: as the run's agent has it

    Raises LiveError if there is no such directory, or this user cannot list it.
    """

    def __init__(
        self, *sources: str | Path, keep: bool = False, policy: StuckPolicy | None = None
    ) -> None:
        self._sources = sources
        self.runs = [resolve_run(Path(source)) for source in sources]
        for source, run in zip(sources, self.runs, strict=True):
            if not run.is_dir():
                what = "a file has nothing in flight" if run.is_file() else "no such directory"
                raise LiveError(
                    f"{source}: {what}; give a run directory, or http://HOST:PORT of an agent"
                )
        self._directories = [rings_folder(run) for run in self.runs]
        for directory in self._directories:
            if (trouble := unlisted(directory)) is not None:
                raise LiveError(trouble)
        self._policy = _policy_of(self.runs) if policy is None else policy
        self._tracker = RequestTracker()
        self._rings: dict[str, _Ring] = {}
        self._unreadable: dict[str, str] = {}
        self._times = RollingStageTimes()
        self._learns_from_traces = True
        self._kept: deque[CollectedRequest] | None = deque(maxlen=MAX_KEPT) if keep else None

    @property
    def name(self) -> str:
        """The sources; of a folder of runs the run that is the newest now."""
        return " + ".join(map(shown_run, self._sources))

    def look(self) -> Look:
        """What the rings say now."""
        self._read()
        now_ns = self._now_ns()
        requests = [self._described(request, now_ns) for request in self._in_flight(now_ns)]
        return Look(
            at_ns=time.time_ns(),
            requests=tuple(requests),
            processes=tuple(self._processes(needed_by(requests))),
            problems=tuple(self._problems()),
        )

    def find(self, root_span_ids: Iterable[str]) -> list[CollectedRequest]:
        """Requests by the ids of their roots, in flight or (with `keep`) finished."""
        wanted = set(root_span_ids)
        now_ns = self._now_ns()
        names = {r.request_id for r in self._in_flight(now_ns) if r.root_span_id in wanted}
        found = [request for name in names for request in self._tracker.peek(name, now_ns)]
        found += self._kept or ()
        return [request for request in found if request.root_span_id in wanted]

    def kept(self) -> Sequence[CollectedRequest]:
        """Finished requests that the rings still hold, the latest last."""
        return tuple(self._kept or ())

    def close(self) -> None:
        """Closes the rings. Idempotent."""
        for ring in self._rings.values():
            if ring.reader is not None:
                ring.reader.close()
                ring.reader = None

    # -- reading -----------------------------------------------------------------------------

    def _read(self) -> None:
        """Reads what the rings hold: gateways first, so that whatever led to the end of a request
        is in the other rings already."""
        self._find()
        caught_up = False
        while not caught_up:
            now_ns = time.monotonic_ns()
            gateways = [name for name, ring in self._rings.items() if ring.is_gateway]
            for name in gateways:
                self._drain(name, now_ns, max_reads=1)
            self._find()
            for name in [name for name, ring in self._rings.items() if not ring.is_gateway]:
                self._drain(name, now_ns)
            self._take_leave()
            self._learn(self._tracker.finished(now_ns))
            caught_up = all(self._rings[name].caught_up for name in gateways)

    def _find(self) -> None:
        for directory in self._directories:
            for path in scan_rings(directory):
                if str(path) not in self._rings:
                    self._open(path)

    def _open(self, path: Path) -> None:
        name = str(path)
        try:
            reader = RingReader(path)
        except FileNotFoundError:
            return
        except RingError as error:
            self._unreadable[name] = str(error)
            return
        except OSError as error:
            self._unreadable[name] = f"{path}: {error.strerror or error}"
            return
        self._unreadable.pop(name, None)
        self._rings[name] = _Ring(reader.identity, reader)
        self._tracker.add_ring(name, process_of(reader.identity, os.environ))

    def _drain(self, name: str, now_ns: int, *, max_reads: int = _MAX_READS) -> None:
        """Feeds what a ring holds, to its end unless that takes more than `max_reads`."""
        ring = self._rings[name]
        if ring.reader is None:
            return
        try:
            # Before reading: what a writer wrote before it was found gone is then read.
            ring.state = ring.reader.writer_state()
            gone = ring.state is not WriterState.ALIVE
            for _ in range(max_reads):
                records = self._without_former_losses(
                    ring, ring.reader.read(final=gone, losses=True)
                )
                self._tracker.feed(name, records, now_ns)
                for record in records:
                    if isinstance(record, OpenRecord):
                        ring.open_keys.add(record.key)
                    elif isinstance(record, EndRecord):
                        ring.open_keys.discard(record.key)
                # While it is being written there may always be more: a little is the end.
                ring.caught_up = len(records) < (1 if gone else _FEW)
                if ring.caught_up:
                    self._tracker.read_to_end(name, now_ns)
                    break
            ring.gauges = ring.reader.gauges()
        except (OSError, RingError) as error:
            self._unreadable[name] = _reason(error)
            self._leave(name, "ring_damaged")

    def _without_former_losses(self, ring: _Ring, records: list[Record]) -> list[Record]:
        """What was read, with its losses counted. What was overwritten before anybody looked is no
        loss but for what was in flight already then."""
        assert ring.reader is not None
        missed = ring.reader.missed - ring.missed
        ring.missed, ring.torn = ring.reader.missed, ring.reader.torn
        if ring.has_been_read:
            ring.overwritten += missed
        elif missed and records:
            marks = (record.t_ns for record in records if isinstance(record, MarkRecord))
            ring.oldest_ns = next(marks, None)
            records = [
                record
                for record in records
                if not (isinstance(record, LossRecord) and record.overwritten)
            ]
        ring.has_been_read = ring.has_been_read or bool(records)
        return records

    def _take_leave(self) -> None:
        for name, ring in self._rings.items():
            if ring.reader is None:
                continue
            if ring.state is WriterState.ALIVE:
                ring.seen_alive = True
            elif ring.caught_up:
                closed = ring.state is WriterState.CLOSED
                self._leave(name, "process_exited" if closed else "process_lost")

    def _leave(self, name: str, reason: str) -> None:
        ring = self._rings[name]
        ring.caught_up = True
        self._tracker.ring_gone(name, time.monotonic_ns() if ring.seen_alive else None, reason)
        if ring.reader is not None:
            ring.reader.close()
            ring.reader = None

    # -- usual times -------------------------------------------------------------------------

    def _learn(self, finished: Sequence[CollectedRequest]) -> None:
        if self._kept is not None:
            self._kept.extend(finished)
        if self._learns_from_traces:
            self._learns_from_traces = False
            for run in self.runs:
                for spans in recent_requests(run / TRACES_FOLDER):
                    self._times.add(spans)
        for request in finished[-MAX_LEARNT:]:
            spans = assemble(request)
            if spans:
                self._times.add(spans)

    # -- describing --------------------------------------------------------------------------

    def _in_flight(self, now_ns: int) -> list[InFlight]:
        """Whatever somebody holds, or somebody routed to has not spoken of. What everybody let go
        of, and whose end was overwritten, was over before this look."""
        live = (name for name, ring in self._rings.items() if ring.reader is not None)
        held = {request_id for name in live for request_id in self._tracker.held_in(name)}
        return [
            request
            for request in self._tracker.in_flight(now_ns)
            if request.request_id in held or request.ended not in {None, END_UNKNOWN}
        ]

    def _now_ns(self) -> int:
        """This instant on the clock of the gateway's host: ages count on it."""
        rings = list(self._rings.values())
        home = next((ring for ring in rings if ring.is_gateway), rings[0] if rings else None)
        return time.monotonic_ns() if home is None else now_ns_on(home.identity)

    def _described(self, request: InFlight, now_ns: int) -> InFlight:
        time_of = self._times.of(request.mode, request.stage) if request.stage else None
        usual_s, p99_s = (time_of.usual_s, time_of.p99_s) if time_of else (None, None)
        incomplete = request.incomplete
        begun_ns = now_ns - round(request.age_s * 1e9)
        workers = {request.worker, request.prefill_worker, request.decode_worker}
        if any(
            ring.oldest_ns is not None
            and begun_ns < ring.oldest_ns
            and (ring.is_gateway or ring.identity.instance in workers)
            for ring in self._rings.values()
        ):
            overwritten = "its first records were overwritten; an agent's address shows all"
            incomplete = f"{incomplete}; {overwritten}" if incomplete else overwritten
        request = msgspec.structs.replace(
            request, usual_s=usual_s, p99_s=p99_s, incomplete=incomplete
        )
        return msgspec.structs.replace(request, stuck=self._policy.is_stuck(request))

    def _processes(self, needed: Set[str]) -> list[ProcessNow]:
        """The latest process of each name, and former ones that left requests open.

        needed  instances that requests in flight were sent to, whether or not they know yet
        """
        latest: dict[tuple[str, Role, str], _Ring] = {}
        for ring in self._rings.values():
            key = (ring.identity.host_id, ring.identity.role, ring.identity.instance)
            before = latest.get(key)
            if before is None or before.identity.anchor.wall_ns < ring.identity.anchor.wall_ns:
                latest[key] = ring
        current = {id(ring) for ring in latest.values()}
        shown = [
            ring
            for ring in self._rings.values()
            if id(ring) in current or (ring.state is WriterState.DEAD and ring.open_keys)
        ]
        shown.sort(key=lambda ring: (_ROLES.index(ring.identity.role), ring.identity.instance))
        return [
            process_now(
                ring.identity,
                ring.state,
                ring.gauges,
                open_requests=len(ring.open_keys),
                is_needed=ring.identity.instance in needed,
            )
            for ring in shown
        ]

    def _problems(self) -> list[str]:
        problems = [self._unreadable[name] for name in sorted(self._unreadable)]
        if not self._rings and not problems:
            problems.append(f"no ring in {' or '.join(map(str, self._directories))} yet")
        lost: Tally[str] = Tally()
        torn: Tally[str] = Tally()
        for ring in self._rings.values():
            torn[ring.identity.instance] += ring.torn
            lost[ring.identity.instance] += ring.overwritten
        problems += [
            f"{instance} wrote {count} records faster than they were read here"
            for instance, count in sorted(lost.items())
            if count
        ]
        problems += [
            f"{count} record{'' if count == 1 else 's'} of {instance} torn"
            for instance, count in sorted(torn.items())
            if count
        ]
        return problems


def unlisted(directory: Path) -> str | None:
    """Why this user cannot see which rings are in a directory; None if it can, or there is none."""
    if not directory.is_dir():
        return None
    if os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
        return None
    return f"{directory}: permission denied; ask as the user that runs the server"


def is_live(run: Path) -> bool:
    """Whether a process still writes to a ring of a run directory."""
    for path in scan_rings(rings_folder(run)):
        try:
            with RingReader(path) as reader:
                if reader.writer_state() is WriterState.ALIVE:
                    return True
        except (OSError, RingError):
            continue
    return False


class _AgentState(msgspec.Struct, frozen=True):
    """What is wanted of an agent's state."""

    stuck: dict[str, Any] = {}


def _policy_of(runs: Iterable[Path]) -> StuckPolicy:
    """What the agent of the first run that had one calls stuck, else the usual rule."""
    for run in runs:
        try:
            state = msgspec.json.decode((run / STATE_NAME).read_bytes(), type=_AgentState)
            if state.stuck:
                return msgspec.convert(state.stuck, StuckPolicy)
        except (OSError, msgspec.MsgspecError):
            continue
    return StuckPolicy()
