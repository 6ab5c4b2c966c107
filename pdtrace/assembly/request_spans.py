"""Marks of one request → its spans. Pure: no clock, no I/O, no OpenTelemetry.

Owns the tree, alignment, waits, and what an outcome looks like on a span (ADR 001). What the marks
mean is `pdtrace.assembly.evidence`; which stages exist is `pdtrace.stages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from pdtrace import semconv as a
from pdtrace.assembly.collected import CollectedRequest, Leg
from pdtrace.assembly.drafts import (
    CHAIN_GAP_NS,
    ROOT_KEYS,
    SIDE_GAP_NS,
    SPAN_KEYS,
    Draft,
    mark_attributes,
    put_attributes,
    root_name,
    set_attribute,
)
from pdtrace.assembly.evidence import (
    BEGIN_MARKS,
    REPEATABLE_MARKS,
    REQUEST_MARKS,
    Attempt,
    End,
    Evidence,
    Stamp,
    derived_span_id,
    first_of,
    span_id_base,
)
from pdtrace.assembly.orderly import spans_in_order
from pdtrace.assembly.pairing import paired
from pdtrace.assembly.stage_plans import (
    CHAIN_PLANS,
    LANDING,
    PLANS,
    SIDE_PLANS,
    StagePlan,
    numbered_salt,
)
from pdtrace.assembly.wait_marks import MAX_WAIT_EVENTS, blocker_links, tell_waits
from pdtrace.duration import seconds_text
from pdtrace.spans import AttrValue, Link, Span, SpanKind
from pdtrace.stages import (
    ATTEMPT_SPAN,
    CHAINS,
    MARKS,
    OPTIONAL_STAGES,
    ROOT_SPAN,
    STAGE_BY_NAME,
    Mark,
    Mode,
    Outcome,
    Stage,
    StepKind,
)

_STAGE, _STAGE_KIND = a.STAGE.key, a.STAGE_KIND.key
_begin_ns = attrgetter("begin_ns")
_STEPS_OF = {"prefill.compute": StepKind.PREFILL, "decode.generate": StepKind.DECODE}
_TELLING_MARKS = frozenset(mark for mark in Mark if SPAN_KEYS[mark]) - REPEATABLE_MARKS
"""Marks of one instant in an attempt that say something of a stage."""


def assemble(request: CollectedRequest) -> list[Span]:
    """The spans of `request`, root first where this host's gateway recorded it, then by start.

    The root and the attempts are built only where a gateway leg is present: elsewhere they belong
    to the gateway's host, and the stages name them as parents. Never raises on missing, repeated
    or disordered marks; what they make impossible stands in `pd.violation` or `pd.incomplete`.
    Of a request in flight, what has not ended lasts until the instant of the look and says
    `pd.open`.
    """
    return list(assemble_lazily(request))


def assemble_lazily(request: CollectedRequest) -> Sequence[Span]:
    """The same, where spans of a request in which all went in order are made when asked for."""
    return spans_in_order(request) or assemble_by_rule(request)


def assemble_by_rule(request: CollectedRequest) -> list[Span]:
    """The same without the shortcut for such requests."""
    if not any(leg.marks for leg in request.legs):
        return []
    return _Assembly(request).spans()


class _Assembly:
    def __init__(self, request: CollectedRequest) -> None:
        self.request = request
        self.evidence = evidence = Evidence(request)
        anchor = evidence.reference.anchor
        self.wall_offset_ns = anchor.wall_ns - anchor.monotonic_ns
        self.mode = evidence.mode
        self.landing = LANDING[self.mode]
        self.plans = PLANS[self.mode]
        self.identities = {
            attempt.number: self._identity(attempt) for attempt in evidence.attempts.values()
        }
        # Made with room for what most spans get, and copied with it.
        unset = {_STAGE: "", _STAGE_KIND: "", a.BEGIN_NS.key: 0, a.END_NS.key: 0}
        self.templates = {number: known | unset for number, known in self.identities.items()}
        root = request.root_span_id
        self.id_bases = {
            attempt.number: span_id_base(root, attempt.ids.span_id)
            for attempt in evidence.attempts.values()
        }
        clock_id = evidence.reference.clock_id
        self.several_clocks = any(leg.process.clock_id != clock_id for leg in evidence.legs)
        self.drafts: dict[int, dict[str, list[Draft]]] = {
            number: {} for number in evidence.attempts
        }
        """By attempt and stage; the request's own stages stand with the last attempt."""
        self.homeless: dict[int, list[Stamp]] = {}
        """Marks whose stage has no span: their facts go to the attempt."""

    def spans(self) -> list[Span]:
        for attempt in self.evidence.attempts.values():
            self._draft_chain(attempt)
            for plan in SIDE_PLANS[self.mode]:
                if not plan.begin:
                    self._draft_gaps(plan, attempt)
                elif plan.stage.repeats:
                    self._draft_repeated(plan, attempt)
                else:
                    self._draft_once(plan, attempt)
        self._draft_news()
        self._draft_answer()
        self._end_with_the_attempt()
        for attempt in self.evidence.attempts.values():
            self._land_attributes(attempt)
            self._attach_waits(attempt)
            self._attach_steps(attempt)
        self._attach_stuck()
        stages = [
            draft
            for by_name in self.drafts.values()
            for drafts in by_name.values()
            for draft in drafts
        ]
        stages.sort(key=_begin_ns)
        gateway = self.evidence.gateway
        if gateway is None:
            # There is no root to say so.
            if stages and (missing := "; ".join(self._lost_records())):
                stages[0].attributes[a.INCOMPLETE.key] = missing
            return [draft.span(self.request) for draft in stages]
        begun = [attempt for attempt in self.evidence.attempts.values() if attempt.has_begun]
        attempts = [self._attempt_draft(attempt, gateway) for attempt in begun]
        return [draft.span(self.request) for draft in (self._root(gateway), *attempts, *stages)]

    def _draft_chain(self, attempt: Attempt) -> None:
        """The chain; the request's own stages stand with its last attempt."""
        evidence, failure = self.evidence, attempt.failure
        over_ns = evidence.over_ns(attempt)
        has_ends = evidence.gateway is not None and attempt is evidence.last_attempt
        for plan in CHAIN_PLANS[self.mode]:
            if plan.at_root and not has_ends:
                continue
            marks = evidence.first if plan.is_ingress else attempt.first
            begin = first_of(marks, plan.begin)
            if begin is None or (over_ns is not None and begin.t_ns > over_ns):
                continue
            stage = plan.stage
            finish = evidence.finish(stage, attempt) if plan.is_last else marks.get(plan.end)
            if finish is not None:
                # A process that stood still goes on with what was given up meanwhile.
                is_late = over_ns is not None and finish.t_ns > over_ns
                end_ns = over_ns if is_late and over_ns is not None else finish.t_ns
                draft = self._draft(plan, attempt, finish.leg, begin, end_ns, finish=finish)
                if failure is not None and (is_late or stage is attempt.active):
                    draft.conclude(failure, guilty=stage is attempt.active)
                if evidence.overrun_ns and plan.end is Mark.DECODE_FINISHED:
                    draft.attributes[a.OVERRUN_SECONDS.key] = evidence.overrun_ns / 1e9
            elif failure is not None and evidence.is_open(stage, attempt):
                end = evidence.closing(stage, attempt, begin)
                if end is not None:
                    end_ns = end.t_ns if over_ns is None else min(end.t_ns, over_ns)
                    draft = self._draft(
                        plan, attempt, self._owner(stage, attempt, end), begin, end_ns
                    )
                    draft.conclude(end, guilty=stage is attempt.active)
            elif evidence.is_going_on(stage, attempt):
                given_up = evidence.given_up(stage, attempt, begin)
                end = given_up or evidence.end
                draft = self._draft(
                    plan, attempt, self._owner(stage, attempt, end), begin, end.t_ns
                )
                draft.conclude(end, guilty=True)
                if given_up is not None and evidence.gateway is not None:
                    self._draft_open_news(attempt, evidence.gateway, given_up.t_ns)

    def _draft_answer(self) -> None:
        """What the gateway still did after a request had failed: it waited for the legs to let go
        and told the client. That ends in order, with COMPLETED, or with the gateway."""
        evidence, plan = self.evidence, self.plans["gateway.finish"]
        completed, end, last = (
            evidence.first.get(Mark.COMPLETED),
            evidence.end,
            evidence.last_attempt,
        )
        is_lost = completed is None and end.outcome == Outcome.LOST
        done = end.outcome == Outcome.COMPLETED or plan.name in self.drafts[last.number]
        if (completed is None and not is_lost) or done or evidence.gateway is None:
            return
        ends = [end_ns for number in self.drafts for end_ns in self._chain_ends(number)]
        if ends and max(ends) < end.t_ns:
            draft = self._draft(plan, last, end.leg, max(ends), end.t_ns)
            if is_lost:
                draft.conclude(end, guilty=False)

    def _draft_news(self) -> None:
        """How long the gateway took to end an attempt that had failed elsewhere, and to begin the
        next: the news was on its way, and its loop was busy."""
        evidence = self.evidence
        for number, attempt in evidence.attempts.items():
            if attempt is evidence.last_attempt or evidence.gateway is None:
                continue
            ends = self._chain_ends(number)
            end = attempt.end
            if ends and end.leg is evidence.gateway and max(ends) < end.t_ns:
                plan = self.plans["gateway.finish"]
                self._draft(plan, attempt, evidence.gateway, max(ends), end.t_ns)

    def _draft_open_news(self, attempt: Attempt, gateway: Leg, since_ns: int) -> None:
        """The same in flight, where the gateway has not heard of it."""
        end = self.evidence.end
        plan = self.plans["gateway.finish"]
        self._draft(plan, attempt, gateway, since_ns, end.t_ns).conclude(end, guilty=True)

    def _chain_ends(self, number: int) -> list[int]:
        return [
            draft.end_ns
            for name, drafts in self.drafts.get(number, {}).items()
            if self.plans[name].in_chain
            for draft in drafts
        ]

    def _end_with_the_attempt(self) -> None:
        """What runs beside the chain must not be the attempt's child that ends last, nor end in
        the microsecond in which a chain stage ends: Jaeger's critical path would follow it in
        place of the chain. An answer in one piece leaves after the attempt, so there the first
        token's way is such a span too. In a stream it is on the path where it outlasts generation,
        and shown until the attempt ends: Jaeger warns of children that end after their parents."""
        beside: list[tuple[int, Draft]] = []
        chain_ends: set[int] = set()
        streams = self.evidence.streams
        for number, by_name in self.drafts.items():
            for name, drafts in by_name.items():
                plan = self.plans[name]
                first_token = plan.end is Mark.FIRST_TOKEN_SENT
                if plan.in_chain and (streams or not first_token):
                    for draft in drafts if first_token else ():
                        draft.shown_until_ns = self.evidence.attempts[number].end.t_ns
                    chain_ends.update([draft.ends_shown_at() for draft in drafts])
                else:
                    beside += [(number, draft) for draft in drafts]
        for number, draft in beside:
            draft.gap_ns = SIDE_GAP_NS
            draft.shown_until_ns = self.evidence.attempts[number].end.t_ns
            while draft.ends_shown_at() in chain_ends:
                draft.gap_ns += CHAIN_GAP_NS

    def _owner(self, stage: Stage, attempt: Attempt, end: End) -> Leg:
        """The process that would have recorded the end mark, where it recorded anything of the
        attempt: another attempt may have had another one, or its successor."""
        for stamp in reversed(attempt.stamps):
            if stamp.role in stage.roles:
                return stamp.leg
        return end.leg

    def _draft_once(self, plan: StagePlan, attempt: Attempt) -> None:
        begin = first_of(attempt.first, plan.begin)
        if begin is None:
            return
        finish = attempt.first.get(plan.end)
        if finish is not None and finish.t_ns < begin.t_ns:
            finish = None
        self._draft_pair(plan, attempt, begin, finish, closes=self.mode is not Mode.COLOCATED)

    def _draft_repeated(self, plan: StagePlan, attempt: Attempt) -> None:
        repeated = attempt.repeated
        begins = [stamp for mark in plan.begin for stamp in repeated.get(mark, ())]
        if len(plan.begin) > 1:
            begins.sort(key=attrgetter("t_ns"))
        if begins:
            pairs = paired(begins, repeated.get(plan.end, ()))
            for index, (begin, finish) in enumerate(pairs):
                self._draft_pair(plan, attempt, begin, finish, closes=True, index=index)

    def _draft_pair(
        self,
        plan: StagePlan,
        attempt: Attempt,
        begin: Stamp,
        finish: Stamp | None,
        *,
        closes: bool,
        index: int = 0,
    ) -> None:
        """A stage beside the chain. `closes`: also where nothing but the attempt's end ends it."""
        if finish is not None:
            draft = self._draft(
                plan, attempt, finish.leg, begin, finish.t_ns, finish=finish, index=index
            )
            put_attributes(draft, finish)
        else:
            end = self._cut_short(plan.stage, attempt, begin) if closes else None
            if end is None:
                return
            draft = self._draft(plan, attempt, begin.leg, begin, end.t_ns, index=index)
            draft.conclude(end, guilty=False)
        if plan.lands or (len(plan.begin) > 1 and self.landing.get(begin.mark) == plan.name):
            put_attributes(draft, begin, overwrite=False)

    def _cut_short(self, stage: Stage, attempt: Attempt, begin: Stamp) -> End | None:
        if attempt.failure is not None:
            return self.evidence.closing(stage, attempt, begin)
        if self.evidence.is_current(attempt):
            return self.evidence.given_up(stage, attempt, begin) or self.evidence.end
        return None

    def _draft_gaps(self, plan: StagePlan, attempt: Attempt) -> None:
        for index, stamp in enumerate(attempt.repeated.get(plan.end, ())):
            length = stamp.value(a.GAP_SECONDS)
            seconds = length if isinstance(length, int | float) and length > 0 else 0.0
            begin_ns = stamp.t_ns - round(min(seconds, 1e9) * 1e9)
            draft = self._draft(plan, attempt, stamp.leg, begin_ns, stamp.t_ns, index=index)
            put_attributes(draft, stamp)
            draft.links += blocker_links(self.request, [stamp])

    def _draft(
        self,
        plan: StagePlan,
        attempt: Attempt,
        leg: Leg,
        begin: Stamp | int,
        end_ns: int,
        *,
        finish: Stamp | None = None,
        index: int = 0,
    ) -> Draft:
        number, name = attempt.number, plan.name
        by_name = self.drafts[number]
        begin_ns = begin if isinstance(begin, int) else begin.t_ns
        attributes = self.templates[number].copy()
        attributes[_STAGE] = name
        attributes[_STAGE_KIND] = plan.kind_of_time
        parent_id = self.request.root_span_id if plan.at_root else attempt.ids.span_id
        if plan.nested_in in by_name:  # chain stages come first: it is there if its marks are
            parent_id = by_name[plan.nested_in][0].span_id
        draft = Draft(
            name,
            derived_span_id(
                self.id_bases[number], plan.salt if not index else numbered_salt(name, index)
            ),
            parent_id,
            leg,
            begin_ns,
            end_ns if end_ns > begin_ns else begin_ns,
            plan.gap_ns,
            self.wall_offset_ns,
            attributes,
            plan.kind,
        )
        if end_ns < begin_ns:
            stamps = [stamp for stamp in (begin, finish) if isinstance(stamp, Stamp)]
            self._flag_disorder(draft, begin_ns - end_ns, stamps)
        if self.several_clocks and self.evidence.is_foreign(leg):
            self._place_on_own_clock(draft, end_ns)
        if name in by_name:
            by_name[name].append(draft)
        else:
            by_name[name] = [draft]
        return draft

    def _flag_disorder(self, draft: Draft, by_ns: int, stamps: Sequence[Stamp]) -> None:
        """An end before its begin is impossible, unless two clocks are that far from certain."""
        doubt_ns = self.evidence.clock_doubt_ns(*stamps)
        message = f"end mark {seconds_text(by_ns)} before begin mark"
        if doubt_ns is None:
            draft.attributes[a.VIOLATION.key] = f"{message}, on clocks whose error is not known"
        elif by_ns > doubt_ns:
            doubt = f", clocks are good to {seconds_text(doubt_ns)}" if doubt_ns else ""
            draft.attributes[a.VIOLATION.key] = message + doubt

    def _place_on_own_clock(self, draft: Draft, end_ns: int) -> None:
        """`end_ns`: where its end mark lies, also if that is before its begin."""
        at_begin, at_end = (
            self.evidence.alignment_at(draft.leg, t_ns) for t_ns in (draft.begin_ns, end_ns)
        )
        errors = [error for _, error in (at_begin, at_end) if error is not None]
        draft.alignment = at_end._replace(error_ns=max(errors) if len(errors) == 2 else None)
        anchor = draft.leg.process.anchor
        draft.wall_offset_ns = anchor.wall_ns - anchor.monotonic_ns - draft.alignment.offset_ns

    def _identity(self, attempt: Attempt) -> dict[str, AttrValue]:
        attributes: dict[str, AttrValue] = {
            a.REQUEST_ID.key: self.request.request_id,
            a.ATTEMPT.key: attempt.number,
        }
        if attempt.ids.handoff_id:
            attributes[a.HANDOFF_ID.key] = attempt.ids.handoff_id
        return attributes

    def _land_attributes(self, attempt: Attempt) -> None:
        number, last = attempt.number, self.evidence.last_attempt.number
        for mark, stamp in attempt.first.items():
            if mark not in _TELLING_MARKS:
                continue
            name = self.landing.get(mark)
            drafts = None
            if name is not None:
                drafts = self.drafts[last if self.plans[name].at_root else number].get(name)
            if drafts:
                put_attributes(drafts[0], stamp, overwrite=False)
            else:
                self.homeless.setdefault(number, []).append(stamp)

    def _drafts_of(self, name: str, attempt: Attempt) -> Sequence[Draft]:
        """Spans of a stage in `attempt`; the request's own stages stand with its last attempt."""
        at_root = self.plans[name].at_root
        number = self.evidence.last_attempt.number if at_root else attempt.number
        return self.drafts[number].get(name, ())

    def _attach_waits(self, attempt: Attempt) -> None:
        waits = attempt.repeated.get(Mark.WAITING)
        if waits is None:
            return
        by_draft: dict[str, tuple[Draft, list[Stamp]]] = {}
        for stamp in waits:
            draft = self._waiting_draft(attempt, stamp)
            if draft is not None:
                by_draft.setdefault(draft.span_id, (draft, []))[1].append(stamp)
            else:
                self.homeless.setdefault(attempt.number, []).append(stamp)
        for draft, stamps in by_draft.values():
            self._describe_wait(draft, stamps)

    def _waiting_draft(self, attempt: Attempt, stamp: Stamp) -> Draft | None:
        name = str(stamp.value(a.WAIT_STAGE))
        candidates = self._drafts_of(name, attempt) if name in STAGE_BY_NAME else ()
        for draft in candidates:
            if draft.begin_ns <= stamp.t_ns <= draft.end_ns:
                return draft
        return candidates[-1] if candidates else None

    def _describe_wait(self, draft: Draft, stamps: Sequence[Stamp]) -> None:
        told = tell_waits(stamps, draft.begin_ns, draft.end_ns, draft.wall_offset_ns)
        draft.events += told.events
        draft.attributes.update(told.attributes)
        draft.links += blocker_links(self.request, stamps)

    def _attach_steps(self, attempt: Attempt) -> None:
        """The forward passes of the two stages that consist of them."""
        if not any(leg.steps for leg in self.evidence.legs):
            return
        for name, kind in _STEPS_OF.items():
            for draft in self.drafts[attempt.number].get(name, ()):
                for steps in draft.leg.steps:
                    if steps.kind is kind and steps.attempt == attempt.number:
                        draft.attributes[a.STEPS.key] = steps.count
                        draft.attributes[a.STEP_SLOWEST_NUMBER.key] = steps.slowest_number
                        draft.attributes[a.STEP_SLOWEST_SECONDS.key] = steps.slowest_ns / 1e9

    def _attach_stuck(self) -> None:
        for report in self.request.stuck:
            attempt = self.evidence.attempts.get(report.attempt)
            if attempt is None or report.stage not in STAGE_BY_NAME:
                continue
            for draft in self._drafts_of(report.stage, attempt)[-1:]:
                draft.add_event(
                    "pd.stuck",
                    report.at_ns,
                    {
                        a.STUCK_SECONDS.key: report.age_ns / 1e9,
                        a.STUCK_AFTER_SECONDS.key: report.threshold_ns / 1e9,
                    },
                )

    def _attempt_draft(self, attempt: Attempt, gateway: Leg) -> Draft:
        end = attempt.end
        assert end is not None
        begin = attempt.first.get(Mark.ADMITTED) or next(
            (stamp for stamp in attempt.stamps if stamp.mark not in REQUEST_MARKS),
            attempt.stamps[0],  # only its end is known
        )
        draft = Draft(
            name=ATTEMPT_SPAN,
            span_id=attempt.ids.span_id,
            parent_id=self.request.root_span_id,
            leg=gateway,
            begin_ns=begin.t_ns,
            end_ns=max(end.t_ns, begin.t_ns),
            gap_ns=CHAIN_GAP_NS,
            wall_offset_ns=self.wall_offset_ns,
            attributes={a.SPAN.key: ATTEMPT_SPAN, **self.identities[attempt.number]},
        )
        by_ns = begin.t_ns - end.t_ns
        if by_ns > 0 and by_ns > (self.evidence.clock_doubt_ns(begin, end) or 0):
            draft.attributes[a.VIOLATION.key] = f"ends {seconds_text(by_ns)} before it begins"
        elif attempt.duplicates:
            marks = ", ".join(sorted(set(attempt.duplicates)))
            draft.attributes[a.VIOLATION.key] = f"recorded more than once: {marks}"
        routed = attempt.first.get(Mark.ROUTED)
        if routed is not None:
            for attr in (a.PREFILL_WORKER, a.DECODE_WORKER):
                set_attribute(draft.attributes, attr.key, routed.value(attr))
        reserved = attempt.first.get(Mark.PAGES_RESERVED)
        released = attempt.first.get(Mark.DECODE_RELEASED)
        if reserved is not None and released is not None:
            held_s = max(released.t_ns - reserved.t_ns, 0) / 1e9
            draft.attributes[a.KV_HELD_SECONDS.key] = held_s
        for stamp in self.homeless.get(attempt.number, ()):
            if stamp.mark is Mark.WAITING and len(draft.events) < MAX_WAIT_EVENTS:
                draft.add_event("pd.wait", stamp.t_ns, mark_attributes(stamp))
            elif stamp.mark not in REQUEST_MARKS:
                put_attributes(draft, stamp, overwrite=False)
        draft.conclude(end, guilty=True)
        if attempt.active is not None and not end.is_open and end.outcome != Outcome.COMPLETED:
            draft.attributes[a.OUTCOME_STAGE.key] = attempt.active.name
        earlier = [
            other
            for number, other in self.evidence.attempts.items()
            if number < attempt.number and other.has_begun
        ]
        if earlier:
            draft.links += (
                Link(
                    trace_id=self.request.trace_id,
                    span_id=earlier[-1].ids.span_id,
                    attributes={"pd.link": "retry_of"},
                ),
            )
        return draft

    def _root(self, gateway: Leg) -> Draft:
        evidence, end = self.evidence, self.evidence.end
        received = evidence.first.get(Mark.RECEIVED) or next(
            stamp for stamp in evidence.stamps if stamp.leg is gateway
        )
        attributes: dict[str, AttrValue] = {
            a.SPAN.key: ROOT_SPAN,
            **self.identities[evidence.last_attempt.number],
            a.PROVIDER.key: "pdtrace",
        }
        for stamp in evidence.stamps:
            keys = ROOT_KEYS.get(stamp.mark)
            if keys is not None:
                for key, value in zip(keys, stamp.values, strict=False):
                    if key is not None and value is not None:
                        set_attribute(attributes, key, value)
        draft = Draft(
            name=root_name(attributes),
            span_id=self.request.root_span_id,
            parent_id=self.request.client_parent_span_id,
            leg=gateway,
            begin_ns=received.t_ns,
            end_ns=max(end.t_ns, received.t_ns),
            gap_ns=0,
            wall_offset_ns=self.wall_offset_ns,
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        draft.conclude(end, guilty=True)
        active = evidence.last_attempt.active
        if end.outcome != Outcome.COMPLETED and active is not None:
            attributes[a.OUTCOME_STAGE.key] = active.name
        sent = evidence.first.get(Mark.FIRST_TOKEN_SENT)
        if sent is not None and evidence.first.get(Mark.RECEIVED) is not None:
            attributes[a.TTFT_SECONDS.key] = max(sent.t_ns - received.t_ns, 0) / 1e9
        if end.t_ns < received.t_ns:
            by = seconds_text(received.t_ns - end.t_ns)
            attributes[a.VIOLATION.key] = f"ends {by} before it begins"
        missing = "; ".join(self._missing(gateway))
        if missing:
            attributes[a.INCOMPLETE.key] = missing
        return draft

    def _lost_records(self) -> Iterable[str]:
        for leg in self.request.legs:
            if leg.records_missed:
                yield f"{leg.process.instance} lost {leg.records_missed} records"
            if self.evidence.end.is_open and leg.lost_at_ns is not None:
                yield f"{leg.process.instance}: {leg.lost_reason}"
        if self.request.gave_up:
            yield self.request.gave_up

    def _missing(self, gateway: Leg) -> Iterable[str]:
        # A gateway that died wrote no end. That is how the request ended, nothing that is missing.
        has_end = not self.evidence.end.is_open and gateway.lost_at_ns is None
        for mark in (Mark.RECEIVED, *((Mark.COMPLETED,) if has_end else ())):
            if mark not in self.evidence.first:
                yield f"no {mark.name.lower()} mark"
        yield from self._lost_records()
        if self.evidence.end.outcome == Outcome.COMPLETED:
            roles = {leg.process.role for leg in self.evidence.legs}
            drafted = {name for by_name in self.drafts.values() for name in by_name}
            for stage in CHAINS[self.mode]:
                # One that begins on another host is for whoever has both to tell.
                begins_here = any(
                    MARKS[mark].roles & roles for mark in BEGIN_MARKS[self.mode, stage.name]
                )
                if (
                    stage.name not in drafted
                    and stage.name not in OPTIONAL_STAGES
                    and stage.roles & roles
                    and begins_here
                ):
                    yield f"no {stage.name}"
