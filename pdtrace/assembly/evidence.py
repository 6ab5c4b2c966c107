"""What the marks of one request say: its mode, its attempts, and how each of them ended. Pure.

Owns the common clock, which mark opens and closes a chain stage in which mode, and which stage was
active when something went wrong. Knows nothing of spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from pdtrace import semconv as a
from pdtrace.assembly.alignment import SAME_CLOCK, Alignment, align
from pdtrace.assembly.collected import AttemptIds, CollectedRequest, Leg
from pdtrace.offsets import ClockOffsets
from pdtrace.ring.codec import ID_SEPARATOR
from pdtrace.ring.records import Value
from pdtrace.stages import (
    ATTEMPT_SPAN,
    CHAINS,
    MARKS,
    ROOT_SPAN,
    STAGE_BY_NAME,
    STAGES,
    Mark,
    Mode,
    Outcome,
    Role,
    Stage,
)

REQUEST_MARKS = frozenset(
    {Mark.RECEIVED, Mark.TOKENIZED, Mark.COMPLETED, Mark.WAITING, Mark.ABORTED}
)
"""Marks that do not show that an attempt has begun."""

REPEATABLE_MARKS = frozenset({Mark.WAITING, Mark.ABORTED, Mark.TOKEN_GAP}) | {
    mark for stage in STAGES if stage.repeats for mark in (*stage.begin, stage.end)
}


_by_time = attrgetter("t_ns")
_MODES = {mode.value: mode for mode in Mode}


def _attempts_of(lost: Leg) -> frozenset[int]:
    """Attempts that ended with the loss of a process; it may have had others behind it."""
    return lost.lost_attempts or frozenset(record.attempt or 1 for record in lost.marks)


def place_of(mark: Mark, attr: a.Attr) -> int:
    """Where an attribute stands among a mark's values; beyond them if the mark lacks it."""
    attrs = MARKS[mark].attrs
    return attrs.index(attr) if attr in attrs else len(attrs)


_PLACES = {
    mark: {attr.key: place for place, attr in enumerate(spec.attrs)} for mark, spec in MARKS.items()
}
_BLOCKERS_AT = {
    mark: (place_of(mark, a.WAIT_BLOCKER), place_of(mark, a.WAIT_BLOCKERS))
    for mark in (Mark.WAITING, Mark.TOKEN_GAP)
}


def _begin_marks() -> Mapping[tuple[Mode, str], tuple[Mark, ...]]:
    """Marks that open each chain stage per mode.

    Where a stage lists alternatives, the one that ends the chain's previous stage is meant: the
    others belong to other modes and would swallow the stages between them.
    """
    table: dict[tuple[Mode, str], tuple[Mark, ...]] = {}
    for mode, chain in CHAINS.items():
        previous: Mark | None = None
        for stage in chain:
            preceding = tuple(mark for mark in stage.begin if mark is previous)
            table[mode, stage.name] = preceding or stage.begin
            previous = stage.end
    return table


BEGIN_MARKS = _begin_marks()
"""Marks that open each chain stage, by mode and stage name."""


class Stamp(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A mark on the request's common clock, with its source."""

    mark: Mark
    t_ns: int
    values: tuple[Value, ...]
    leg: Leg
    attempt: int

    @property
    def role(self) -> Role:
        return self.leg.process.role

    def value(self, attr: a.Attr) -> Value:
        place = _PLACES[self.mark].get(attr.key)
        if place is None or place >= len(self.values):
            return None
        return self.values[place]


class End(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """How and when an attempt, a stage or the request ended.

    outcome  empty where nobody recorded it, which is no reason to say that a process was lost
    is_open  it has not: this is the instant of the look
    """

    t_ns: int
    outcome: str
    reason: str | None
    by: str | None
    leg: Leg
    is_open: bool = False

    @property
    def is_error(self) -> bool:
        """A cancellation is an outcome of its own, not an error; of what is not known, nobody can
        say that it is one."""
        return self.outcome not in ("", Outcome.COMPLETED, Outcome.CANCELLED)


@dataclass(slots=True)
class Attempt:
    """The marks of one attempt: the first of each kind, and all of the repeatable ones.

    end      of the attempt itself: the last token, or what cut it short
    failure  what went wrong in it or, for the last attempt, after it; None if nothing did
    active   chain stage in which `failure` found it
    """

    number: int
    ids: AttemptIds
    end: End
    failure: End | None = None
    active: Stage | None = None
    first: dict[Mark, Stamp] = field(default_factory=dict[Mark, Stamp])
    repeated: dict[Mark, list[Stamp]] = field(default_factory=dict[Mark, list[Stamp]])
    stamps: list[Stamp] = field(default_factory=list[Stamp])
    duplicates: list[str] = field(default_factory=list[str])

    @property
    def has_begun(self) -> bool:
        return not REQUEST_MARKS.issuperset(self.first)


def derived_span_id(base: int, salt: int) -> str:
    """A span id that is the same whenever the same request is assembled: 16 hex digits.

    base  of the attempt, `span_id_base`
    salt  of the span in it, `span_id_salt`. Two salts differ, so two spans of one attempt never
          have the same id; ids of different attempts are as random as their bases
    """
    return ((base ^ salt) or 1).to_bytes(8).hex()


def span_id_base(root_span_id: str, attempt_span_id: str) -> int:
    """64 bits that stand for an attempt, as random as the ids that they are made of: the gateway
    draws these from the operating system's entropy."""
    return span_id_salt(f"{root_span_id}/{attempt_span_id}")


def span_id_salt(name: str) -> int:
    """64 bits that stand for a name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


class Evidence:
    """The marks of `request`, read. Needs at least one mark."""

    def __init__(self, request: CollectedRequest) -> None:
        self.request = request
        self.legs = legs = [leg for leg in request.legs if leg.marks]
        self.gateway = next((leg for leg in legs if leg.process.role is Role.GATEWAY), None)
        self.reference = (self.gateway or legs[0]).process
        self._own_clocks: dict[str, list[ClockOffsets]] = {}
        for leg in legs:
            if leg.clock is not None:
                self._own_clocks.setdefault(leg.process.clock_id, []).append(leg.clock)
        self._aligned: dict[tuple[int, int], Alignment] = {}  # of a leg's marks, by where they lie
        self.stamps: list[Stamp] = []
        for leg in legs:
            self._add_stamps(leg)
        self.stamps.sort(key=_by_time)
        self.attempts = self._group()
        self.first = self._first_of_all()
        self.mode = self._mode()
        tokenized = self.first.get(Mark.TOKENIZED)
        self.streams = tokenized is None or tokenized.value(a.STREAM) is not False
        self.lost = [leg for leg in legs if leg.lost_at_ns is not None]
        self.last_attempt = self.attempts[max(self.attempts)]
        self.end = self._request_end()
        self.overrun_ns = self._end_generation_with_the_answer()
        for attempt in self.attempts.values():
            attempt.end = self._attempt_end(attempt)
            end = attempt.end
            if end.outcome == Outcome.COMPLETED and attempt is self.last_attempt:
                end = self.end  # sending the answer may fail after decoding
            # Without the gateway the rest of the request is another host's to tell.
            known = self.gateway is not None or self.lost or Mark.ABORTED in attempt.repeated
            if known and end.outcome != Outcome.COMPLETED and not end.is_open:
                attempt.failure = end
                attempt.active = self._active_stage(attempt, end)

    def is_foreign(self, leg: Leg) -> bool:
        """Whether a leg was recorded on another clock than the request's."""
        return leg.process.clock_id != self.reference.clock_id

    def alignment(self, leg: Leg, t_ns: int) -> Alignment:
        """What to add to a leg's time `t_ns`; processes that share a clock need nothing."""
        process, reference = leg.process, self.reference
        if process.clock_id == reference.clock_id:
            return SAME_CLOCK
        return align(
            process,
            reference,
            t_ns,
            own=self._own_clocks.get(process.clock_id, ()),
            theirs=self._own_clocks.get(reference.clock_id, ()),
        )

    def alignment_at(self, leg: Leg, t_ns: int) -> Alignment:
        """The same for a time that is on the request's clock already."""
        if not self.is_foreign(leg):
            return SAME_CLOCK
        # While a clock is being set, several of its times fall together here.
        known = self._aligned.get((id(leg), t_ns))
        return self.alignment(leg, self._raw_ns(leg, t_ns)) if known is None else known

    def _raw_ns(self, leg: Leg, t_ns: int) -> int:
        by_anchor = t_ns - self.alignment(leg, t_ns).offset_ns
        return t_ns - self.alignment(leg, by_anchor).offset_ns

    def clock_doubt_ns(self, *instants: Stamp | End) -> int | None:
        """By how much the distance between instants may be wrong; None if nobody knows."""
        doubt_ns = 0
        for instant in instants:
            error_ns = self.alignment_at(instant.leg, instant.t_ns).error_ns
            if error_ns is None:
                return None
            doubt_ns += error_ns
        return doubt_ns

    def _add_stamps(self, leg: Leg) -> None:
        if self.is_foreign(leg):
            for record in leg.marks:
                alignment = self.alignment(leg, record.t_ns)
                t_ns = record.t_ns + alignment.offset_ns
                here = id(leg), t_ns
                self._aligned[here] = _worse(alignment, self._aligned.get(here))
                stamp = Stamp(record.mark, t_ns, record.values, leg, record.attempt or 1)
                self.stamps.append(stamp)
        else:
            self.stamps += [
                Stamp(record.mark, record.t_ns, record.values, leg, record.attempt or 1)
                for record in leg.marks
            ]

    def _group(self) -> dict[int, Attempt]:
        attempts: dict[int, Attempt] = {}
        for stamp in self.stamps:
            number, mark = stamp.attempt, stamp.mark
            attempt = attempts.get(number)
            if attempt is None:
                unknown = End(t_ns=stamp.t_ns, outcome="", reason=None, by=None, leg=stamp.leg)
                attempt = attempts[number] = Attempt(number, self._ids(number), unknown)
            attempt.stamps.append(stamp)
            first = attempt.first
            if mark not in first:
                first[mark] = stamp
                if mark in REPEATABLE_MARKS:
                    attempt.repeated[mark] = [stamp]
            elif mark in REPEATABLE_MARKS:
                attempt.repeated[mark].append(stamp)
            else:
                attempt.duplicates.append(mark.name.lower())
        return attempts if len(attempts) == 1 else dict(sorted(attempts.items()))

    def _first_of_all(self) -> Mapping[Mark, Stamp]:
        first: dict[Mark, Stamp] = {}
        if len(self.attempts) == 1:
            [attempt] = self.attempts.values()
            first.update(attempt.first)
        else:
            for stamp in self.stamps:
                first.setdefault(stamp.mark, stamp)
        return first

    def _ids(self, number: int) -> AttemptIds:
        known = self.request.attempts.get(number)
        if known is not None:
            return known
        root = self.request.root_span_id
        base = span_id_base(root, ATTEMPT_SPAN)
        return AttemptIds(span_id=derived_span_id(base, span_id_salt(str(number))))

    def _mode(self) -> Mode:
        tokenized = self.first.get(Mark.TOKENIZED)
        told = _MODES.get(str(tokenized.value(a.MODE))) if tokenized else None
        if told is not None:
            return told
        if self.request.mode is not None:
            return self.request.mode
        if any(stamp.role is Role.WORKER for stamp in self.stamps):
            return Mode.COLOCATED
        return Mode.PD_EARLY if Mark.FIRST_TOKEN_FORWARDED in self.first else Mode.PD

    def _request_end(self) -> End:
        completed = self.first.get(Mark.COMPLETED)
        if completed is not None:
            return ending_of(completed)
        gateway_lost = [leg for leg in self.lost if leg is self.gateway]
        leg = self.gateway or self.stamps[-1].leg
        last_ns = self.stamps[-1].t_ns
        if gateway_lost:
            return self.loss(gateway_lost[0], not_before_ns=last_ns)
        aborted = self.last_attempt.repeated.get(Mark.ABORTED)
        open_at_ns = self.request.open_at_ns
        if open_at_ns is not None and (self.gateway is not None or not aborted):
            at_ns = max(open_at_ns, last_ns)
            return End(t_ns=at_ns, outcome="", reason=None, by=None, leg=leg, is_open=True)
        if aborted:
            return ending_of(aborted[-1])
        # Without the gateway's records, what is given up is not how it ended.
        gave_up = self.request.gave_up if self.gateway is not None else None
        reason = gave_up or "no_end_recorded"
        return End(t_ns=last_ns, outcome="", reason=reason, by=None, leg=leg)

    def _end_generation_with_the_answer(self) -> int:
        """The gateway may see the last token (a stop string) before the decode process has ended.

        What decode does after the answer is complete is no part of the request. Returns by how
        much it went on.
        """
        if self.end.outcome != Outcome.COMPLETED:
            return 0
        first = self.last_attempt.first
        told = [
            stamp
            for stamp in self.last_attempt.repeated.get(Mark.ABORTED, ())
            if stamp.value(a.OUTCOME) == Outcome.COMPLETED
            and stamp.role in STAGE_BY_NAME["decode.generate"].roles
        ]
        finished = first.get(Mark.DECODE_FINISHED) or next(iter(told), None)
        if finished is None:
            return 0
        end_ns = min(finished.t_ns, self.end.t_ns)
        values = finished.values if finished.mark is Mark.DECODE_FINISHED else ()
        first[Mark.DECODE_FINISHED] = Stamp(
            Mark.DECODE_FINISHED, end_ns, values, finished.leg, finished.attempt
        )
        over_ns = finished.t_ns - end_ns
        known = self._aligned.get((id(finished.leg), finished.t_ns))
        if known is not None:  # cut short, it is as uncertain as it was
            self._aligned[id(finished.leg), end_ns] = known
        return over_ns if over_ns > (self.clock_doubt_ns(finished) or 0) else 0

    def loss(self, leg: Leg, *, not_before_ns: int) -> End:
        assert leg.lost_at_ns is not None
        return End(
            t_ns=max(leg.lost_at_ns + self.alignment(leg, leg.lost_at_ns).offset_ns, not_before_ns),
            outcome=Outcome.LOST.value,
            reason=leg.lost_reason,
            by=leg.process.instance,
            leg=leg,
        )

    def _attempt_end(self, attempt: Attempt) -> End:
        aborts = attempt.repeated.get(Mark.ABORTED, ())
        by_gateway = [stamp for stamp in aborts if stamp.role is Role.GATEWAY]
        finished = attempt.first.get(Mark.DECODE_FINISHED)
        if by_gateway:
            return ending_of(by_gateway[0])
        if finished is not None:
            return End(
                t_ns=finished.t_ns,
                outcome=Outcome.COMPLETED.value,
                reason=None,
                by=None,
                leg=finished.leg,
            )
        if attempt is not self.last_attempt:
            return ending_of(aborts[0]) if aborts else self._superseded(attempt)
        if self.end.outcome == Outcome.COMPLETED or self.gateway is not None or not aborts:
            return self.end
        return ending_of(aborts[0])

    def _superseded(self, attempt: Attempt) -> End:
        following = next(other for n, other in self.attempts.items() if n > attempt.number)
        lost = next((leg for leg in self._lost_in(attempt) if leg is not self.gateway), None)
        return End(
            t_ns=max(following.stamps[0].t_ns, attempt.stamps[0].t_ns),
            outcome=(Outcome.LOST if lost else Outcome.FAILED).value,
            reason=lost.lost_reason if lost else "superseded",
            by=lost.process.instance if lost else None,
            leg=self.gateway or attempt.stamps[-1].leg,
        )

    def over_ns(self, attempt: Attempt) -> int | None:
        """From when on what is said of a failed attempt is no part of the request any more: another
        attempt took its place, or the client was told. None while neither has happened."""
        if attempt.failure is None:
            return None
        if attempt is not self.last_attempt:
            return attempt.end.t_ns
        return self.end.t_ns if Mark.COMPLETED in self.first else None

    def _lost_in(self, attempt: Attempt) -> list[Leg]:
        """Processes that died with this attempt: not those that another one went to, be it that
        they have the same role or the same name."""
        return [leg for leg in self.lost if attempt.number in _attempts_of(leg)]

    def chain(self, attempt: Attempt) -> Iterable[Stage]:
        """Chain stages to look for in `attempt`; the request's own stand with its last attempt."""
        here = self.gateway is not None and attempt is self.last_attempt
        for stage in CHAINS[self.mode]:
            if stage.parent != ROOT_SPAN or here:
                yield stage

    def begin(self, stage: Stage, attempt: Attempt) -> Stamp | None:
        marks = self.first if self._is_ingress(stage) else attempt.first
        return first_of(marks, BEGIN_MARKS[self.mode, stage.name])

    def finish(self, stage: Stage, attempt: Attempt) -> Stamp | None:
        """The mark that ended `stage` in order; an unsuccessful COMPLETED ends nothing in order."""
        if stage.end is Mark.COMPLETED:
            return self.first.get(stage.end) if self.end.outcome == Outcome.COMPLETED else None
        return (self.first if self._is_ingress(stage) else attempt.first).get(stage.end)

    def _is_ingress(self, stage: Stage) -> bool:
        """Before any attempt: its marks are the request's first ones."""
        return stage.parent == ROOT_SPAN and stage.end is not Mark.COMPLETED

    def is_open(self, stage: Stage, attempt: Attempt) -> bool:
        if stage.end is Mark.FIRST_TOKEN_SENT and not self.streams:
            return False  # the whole answer is one write, so nothing is on its way yet
        return self.begin(stage, attempt) is not None and self.finish(stage, attempt) is None

    def _active_stage(self, attempt: Attempt, end: End) -> Stage | None:
        """The chain stage in which `end` found the attempt.

        The first sign of the end decides when. Among stages open then, one of a process that died
        comes first, then one of the process that gave up, else the earliest in the chain.
        """
        aborts = attempt.repeated.get(Mark.ABORTED, [])
        at_ns = min(stamp.t_ns for stamp in (*aborts[:1], end))
        open_then: list[Stage] = []
        last_begun: Stage | None = None
        for stage in self.chain(attempt):
            begin = self.begin(stage, attempt)
            if begin is None or begin.t_ns > at_ns:
                continue
            last_begun = stage
            finish = self.finish(stage, attempt)
            if self.is_open(stage, attempt) or (finish is not None and finish.t_ns > at_ns):
                open_then.append(stage)
        dead = {leg.process.role for leg in self._lost_in(attempt)}
        gave_up = {stamp.role for stamp in aborts[:1] if stamp.role is not Role.GATEWAY}
        for roles in (dead, gave_up):
            for stage in open_then:
                if stage.roles & roles:
                    return stage
        return open_then[0] if open_then else last_begun

    def closing(self, stage: Stage, attempt: Attempt, begin: Stamp) -> End | None:
        """How a stage that its end mark did not close came to its end, in a failed attempt.

        None if it began after the attempt was over and its process says no more about it.
        """
        end = attempt.failure
        assert end is not None
        if stage.end is Mark.COMPLETED and Mark.COMPLETED in self.first:
            return self.end  # whoever gave up before: the gateway works on the answer until then
        for leg in self._lost_in(attempt):
            if leg.process.role in stage.roles:
                loss = self.loss(leg, not_before_ns=begin.t_ns)
                # The request goes on waiting in this stage until somebody notices.
                return replace(loss, t_ns=end.t_ns) if end.t_ns > begin.t_ns else loss
        ending = self.given_up(stage, attempt, begin)
        if ending is None:
            return end if end.t_ns >= begin.t_ns else None
        if stage is attempt.active and ending.outcome != end.outcome:
            # Told to stop because of what this stage could not do: the cause counts.
            return replace(end, t_ns=ending.t_ns)
        return ending

    def given_up(self, stage: Stage, attempt: Attempt, begin: Stamp) -> End | None:
        """How the stage's own process gave it up; None if it did not."""
        aborts = attempt.repeated.get(Mark.ABORTED, ())
        own = next((stamp for stamp in aborts if stamp.role in stage.roles), None)
        return None if own is None or own.t_ns < begin.t_ns else ending_of(own)

    def is_current(self, attempt: Attempt) -> bool:
        """Whether `attempt` is the one that a request in flight is in."""
        return self.end.is_open and attempt is self.last_attempt and attempt.failure is None

    def is_going_on(self, stage: Stage, attempt: Attempt) -> bool:
        """Whether a chain stage is open in a request in flight: begun, and not overtaken by marks
        of later ones. Beside the first token's way to the client all others go on."""
        if not self.is_current(attempt) or not self.is_open(stage, attempt):
            return False
        if stage.end is Mark.FIRST_TOKEN_SENT:
            return True
        later = False
        for other in self.chain(attempt):
            if later and self.finish(other, attempt) is not None:
                return False
            later = later or other is stage
        return True


def _worse(one: Alignment, other: Alignment | None) -> Alignment:
    """Of two of the same process the one that is known less well."""
    if other is None or one.error_ns is None:
        return one
    return other if other.error_ns is None or other.error_ns > one.error_ns else one


def blocker_names(mark: Mark, values: Sequence[Value]) -> tuple[str, ...]:
    """Requests that a WAITING or TOKEN_GAP mark names, most important first, each once."""
    first_at, all_at = _BLOCKERS_AT[mark]
    first = values[first_at] if first_at < len(values) else None
    listed = values[all_at] if all_at < len(values) else None
    if not listed:
        return (str(first),) if first else ()
    names = [str(first or ""), *str(listed).split(ID_SEPARATOR)]
    return tuple(dict.fromkeys(name for name in names if name))


def first_of(marks: Mapping[Mark, Stamp], wanted: Sequence[Mark]) -> Stamp | None:
    for mark in wanted:
        stamp = marks.get(mark)
        if stamp is not None:
            return stamp
    return None


def ending_of(stamp: Stamp) -> End:
    """Reads the outcome that a COMPLETED or ABORTED mark carries."""
    outcome = stamp.value(a.OUTCOME)
    reason = stamp.value(a.OUTCOME_REASON)
    by = stamp.value(a.OUTCOME_BY)
    unsaid = Outcome.COMPLETED if stamp.mark is Mark.COMPLETED else Outcome.FAILED
    return End(
        t_ns=stamp.t_ns,
        outcome=str(outcome) if outcome else unsaid.value,
        reason=str(reason) if reason else None,
        by=str(by) if by else None,
        leg=stamp.leg,
    )
