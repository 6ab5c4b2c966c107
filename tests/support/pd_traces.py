"""Traces of requests as the agent exports them, with chosen stage lengths, for analysis tests.

`Story` names what a request did; `Story.trace()` gives its spans: exact times on a monotonic clock,
wall times in whole microseconds with the gaps of ADR 001, waits as attributes and events.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdtrace import semconv as a
from pdtrace.spans import AttrValue, Event, Resource, Span, SpanKind, StatusCode, Trace
from pdtrace.stages import (
    ATTEMPT_SPAN,
    CHAINS,
    ROOT_SPAN,
    STAGE_BY_NAME,
    Mode,
    Outcome,
    Role,
    Stage,
)
from tests.support.copies import replace

WALL_NS = 1_760_000_000_000_000_000
MONO_NS = 5_000_000_000_000

HEALTHY_S: Mapping[str, float] = {
    "gateway.ingest": 0.004,
    "gateway.queue": 0.0005,
    "gateway.route": 0.00002,
    "gateway.dispatch": 0.00015,
    "hop.dispatch": 0.0006,
    "decode.reserve": 0.002,
    "hop.publish": 0.0007,
    "prefill.queue": 0.030,
    "prefill.compute": 0.120,
    "transfer": 0.008,
    "hop.notice": 0.006,
    "decode.queue": 0.004,
    "decode.first": 0.0002,
    "hop.token": 0.001,
    "decode.generate": 0.700,
    "gateway.finish": 0.002,
}
"""Seconds of a plain request of 100 prompt and 32 output tokens."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """One request. Lengths in seconds by stage; `gap_s` and `preempted_s` lie inside generation.

    ends_in    stage in which it ended, cut at its length; later stages do not exist
    waits      wait attributes per stage
    exact      whether spans carry `pd.begin_ns` and `pd.end_ns`
    """

    request_id: str = "req-1"
    mode: Mode = Mode.PD
    lengths_s: Mapping[str, float] = field(default_factory=lambda: dict(HEALTHY_S))
    gap_s: float = 0.0
    preempted_s: float = 0.0
    prompt_tokens: int = 100
    output_tokens: int = 32
    outcome: Outcome = Outcome.COMPLETED
    reason: str | None = None
    by: str | None = None
    ends_in: str | None = None
    waits: Mapping[str, Mapping[str, AttrValue]] = field(
        default_factory=dict[str, Mapping[str, AttrValue]]
    )
    exact: bool = True
    start_s: float = 0.0
    host: str = "host-a"
    stream: bool = True

    def stalled(self, stage: str, seconds: float) -> Story:
        """The same request, held up in one stage."""
        if stage == "decode.gap":
            return replace(self, gap_s=self.gap_s + seconds)
        if stage == "decode.preempted":
            return replace(self, preempted_s=self.preempted_s + seconds)
        lengths = dict(self.lengths_s)
        lengths[stage] = lengths.get(stage, 0.0) + seconds
        return replace(self, lengths_s=lengths)

    def trace(self) -> Trace:
        return _Writer(self).trace()


def noisy(request_id: str, rng: random.Random, mode: Mode = Mode.PD) -> Story:
    """A healthy request on a busy machine: work within a third, waits up to four times as long."""
    prompt, output = rng.randint(20, 400), rng.randint(8, 96)
    lengths: dict[str, float] = {}
    for stage in CHAINS[mode]:
        usual = HEALTHY_S[stage.name]
        if stage.name == "prefill.compute":
            usual = 0.02 + 0.001 * prompt
        elif stage.name == "decode.generate":
            usual = 0.02 * output
        if stage.kind.value == "wait":
            lengths[stage.name] = usual * rng.uniform(0.2, 4.0)
        else:
            lengths[stage.name] = usual * rng.uniform(0.8, 1.35)
    return Story(
        request_id=request_id,
        mode=mode,
        lengths_s=lengths,
        prompt_tokens=prompt,
        output_tokens=output,
        start_s=rng.uniform(0, 60),
    )


def retried() -> Trace:
    """A first attempt that failed in the transfer, then a whole second one."""
    first = Story(ends_in="transfer", outcome=Outcome.FAILED).trace()
    second = Story(start_s=0.5).trace()
    root = next(s for s in first.spans if s.name == "chat smol")
    end = max(int(str(s.attributes[a.END_NS.key])) for s in second.spans)

    def adopt(span: Span) -> Span:
        parent = root.span_id if span.name == ATTEMPT_SPAN else span.parent_id
        if span.name == "gateway.finish":
            parent = root.span_id
        return replace(
            span,
            trace_id=first.trace_id,
            parent_id=parent,
            attributes={**span.attributes, a.ATTEMPT.key: 2},
        )

    ingress = {"gateway.ingest", "gateway.queue", "chat smol"}
    later = [adopt(s) for s in second.spans if s.name not in ingress]
    outcome = {a.END_NS.key: end, a.OUTCOME.key: "completed", a.OUTCOME_STAGE.key: ""}
    whole = replace(root, attributes={**root.attributes, **outcome})
    earlier = [s for s in first.spans if s is not root]
    return Trace(trace_id=first.trace_id, spans=(whole, *earlier, *later))


def role_of(stage: Stage, mode: Mode) -> Role:
    """The process that a story's stage belongs to."""
    roles = stage.roles - {Role.WORKER} if mode is not Mode.COLOCATED else stage.roles
    return Role.WORKER if Role.WORKER in roles else next(iter(roles))


class _Writer:
    def __init__(self, story: Story) -> None:
        self.story = story
        seed = f"{story.request_id}/{story.start_s}"
        rng = random.Random(seed.encode(errors="replace"))
        self.trace_id = f"{rng.getrandbits(128):032x}"
        self.rng = rng
        self.spans: list[Span] = []
        self.base = round(story.start_s * 1e9)

    def span(
        self,
        name: str,
        begin: int,
        end: int,
        *,
        role: Role,
        parent: str | None,
        gap_ns: int = 1_000,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttrValue] | None = None,
        span_id: str | None = None,
        status: StatusCode = StatusCode.UNSET,
        waited: Mapping[str, AttrValue] | None = None,
    ) -> str:
        span_id = span_id or f"{self.rng.getrandbits(64):016x}"
        start = (WALL_NS + begin) // 1000 * 1000
        stop = max(start, (WALL_NS + end) // 1000 * 1000 - gap_ns)
        found: dict[str, AttrValue] = {a.REQUEST_ID.key: self.story.request_id, a.ATTEMPT.key: 1}
        if name in STAGE_BY_NAME:
            found[a.STAGE.key] = name
            found[a.STAGE_KIND.key] = STAGE_BY_NAME[name].kind.value
        if self.story.exact:
            found |= {a.BEGIN_NS.key: MONO_NS + begin, a.END_NS.key: MONO_NS + end}
        found |= dict(attributes or {}) | dict(waited or {})
        events = (Event(name="pd.wait", time_ns=start, attributes=dict(waited)),) if waited else ()
        self.spans.append(
            Span(
                trace_id=self.trace_id,
                span_id=span_id,
                parent_id=parent,
                name=name,
                kind=kind,
                start_ns=start,
                end_ns=stop,
                resource=Resource(
                    attributes={
                        "service.name": role.service_name,
                        "service.instance.id": f"{role.value}-0",
                        "host.id": self.story.host,
                    }
                ),
                attributes=found,
                events=events,
                status=status,
            )
        )
        return span_id

    def trace(self) -> Trace:
        story, mode = self.story, self.story.mode
        root_id, attempt_id = f"{self.rng.getrandbits(64):016x}", f"{self.rng.getrandbits(64):016x}"
        now = self.base
        generate: tuple[str, int] | None = None
        attempt: tuple[int, int] = (now, now)
        first_token = sent = 0
        for stage in CHAINS[mode]:
            name = stage.name
            if name not in story.lengths_s:
                continue
            length = round(story.lengths_s[name] * 1e9)
            if name == "decode.generate":
                length += round((story.gap_s + story.preempted_s) * 1e9)
                # The first token travels while generation goes on.
                now = first_token or now
            if name == "gateway.finish":
                # The answer is written in order: its end waits for the first token.
                length += max(0, sent - now)
            ended = name == story.ends_in
            span_id = self.span(
                name,
                now,
                now + length,
                role=role_of(stage, mode),
                parent=root_id if stage.parent == ROOT_SPAN else attempt_id,
                kind=SpanKind.SERVER if stage.server else SpanKind.INTERNAL,
                attributes={a.OUTCOME.key: story.outcome.value} if ended else None,
                status=_status(story.outcome) if ended else StatusCode.UNSET,
                waited=story.waits.get(name),
            )
            if name == "gateway.queue":
                attempt = (now + length, now + length)
            if name == "decode.first" and mode is not Mode.PD_EARLY:
                first_token = now + length
            if name == "hop.token":
                sent = now + length
            if name == "decode.generate":
                generate = (span_id, now)
            if stage.parent == ATTEMPT_SPAN:
                attempt = (attempt[0], now + length)
            if name == "transfer":
                self.copies(now, now + length, attempt_id)
            if name == "prefill.compute":
                self.chunks(now, now + length, span_id)
            if name == "decode.reserve":
                self.span(
                    "prefill.bootstrap",
                    now,
                    now + length,
                    role=Role.PREFILL,
                    parent=attempt_id,
                    gap_ns=2_000,
                )
            now += length
            if ended:
                break
        if generate is not None:
            self.pauses(*generate)
        self.span(
            ATTEMPT_SPAN,
            *attempt,
            role=Role.GATEWAY,
            parent=root_id,
            attributes={a.SPAN.key: ATTEMPT_SPAN},
            span_id=attempt_id,
        )
        self.span(
            "chat smol",
            self.base,
            now,
            role=Role.GATEWAY,
            parent=None,
            gap_ns=0,
            kind=SpanKind.SERVER,
            attributes=self.root_attributes(),
            span_id=root_id,
            status=_status(story.outcome),
        )
        return Trace(trace_id=self.trace_id, spans=tuple(self.spans))

    def copies(self, begin: int, end: int, attempt_id: str) -> None:
        third = (end - begin) // 3
        for index, (low, high) in enumerate(((begin, begin + third), (begin + third, end))):
            name = "transfer.copy" if index else "transfer.queue"
            self.span(
                name,
                low,
                high,
                role=Role.TRANSFER,
                parent=attempt_id,
                gap_ns=2_000,
                attributes={a.CHUNK_INDEX.key: 0, a.KV_BYTES.key: 4_194_304},
            )

    def chunks(self, begin: int, end: int, parent: str) -> None:
        middle = (begin + end) // 2
        for index, (low, high) in enumerate(((begin, middle), (middle, end))):
            self.span(
                "prefill.chunk",
                low,
                high,
                role=role_of(STAGE_BY_NAME["prefill.chunk"], self.story.mode),
                parent=parent,
                gap_ns=2_000,
                attributes={a.CHUNK_INDEX.key: index, a.CHUNK_TOKENS.key: 50},
            )

    def pauses(self, parent: str, begin: int) -> None:
        now = begin + 10_000_000
        role = role_of(STAGE_BY_NAME["decode.gap"], self.story.mode)
        for name, seconds in (
            ("decode.gap", self.story.gap_s),
            ("decode.preempted", self.story.preempted_s),
        ):
            if seconds:
                end = now + round(seconds * 1e9)
                self.span(
                    name,
                    now,
                    end,
                    role=role,
                    parent=parent,
                    gap_ns=2_000,
                    waited=self.story.waits.get(name),
                )
                now = end + 5_000_000

    def root_attributes(self) -> dict[str, AttrValue]:
        story = self.story
        attributes: dict[str, AttrValue] = {
            a.SPAN.key: ROOT_SPAN,
            a.MODE.key: story.mode.value,
            a.OUTCOME.key: story.outcome.value,
            a.PROMPT_TOKENS.key: story.prompt_tokens,
            a.OUTPUT_TOKENS.key: story.output_tokens,
            a.CACHED_TOKENS.key: 0,
            a.MAX_TOKENS.key: 96,
            a.STREAM.key: story.stream,
            a.REQUEST_MODEL.key: "smol",
            a.PREFILL_WORKER.key: "prefill-0",
            a.DECODE_WORKER.key: "decode-0",
            a.HTTP_STATUS.key: 200 if story.outcome is Outcome.COMPLETED else 504,
        }
        if story.reason:
            attributes[a.OUTCOME_REASON.key] = story.reason
        if story.by:
            attributes[a.OUTCOME_BY.key] = story.by
        if story.ends_in:
            attributes[a.OUTCOME_STAGE.key] = story.ends_in
        return attributes


def _status(outcome: Outcome) -> StatusCode:
    healthy = outcome in {Outcome.COMPLETED, Outcome.CANCELLED}
    return StatusCode.UNSET if healthy else StatusCode.ERROR
