"""One request in flight: what is kept of it, small, and how it looks from outside.

Owns the record of a request and of the legs in it; when a request counts as finished is
`pdtrace.assembly.tracker`'s. A hundred thousand of them are held at a time, so the records are
untracked by the garbage collector: none of them may refer to itself, however far round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from pdtrace import semconv as a
from pdtrace.assembly.alignment import align
from pdtrace.assembly.collected import AttemptIds, CollectedRequest, Leg, Process, StepStats, Stuck
from pdtrace.assembly.evidence import blocker_names, place_of
from pdtrace.assembly.progress import PLANS, Plan, Progress
from pdtrace.inflight import END_UNKNOWN, InFlight, WaitNow
from pdtrace.offsets import ClockOffsets
from pdtrace.propagation import RequestContext
from pdtrace.ring.records import ClockRecord, MarkRecord, Value
from pdtrace.stages import STAGE_BY_NAME, Mark, Mode, Role, Stage, StepKind

_PREFILL_AT = place_of(Mark.ROUTED, a.PREFILL_WORKER)
_DECODE_AT = place_of(Mark.ROUTED, a.DECODE_WORKER)
_PROMPT_AT = place_of(Mark.TOKENIZED, a.PROMPT_TOKENS)
_STREAM_AT = place_of(Mark.TOKENIZED, a.STREAM)
_MODE_AT = place_of(Mark.TOKENIZED, a.MODE)
_OUTCOME_AT = place_of(Mark.COMPLETED, a.OUTCOME)
_WAIT_STAGE_AT = place_of(Mark.WAITING, a.WAIT_STAGE)
_WAIT_REASON_AT = place_of(Mark.WAITING, a.WAIT_REASON)
_NAMING_MARKS = frozenset({Mark.WAITING, Mark.TOKEN_GAP})

TELLING_MARKS = frozenset(
    {
        Mark.RECEIVED,
        Mark.TOKENIZED,
        Mark.ROUTED,
        Mark.DISPATCHED,
        Mark.COMPLETED,
        Mark.WAITING,
    }
)
"""Marks whose values `OpenRequest.told` reads."""


def value_at(record: MarkRecord, place: int) -> Value:
    """A mark's value; None where a writer of another version left it out."""
    values = record.values
    return values[place] if place < len(values) else None


_OFFSET_KEEPS_NS = 100_000_000


@dataclass(slots=True)
class Source:
    """A ring as its requests know it.

    num_missed   records of it that were overwritten or torn so far
    is_foreign   whether its clock is another than the one that ages are counted on
    home_offset  (a time of its own, what to add to reach that clock): good for a while around it
    sampled_ns   its time of the latest round trip to another host; None while there was none
    """

    ring: str
    process: Process
    num_missed: int = 0
    is_foreign: bool = False
    clock: ClockOffsets | None = None
    home_offset: tuple[int, int] | None = None
    sampled_ns: int | None = None

    def sample(self, record: ClockRecord) -> None:
        """Takes in a round trip."""
        if self.clock is None:
            self.clock = ClockOffsets()
        self.clock.add(record)
        self.home_offset = None
        self.sampled_ns = record.t_ns

    def to_home(self, t_ns: int, home: Process, sources: Callable[[], Iterable[Source]]) -> int:
        """A time of its own on the clock of `home`: for ages, so an offset found among the round
        trips of `sources` is used again for what lies near."""
        if not self.is_foreign:
            return t_ns
        near = self.home_offset
        if near is None or abs(t_ns - near[0]) > _OFFSET_KEEPS_NS:
            clocks = [(one.process.clock_id, one.clock) for one in sources() if one.clock]
            own = [clock for clock_id, clock in clocks if clock_id == self.process.clock_id]
            theirs = [clock for clock_id, clock in clocks if clock_id == home.clock_id]
            found = align(self.process, home, t_ns, own=own, theirs=theirs)
            near = self.home_offset = t_ns, found.offset_ns
        return t_ns + near[1]


class _Steps(msgspec.Struct, eq=False, gc=False):
    kind: StepKind
    count: int
    total_ns: int
    slowest_ns: int
    slowest_number: int


class OpenLeg(msgspec.Struct, eq=False, gc=False):
    """What one process has recorded of one attempt.

    root          root span id of the request: a reference to the record itself would be a cycle
    is_held       the process has not let go of it
    missed_before what the ring had lost before, and `missed_until` when the process let go of it
    wait          its latest WAITING mark, and since when the stage has waited for this reason
    """

    root: str
    key: int
    attempt: int
    source: Source
    marks: list[MarkRecord]
    missed_before: int
    missed_until: int | None = None
    is_held: bool = True
    overgrown: int = 0
    lost_at_ns: int | None = None
    lost_reason: str = ""
    wait: MarkRecord | None = None
    wait_since_ns: int = 0
    steps: tuple[_Steps, ...] = ()

    @property
    def role(self) -> Role:
        return self.source.process.role

    @property
    def num_missed(self) -> int:
        """Records of the ring that are missing, and may be this attempt's."""
        until = self.source.num_missed if self.missed_until is None else self.missed_until
        return until - self.missed_before

    def take_step(self, kind: StepKind, number: int, length_ns: int) -> None:
        """The attempt took part in a forward pass."""
        for steps in self.steps:
            if steps.kind is kind:
                steps.count += 1
                steps.total_ns += length_ns
                if length_ns > steps.slowest_ns:
                    steps.slowest_ns, steps.slowest_number = length_ns, number
                return
        self.steps += (_Steps(kind, 1, length_ns, length_ns, number),)

    def take_wait(self, record: MarkRecord) -> None:
        """A decision left the request waiting here."""
        before = self.wait
        if before is None or any(
            value_at(before, place) != value_at(record, place)
            for place in (_WAIT_STAGE_AT, _WAIT_REASON_AT)
        ):
            self.wait_since_ns = record.t_ns
        self.wait = record


class OpenRequest(msgspec.Struct, eq=False, gc=False):
    """A request in flight.

    begun       order of appearance
    begun_ns    its first sign; like `progress` on the clock that ages are counted on
    touched_ns  when a record of it was last read
    ended_ns    when its end was read; None while it goes on
    due_ns      when the tracker looks at it next without being told to
    expected    workers it was sent to
    ids         ids of attempts other than the context's
    outcome     as COMPLETED says
    halted      of those it waits for after its end, who was seen to be kept from running: how, when
    halted_ns   when that was seen last
    """

    context: RequestContext
    begun: int
    begun_ns: int
    touched_ns: int
    progress: Progress
    legs: list[OpenLeg]
    ended_ns: int | None = None
    due_ns: int | None = None
    num_marks: int = 0
    num_held: int = 0
    has_gateway: bool = False
    streams: bool = True
    expected: tuple[str, ...] = ()
    ids: dict[int, AttemptIds] | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    prompt_tokens: int | None = None
    outcome: str | None = None
    stuck: tuple[Stuck, ...] = ()
    halted: dict[str, tuple[str, int]] = {}
    halted_ns: int | None = None

    @property
    def is_held_by_gateway(self) -> bool:
        return any(leg.is_held and leg.role is Role.GATEWAY for leg in self.legs)

    def add_leg(self, ring_key: int, source: Source, context: RequestContext) -> OpenLeg:
        """A process takes up an attempt."""
        attempt = max(context.attempt, 1)
        if attempt != max(self.context.attempt, 1):
            if self.ids is None:
                self.ids = {}
            self.ids[attempt] = _ids_of(context)
        known = next((leg for leg in self.legs if leg.source is source), None)
        leg = OpenLeg(
            root=self.context.root_span_id,
            key=ring_key,
            attempt=attempt,
            source=source,
            marks=[],
            missed_before=source.num_missed if known is None else known.missed_before,
        )
        self.legs.append(leg)
        self.num_held += 1
        self.has_gateway = self.has_gateway or source.process.role is Role.GATEWAY
        return leg

    def told(self, leg: OpenLeg, record: MarkRecord, to_home: ToHome) -> None:
        """Keeps what one of the TELLING_MARKS says."""
        mark = record.mark
        if mark is Mark.WAITING:
            leg.take_wait(record)
        elif mark is Mark.RECEIVED:
            self.begun_ns = min(self.begun_ns, to_home(leg.source, record.t_ns))
        elif mark is Mark.TOKENIZED:
            tokens = value_at(record, _PROMPT_AT)
            self.prompt_tokens = tokens if isinstance(tokens, int) else None
            self.streams = value_at(record, _STREAM_AT) is not False
            mode = _MODES.get(value_at(record, _MODE_AT))
            if mode is not None and PLANS[mode] is not self.progress.plan:
                self._follow(PLANS[mode], (leg, record), to_home)
        elif mark is Mark.ROUTED:
            prefill, decode = value_at(record, _PREFILL_AT), value_at(record, _DECODE_AT)
            if record.attempt >= self.progress.attempt:
                self.prefill_worker = str(prefill) if prefill else None
                self.decode_worker = str(decode) if decode else None
        elif mark is Mark.DISPATCHED:  # not earlier: who was only chosen may never hear of it
            workers = [worker for worker in (self.prefill_worker, self.decode_worker) if worker]
            self.expected = tuple(dict.fromkeys((*self.expected, *workers)))
        elif mark is Mark.COMPLETED:
            outcome = value_at(record, _OUTCOME_AT)
            self.outcome = str(outcome) if outcome else "completed"

    def _follow(self, plan: Plan, last: tuple[OpenLeg, MarkRecord], to_home: ToHome) -> None:
        """The mode is another than thought: what was marked so far counts by its chain."""
        self.progress.restart(plan)
        marked = [(leg, record) for leg in self.legs for record in leg.marks]
        for leg, record in (*marked, last):
            t_ns = to_home(leg.source, record.t_ns)
            self.progress.reach(record.mark, record.attempt or 1, t_ns)

    def collected(
        self,
        *,
        gave_up: str | None,
        resolve: Callable[[str], tuple[str, str] | None],
        open_at_ns: int | None = None,
    ) -> CollectedRequest:
        """All of it in the form that assembly takes; shares no list with this record."""
        context = self.context
        attempts = {max(context.attempt, 1): _ids_of(context), **(self.ids or {})}
        blockers: dict[str, tuple[str, str]] = {}
        for leg in self.legs:
            for record in leg.marks:
                if record.mark in _NAMING_MARKS:
                    for name in blocker_names(record.mark, record.values):
                        found = None if name in blockers else resolve(name)
                        if found is not None:
                            blockers[name] = found
        return CollectedRequest(
            request_id=context.request_id,
            trace_id=context.trace_id,
            root_span_id=context.root_span_id,
            client_parent_span_id=context.client_parent_span_id,
            sampled=context.sampled,
            trace_state=context.tracestate,
            mode=context.mode,
            attempts=attempts,
            legs=_merged(self.legs),
            gave_up=gave_up,
            blockers=blockers,
            open_at_ns=open_at_ns,
            stuck=self.stuck,
        )

    def look(
        self,
        now_ns: int,
        to_home: ToHome,
        only: Mapping[Role, str],
        *,
        lost: str | None = None,
    ) -> InFlight:
        """How it stands at `now_ns`.

        only  the instance of each role that has but one
        lost  what gateways lost that may be of it, if it has none
        """
        progress, context = self.progress, self.context
        in_token = progress.at == progress.plan.token
        stage, since_ns = progress.stage(token_awaited=in_token and self._token_awaited)
        given_up_ns = None if stage is None else self._given_up_ns(stage, to_home)
        if given_up_ns is not None:  # the news travels to the gateway
            stage, since_ns = progress.plan.stages[-1], given_up_ns
        return InFlight(
            request_id=context.request_id,
            trace_id=context.trace_id,
            root_span_id=context.root_span_id,
            attempt=progress.attempt,
            mode=_MODE_OF_PLAN[id(progress.plan)],
            age_s=max(now_ns - self.begun_ns, 0) / 1e9,
            stage=None if stage is None else stage.name,
            stage_age_s=0.0 if stage is None else max(now_ns - since_ns, 0) / 1e9,
            worker=None if stage is None else self._ends_it(stage, only),
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            prompt_tokens=self.prompt_tokens,
            wait=None if stage is None else self._wait_now(stage, now_ns, to_home),
            stuck=bool(self.stuck)
            and any(
                stage is not None
                and (report.stage, report.attempt) == (stage.name, progress.attempt)
                for report in self.stuck
            ),
            ended=self._ended,
            incomplete=self._incomplete(lost),
        )

    def _given_up_ns(self, stage: Stage, to_home: ToHome) -> int | None:
        """When a worker gave up the stage it was to end, of which the gateway has not said anything
        yet; None if none did, or if the gateway's word is another host's."""
        if not self.has_gateway:
            return None
        for leg in self.legs:
            is_its_worker = leg.role in stage.roles and leg.role is not Role.GATEWAY
            if is_its_worker and not leg.is_held and leg.attempt == self.progress.attempt:
                for record in reversed(leg.marks):
                    if record.mark is Mark.ABORTED:
                        return to_home(leg.source, record.t_ns)
        return None

    @property
    def _ended(self) -> str | None:
        if self.outcome is not None:
            return self.outcome
        if self.ended_ns is None:
            is_over = not self.has_gateway and not self.num_held
        else:  # with a gateway that died nobody has ended it: its workers may go on for long
            is_over = not any(
                leg.lost_at_ns is not None for leg in self.legs if leg.role is Role.GATEWAY
            )
        return END_UNKNOWN if is_over else None

    @property
    def _token_awaited(self) -> bool:
        """Whether the gateway will say, or has said for certain, when the first token was sent."""
        return self.streams and any(
            leg.role is Role.GATEWAY and not leg.num_missed for leg in self.legs
        )

    def _ends_it(self, stage: Stage, only: Mapping[Role, str]) -> str | None:
        """The instance that has to end a stage: the one that works on it, else the chosen one, else
        the only one that could."""
        attempt, found = self.progress.attempt, None
        for leg in self.legs:
            if leg.role in stage.roles and (found is None or leg.attempt == attempt):
                found = leg.source.process.instance
        if Role.DECODE in stage.roles:
            return self.decode_worker or found
        if Role.PREFILL in stage.roles:
            return self.prefill_worker or found
        return found or next((only[role] for role in stage.roles if role in only), None)

    def _wait_now(self, stage: Stage, now_ns: int, to_home: ToHome) -> WaitNow | None:
        latest: OpenLeg | None = None
        for leg in self.legs:
            if (
                leg.wait is not None
                and leg.attempt == self.progress.attempt
                and _waits_in(leg, leg.wait, stage)
                and (latest is None or leg.wait_since_ns >= latest.wait_since_ns)
            ):
                latest = leg
        if latest is None or latest.wait is None:
            return None
        since_ns = to_home(latest.source, latest.wait_since_ns)
        return _described(latest.wait, stage, max(now_ns - since_ns, 0) / 1e9)

    def _incomplete(self, lost: str | None) -> str | None:
        why: list[str] = []
        missed: dict[str, int] = {}
        for leg in self.legs:
            instance = leg.source.process.instance
            if leg.lost_at_ns is not None:
                why.append(f"{instance}: {leg.lost_reason}")
            if count := leg.num_missed + leg.overgrown:
                missed[instance] = max(count, missed.get(instance, 0))
        why += [f"{instance} lost {count} records" for instance, count in missed.items()]
        if not self.has_gateway:
            why.append(lost or "nothing from the gateway")
        return "; ".join(why) or None


ToHome = Callable[[Source, int], int]
"""A time of a source, on the clock that ages are counted on."""

_MODES: Mapping[Value, Mode] = {mode.value: mode for mode in Mode}
_MODE_OF_PLAN = {id(plan): mode.value for mode, plan in PLANS.items()}


def plan_of(mode: Mode | None) -> Plan:
    """The chain to follow until TOKENIZED says another."""
    return PLANS[mode or Mode.PD]


def _ids_of(context: RequestContext) -> AttemptIds:
    return AttemptIds(span_id=context.attempt_span_id, handoff_id=context.handoff_id or None)


def _merged(legs: Iterable[OpenLeg]) -> list[Leg]:
    """One leg for each ring, whatever number of attempts it took up."""
    merged: dict[str, Leg] = {}
    missed: dict[str, int] = {}
    overgrown: dict[str, int] = {}
    for leg in legs:
        source = leg.source
        whole = merged.get(source.ring)
        if whole is None:
            whole = merged[source.ring] = Leg(
                process=source.process,
                clock=source.clock,
            )
        whole.marks += leg.marks
        missed[source.ring] = max(leg.num_missed, missed.get(source.ring, 0))
        overgrown[source.ring] = overgrown.get(source.ring, 0) + leg.overgrown
        whole.records_missed = missed[source.ring] + overgrown[source.ring]
        if leg.lost_at_ns is not None:
            whole.lost_at_ns, whole.lost_reason = leg.lost_at_ns, leg.lost_reason
            whole.lost_attempts |= {leg.attempt or 1}
        if leg.steps:
            whole.steps = (*whole.steps, *(_step_stats(steps, leg.attempt) for steps in leg.steps))
    return list(merged.values())


def _step_stats(steps: _Steps, attempt: int) -> StepStats:
    return StepStats(
        kind=steps.kind,
        attempt=attempt,
        count=steps.count,
        total_ns=steps.total_ns,
        slowest_ns=steps.slowest_ns,
        slowest_number=steps.slowest_number,
    )


def _waits_in(leg: OpenLeg, wait: MarkRecord, stage: Stage) -> bool:
    """Whether a wait is of `stage`, or of a stage that details it and has not ended."""
    waited = STAGE_BY_NAME.get(str(value_at(wait, _WAIT_STAGE_AT)))
    if waited is None or waited is stage:
        return waited is stage
    if waited.within != stage.name:
        return False
    for record in reversed(leg.marks):
        if record is wait:
            break
        if record.mark is waited.end:
            return False
    return True


def _described(record: MarkRecord, stage: Stage, age_s: float) -> WaitNow:
    waited = str(value_at(record, _WAIT_STAGE_AT))
    numbers = [value_at(record, place) for place in _WAIT_NUMBERS_AT]
    needed, free, limit, position = [n if isinstance(n, int) else None for n in numbers]
    return WaitNow(
        reason=str(value_at(record, _WAIT_REASON_AT) or "unknown"),
        stage=None if waited == stage.name else waited,
        needed=needed,
        free=free,
        limit=limit,
        position=position,
        blockers=blocker_names(record.mark, record.values),
        age_s=age_s,
    )


_WAIT_NUMBERS_AT = tuple(
    place_of(Mark.WAITING, attr)
    for attr in (a.WAIT_NEEDED, a.WAIT_FREE, a.WAIT_LIMIT, a.WAIT_POSITION)
)
