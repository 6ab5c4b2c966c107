"""One generation request on its way through the gateway: what is known of it so far.

Owns the record that the steps of `pipeline` fill in; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.types import Send

from pdtrace.gaps import GapTally
from pdtrace.recorder import Recorder, RequestContext, RequestTrace
from pdtrace.stages import Mark
from server.gateway.attempts import Attempt, Event
from server.gateway.mailbox import Mailbox
from server.gateway.metrics import BUCKETS_S, GatewayMetrics
from server.gateway.now import NS_PER_S
from server.gateway.openai_api import Operation
from server.gateway.relay import OutputStream
from server.gateway.responder import Responder


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A request between its first byte and its end.

    received_ns   CLOCK_MONOTONIC instant of its first byte
    headers       that its response will carry, whatever it says
    faults        stage → delay in milliseconds
    attempt       the one that goes on, once it was dispatched
    attempts      all that were dispatched
    num_open      those of them that are not closed
    is_over       there will be no further attempt
    retried       why the attempt before this one ended; None in the first
    queue_left_s  how long it may still wait for a place and for workers, all attempts together
    gaps          between the writes of content
    told_pause    stage, and end of the pause of this process that its trace was told of last
    stages        seconds in the gateway's own stages, for the log line and the metrics
    """

    operation: Operation
    context: RequestContext
    trace: RequestTrace
    received_ns: int
    send: Send
    headers: Sequence[tuple[bytes, bytes]]
    responder: Responder
    faults: Mapping[str, int] = field(default_factory=dict[str, int])
    mailbox: Mailbox[Event] = field(default_factory=Mailbox[Event])
    prompt_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    attempt: Attempt | None = None
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    num_open: int = 0
    is_over: bool = False
    retried: str | None = None
    queue_left_s: float
    output: OutputStream | None = None
    stages: dict[str, float] = field(default_factory=dict[str, float])
    stage_began_ns: int = 0
    told_pause: tuple[str, int] | None = None
    first_write_ns: int | None = None
    last_write_ns: int | None = None
    gaps: GapTally = field(default_factory=lambda: GapTally(BUCKETS_S))

    @property
    def admission_key(self) -> str:
        """Unique per request, whatever id its caller gave."""
        return self.context.root_span_id

    def begin_attempt(self, recorder: Recorder, reason: str, at_ns: int) -> None:
        """The attempt before failed for `reason`: the next one begins from nothing."""
        self.context = self.context.next_attempt()
        self.trace = recorder.begin(self.context, at_ns=at_ns)
        self.retried = reason
        self.attempt = None
        self.output = None
        self.stage_began_ns = at_ns

    def stage_ended(self, name: str, at_ns: int) -> None:
        """A stage that the gateway owns ended; the next one begins."""
        spent_s = (at_ns - self.stage_began_ns) / NS_PER_S
        self.stages[name] = self.stages.get(name, 0.0) + spent_s
        self.stage_began_ns = at_ns

    def wrote(self, at_ns: int, metrics: GatewayMetrics) -> None:
        """Content bytes went to the client's socket."""
        if self.first_write_ns is None:
            self.first_write_ns = at_ns
            self.trace.mark(Mark.FIRST_TOKEN_SENT, at_ns=at_ns)
            metrics.first_token(
                self.operation,
                (at_ns - self.received_ns) / NS_PER_S,
                streamed=self.responder.streams,
            )
        elif self.last_write_ns is not None:
            gap_ns = at_ns - self.last_write_ns
            self.gaps.add(gap_ns)
            metrics.gap(self.operation, gap_ns / NS_PER_S)
        self.last_write_ns = at_ns

    def measure(self, metrics: GatewayMetrics) -> None:
        """Measure a request that completed."""
        output = self.output
        if output is None:
            return
        metrics.tokens(
            {
                "input": len(self.prompt_ids),
                "output": output.num_tokens,
                "cached": output.cached_tokens,
            }
        )
        first, last = self.first_write_ns, self.last_write_ns
        if first is not None and last is not None and last > first and output.num_tokens > 1:
            metrics.time_per_token(
                self.operation, (last - first) / NS_PER_S / (output.num_tokens - 1)
            )
