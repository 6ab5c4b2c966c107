"""For tests of programs that record marks: rings in memory, a fake clock and ids, whole requests.

    clock = FakeClock()
    rings = MemoryRings(clock=clock)
    record_request(rings.recorders, stage_ms={"decode.reserve": 900.0})
    rings.records(Role.DECODE)   # what the decode process recorded

Recorders made here raise on recording errors instead of counting them. Nothing here is imported by
production code.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

from pdtrace.clock import SYSTEM_CLOCK, Clock
from pdtrace.propagation import RemoteParent, RequestContext
from pdtrace.recorder import MAX_BLOCKERS, Recorder, RequestTrace
from pdtrace.ring.codec import fit_ids
from pdtrace.ring.identity import make_identity
from pdtrace.ring.layout import RingCapacity, RingIdentity
from pdtrace.ring.reader import RingReader
from pdtrace.ring.records import Record, Value
from pdtrace.ring.writer import RingWriter
from pdtrace.stages import (
    CHAINS,
    STAGE_BY_NAME,
    Mark,
    Mode,
    Outcome,
    Role,
    Stage,
    StepKind,
    WaitReason,
)

SMALL_RING = RingCapacity(blocks=16, block_bytes=16 * 1024)
"""Room for about 8,000 marks."""


class FakeClock:
    """A clock that stands still until told otherwise. Nanoseconds."""

    def __init__(
        self,
        monotonic_ns: int = 1_000_000_000_000,
        wall_ns: int = 1_750_000_000_000_000_000,
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._wall_ns = wall_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def wall_ns(self) -> int:
        return self._wall_ns

    def advance(self, *, s: float = 0, ms: float = 0, ns: int = 0) -> None:
        """Move both times forward."""
        step_ns = round(s * 1e9) + round(ms * 1e6) + ns
        self._monotonic_ns += step_ns
        self._wall_ns += step_ns

    def step_wall(self, ns: int) -> None:
        """Move wall time alone, as a time server does."""
        self._wall_ns += ns


class SequentialIds:
    """Ids 1, 2, 3, … of each kind; `first` sets apart makers used in one test."""

    def __init__(self, first: int = 1) -> None:
        self._trace = self._span = self._request = self._handoff = first - 1

    def trace_id(self) -> str:
        self._trace += 1
        return f"{self._trace:032x}"

    def span_id(self) -> str:
        self._span += 1
        return f"{self._span:016x}"

    def request_id(self) -> str:
        self._request += 1
        return f"req-{self._request}"

    def handoff_id(self) -> str:
        self._handoff += 1
        return f"ho-{self._handoff}"


class _Recorders(dict[Role, Recorder]):
    """Recorder per role, made when first asked for."""

    def __init__(self, rings: MemoryRings) -> None:
        super().__init__()
        self._rings = rings

    def __missing__(self, role: Role) -> Recorder:
        return self._rings.recorder(role)


class MemoryRings:
    """Recorders whose rings live in this process's memory, in the format of the files."""

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM_CLOCK,
        capacity: RingCapacity = SMALL_RING,
        budget: float | None = None,
    ) -> None:
        """budget: as for `Recorder.open`, off by default."""
        self._clock = clock
        self._budget = budget
        self._capacity = capacity
        self._readers: dict[tuple[Role, str], RingReader] = {}
        self._by_instance: dict[tuple[Role, str], Recorder] = {}
        self.recorders: Mapping[Role, Recorder] = _Recorders(self)
        """Recorder of each role's instance `<role>-0`."""

    def recorder(self, role: Role, instance: str | None = None) -> Recorder:
        """The recorder of an instance (`<role>-0` when None), made when first asked for."""
        default = f"{role.value}-0"
        name = default if instance is None else instance
        recorder = self._by_instance.get((role, name))
        if recorder is None:
            recorder = self._make(role, name)
            self._by_instance[role, name] = recorder
            if name == default and isinstance(self.recorders, dict):
                self.recorders[role] = recorder
        return recorder

    def _make(self, role: Role, instance: str) -> Recorder:
        def make_ring() -> tuple[RingWriter, Path | None]:
            identity = make_identity(role=role, instance=instance, resource={}, clock=self._clock)
            buffer = bytearray(self._capacity.file_bytes)
            writer = RingWriter(buffer, identity, self._capacity)
            self._readers[role, instance] = RingReader.over(buffer, name=instance)
            return writer, None

        return Recorder(
            role,
            instance,
            make_ring,
            clock=self._clock,
            raise_errors=True,
            budget=self._budget,
        )

    def reader(self, role: Role, instance: str | None = None) -> RingReader:
        """The one reader that `records` uses for this instance."""
        self.recorder(role, instance)
        return self._readers[role, f"{role.value}-0" if instance is None else instance]

    def records(self, role: Role, instance: str | None = None) -> list[Record]:
        """What an instance recorded since the last call, in order."""
        return self.reader(role, instance).read()

    def read(self) -> list[tuple[RingIdentity, Record]]:
        """What every instance recorded since the last call, instance by instance."""
        return [
            (reader.identity, record)
            for reader in self._readers.values()
            for record in reader.read()
        ]


def open_recorders(
    directory: str | Path,
    *,
    roles: Sequence[Role] = tuple(Role),
    clock: Clock = SYSTEM_CLOCK,
    capacity: RingCapacity = SMALL_RING,
) -> dict[Role, Recorder]:
    """Recorders of instances `<role>-0` with ring files in `directory`; the caller closes them."""
    return {
        role: Recorder.open(
            directory,
            role=role,
            instance=f"{role.value}-0",
            clock=clock,
            capacity=capacity,
            raise_errors=True,
            budget=None,
        )
        for role in roles
    }


HEALTHY_STAGE_MS: Mapping[str, float] = {
    "gateway.ingest": 2.0,
    "gateway.queue": 0.2,
    "gateway.route": 0.1,
    "gateway.dispatch": 0.2,
    "hop.dispatch": 0.5,
    "decode.reserve": 0.4,
    "hop.publish": 0.5,
    "prefill.queue": 3.0,
    "prefill.compute": 120.0,
    "transfer": 4.0,
    "hop.notice": 2.0,
    "decode.queue": 1.0,
    "decode.first": 0.1,
    "hop.token": 0.8,
    "decode.generate": 400.0,
    "gateway.finish": 1.0,
}
"""Durations of the chain stages of a request that nothing delays."""


class Wait(TypedDict, total=False):
    """What a wait says; fields as in `RequestTrace.wait`."""

    reason: WaitReason
    needed: int
    free: int
    limit: int
    position: int
    blocker: str | Sequence[str]


_ENDS = frozenset({Mark.CHUNK_FINISHED, Mark.COPY_FINISHED})


class _Event(NamedTuple):
    t_ns: int
    role: Role
    mark: Mark
    values: tuple[Value, ...]


class _Step(NamedTuple):
    t_ns: int  # its end
    role: Role
    kind: StepKind
    begin_ns: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """What `record_request` recorded, to compare with what comes out at the other end.

    stages  chain stage -> (begin, end), CLOCK_MONOTONIC ns, in causal order; they sum to the whole.
            The stage in which the request stopped ends where it was given up, and is left out while
            the request is still in flight
    marks   (time, role, mark) of everything recorded, in order
    steps   (begin, end, role, kind) of its forward passes, in order of their ends; empty unless
            asked for
    """

    context: RequestContext
    begin_ns: int
    end_ns: int
    stages: Mapping[str, tuple[int, int]]
    marks: Sequence[tuple[int, Role, Mark]]
    steps: Sequence[tuple[int, int, Role, StepKind]] = ()


def record_request(
    recorders: Mapping[Role, Recorder],
    *,
    context: RequestContext | None = None,
    request_id: str = "req-1",
    parent: RemoteParent | None = None,
    mode: Mode = Mode.PD,
    start_ns: int | None = None,
    stage_ms: Mapping[str, float] | None = None,
    waits: Mapping[str, Wait] | None = None,
    outcome: Outcome | None = Outcome.COMPLETED,
    stop_in: str | None = None,
    reason: str | None = None,
    by: str | None = None,
    prompt_tokens: int = 256,
    output_tokens: int = 32,
    chunks: int = 1,
    steps: bool = False,
) -> RecordedRequest:
    """Record one request through all its processes: the chain of `mode` and what stands beside it.

    recorders  by role, as `MemoryRings.recorders` or `open_recorders` give them
    context    identity; made from `request_id`, `parent` and `mode` when None
    start_ns   CLOCK_MONOTONIC ns of RECEIVED; the gateway recorder's clock when None
    stage_ms   milliseconds of chain stages; HEALTHY_STAGE_MS for those not named
    waits      what the owner of a stage says at that stage's begin
    outcome    COMPLETED; another one together with `stop_in`: the stage's owner aborts at its end
               (says nothing if LOST) and the gateway closes 1 ms later; None: the request is in
               flight in `stop_in` and nothing further is recorded
    chunks     of the prefill, copied one by one
    steps      record a forward pass for each chunk, and for each token after the first

    Raises ValueError for stages that are not in the mode's chain or an outcome without `stop_in`.
    """
    if context is None:
        context = RequestContext.create(request_id=request_id, parent=parent, mode=mode)
    mode = context.mode
    chain = CHAINS[mode]
    names = [stage.name for stage in chain]
    for name in (*(stage_ms or {}), *([stop_in] if stop_in else [])):
        if name not in names:
            raise ValueError(f"{name!r} is not in the chain of {mode.value}: {', '.join(names)}")
    if (outcome is Outcome.COMPLETED) != (stop_in is None):
        raise ValueError("stop_in goes with an outcome other than completed, and with None")

    durations = {**HEALTHY_STAGE_MS, **(stage_ms or {})}
    begin_ns = recorders[Role.GATEWAY].clock.monotonic_ns() if start_ns is None else start_ns
    events = [
        _Event(begin_ns, Role.GATEWAY, Mark.RECEIVED, ("POST", "/v1/chat/completions", "chat"))
    ]
    values = _chain_values(recorders, mode, prompt_tokens, output_tokens)
    stages: dict[str, tuple[int, int]] = {}
    now_ns = begin_ns
    for stage in chain:
        stage_begin_ns = now_ns
        now_ns += round(durations[stage.name] * 1e6)
        owner = _owner(stage, mode)
        if waits and stage.name in waits:
            events.append(_wait_event(stage_begin_ns, owner, stage.name, waits[stage.name]))
        if stage.name != stop_in:
            stages[stage.name] = (stage_begin_ns, now_ns)
            events.append(_Event(now_ns, owner, stage.end, values.get(stage.end, ())))
            continue
        if outcome is not None:
            stages[stage.name] = (stage_begin_ns, now_ns)
            if outcome is not Outcome.LOST:
                events.append(_Event(now_ns, owner, Mark.ABORTED, (outcome, reason, by)))
            now_ns += 1_000_000
            events.append(
                _Event(now_ns, Role.GATEWAY, Mark.COMPLETED, (outcome, reason, by, 503, 0))
            )
        break
    events += _beside_the_chain(stages, mode, chunks, prompt_tokens)
    # Where times tie, what belongs to an ending stage comes first; then the chain in its order.
    of_chain = {Mark.RECEIVED, *(stage.end for stage in chain)}
    events.sort(key=lambda event: (event.t_ns, event.mark not in _ENDS, event.mark not in of_chain))
    passes = _steps(stages, mode, chunks, prompt_tokens, output_tokens) if steps else []

    traces: dict[Role, RequestTrace] = {}
    # A pass is recorded as it ends, before the marks that it led to.
    for event in heapq.merge(passes, events, key=lambda event: event.t_ns):
        trace = traces.get(event.role)
        if trace is None:
            trace = recorders[event.role].begin(context, at_ns=event.t_ns)
            traces[event.role] = trace
        if isinstance(event, _Step):
            recorders[event.role].step(
                event.kind,
                [trace],
                tokens=event.tokens,
                begin_ns=event.begin_ns,
                end_ns=event.t_ns,
            )
        else:
            trace.mark(event.mark, *event.values, at_ns=event.t_ns)
    lost = _owner(STAGE_BY_NAME[stop_in], mode) if outcome is Outcome.LOST and stop_in else None
    if outcome is not None:
        for role, trace in traces.items():
            if role is not lost:
                last_ns = max(event.t_ns for event in events if event.role is role)
                trace.end(at_ns=last_ns)
    return RecordedRequest(
        context=context,
        begin_ns=begin_ns,
        end_ns=now_ns,
        stages=stages,
        marks=[(event.t_ns, event.role, event.mark) for event in events],
        steps=[(step.begin_ns, step.t_ns, step.role, step.kind) for step in passes],
    )


def _owner(stage: Stage, mode: Mode) -> Role:
    """Process that records the stage's end; the worker stands in for both legs when colocated."""
    if mode is Mode.COLOCATED and Role.WORKER in stage.roles:
        return Role.WORKER
    (role,) = stage.roles - {Role.WORKER}
    return role


def _wait_event(t_ns: int, owner: Role, stage: str, wait: Wait) -> _Event:
    blocker = wait.get("blocker")
    if blocker is None or isinstance(blocker, str):
        first, several = blocker, None
    else:
        first, (several, _) = blocker[0], fit_ids(blocker[:MAX_BLOCKERS])
    values = (
        stage,
        wait.get("reason", WaitReason.UNKNOWN),
        wait.get("needed"),
        wait.get("free"),
        wait.get("limit"),
        wait.get("position"),
        first,
        several,
    )
    return _Event(t_ns, owner, Mark.WAITING, values)


def _chain_values(
    recorders: Mapping[Role, Recorder], mode: Mode, prompt_tokens: int, output_tokens: int
) -> Mapping[Mark, tuple[Value, ...]]:
    legs = (Role.WORKER, Role.WORKER) if mode is Mode.COLOCATED else (Role.PREFILL, Role.DECODE)
    prefill, decode = (recorders[role].instance for role in legs)
    pages = -(-(prompt_tokens + output_tokens) // 16)
    return {
        Mark.TOKENIZED: ("smollm2", prompt_tokens, output_tokens, True, mode),
        Mark.ADMITTED: (1,),
        Mark.ROUTED: (prefill, decode, "round_robin", 1, "only pair"),
        Mark.PAGES_RESERVED: (pages, 200),
        Mark.HANDSHAKE_DONE: (pages,),
        Mark.PREFILL_STARTED: (0, 1),
        Mark.KV_LANDED: (prompt_tokens * 46_080,),
        Mark.DECODE_ADMITTED: (1,),
        Mark.DECODE_FINISHED: (output_tokens, "length", 0),
        Mark.COMPLETED: (Outcome.COMPLETED, None, None, 200, output_tokens, "length", 0),
    }


def _beside_the_chain(
    stages: Mapping[str, tuple[int, int]], mode: Mode, chunks: int, prompt_tokens: int
) -> list[_Event]:
    """Marks of the stages that overlap the chain, as far as the request came."""
    events: list[_Event] = []
    colocated = mode is Mode.COLOCATED
    prefill = Role.WORKER if colocated else Role.PREFILL
    decode = Role.WORKER if colocated else Role.DECODE
    if "hop.dispatch" in stages and not colocated:
        events.append(_Event(stages["hop.dispatch"][1], prefill, Mark.PREFILL_RECEIVED, ()))
    if "prefill.compute" in stages:
        begin_ns, end_ns = stages["prefill.compute"]
        edges = [begin_ns + (end_ns - begin_ns) * i // chunks for i in range(chunks + 1)]
        for index in range(chunks):
            started, finished = edges[index], edges[index + 1]
            tokens = prompt_tokens * (index + 1) // chunks - prompt_tokens * index // chunks
            events += [
                _Event(started, prefill, Mark.CHUNK_STARTED, (index, tokens)),
                _Event(finished, prefill, Mark.CHUNK_FINISHED, (index,)),
            ]
            if not colocated:
                events += _copy(stages, index, chunks, finished, tokens)
        if mode is Mode.PD_EARLY:
            events.append(_Event(end_ns, prefill, Mark.FIRST_TOKEN_FORWARDED, ()))
    pages = -(-prompt_tokens // 16)
    if "transfer" in stages:
        landed_ns = stages["transfer"][1]
        events.append(_Event(landed_ns + 100_000, prefill, Mark.SOURCE_RELEASED, (pages,)))
    if "decode.generate" in stages:
        finished_ns = stages["decode.generate"][1]
        events.append(_Event(finished_ns + 50_000, decode, Mark.DECODE_RELEASED, (pages, 200)))
    return events


def _steps(
    stages: Mapping[str, tuple[int, int]],
    mode: Mode,
    chunks: int,
    prompt_tokens: int,
    output_tokens: int,
) -> list[_Step]:
    """Forward passes of the stages that the request came through, one after the other."""
    colocated = mode is Mode.COLOCATED
    passes: list[_Step] = []
    for stage, role, kind, count, tokens in (
        ("prefill.compute", Role.PREFILL, StepKind.PREFILL, chunks, prompt_tokens),
        ("decode.generate", Role.DECODE, StepKind.DECODE, output_tokens - 1, output_tokens - 1),
    ):
        begin_ns, end_ns = stages.get(stage, (0, 0))
        passes += [
            _Step(
                t_ns=begin_ns + (end_ns - begin_ns) * (index + 1) // count,
                role=Role.WORKER if colocated else role,
                kind=kind,
                begin_ns=begin_ns + (end_ns - begin_ns) * index // count,
                tokens=tokens * (index + 1) // count - tokens * index // count,
            )
            for index in range(count if stage in stages else 0)
        ]
    return passes


def _copy(
    stages: Mapping[str, tuple[int, int]], index: int, chunks: int, queued_ns: int, tokens: int
) -> list[_Event]:
    """One chunk's copy job; the last one ends when the KV lands."""
    if index == chunks - 1:
        if "transfer" not in stages:
            return []
        begin_ns, finished_ns = stages["transfer"]
        started_ns = begin_ns + (finished_ns - begin_ns) // 4
    else:
        started_ns, finished_ns = queued_ns + 100_000, queued_ns + 1_100_000
    kv_bytes = tokens * 46_080
    job = (index, -(-tokens // 16), kv_bytes, 1)
    return [
        _Event(queued_ns, Role.TRANSFER, Mark.COPY_QUEUED, job),
        _Event(started_ns, Role.TRANSFER, Mark.COPY_STARTED, (index,)),
        _Event(finished_ns, Role.TRANSFER, Mark.COPY_FINISHED, (index, kv_bytes)),
    ]
