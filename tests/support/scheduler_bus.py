"""Schedulers, a transfer double and a gateway double in one thread, under a fake clock.

Messages travel in channels, one per sender and receiver, in order within a channel and in any order
between channels: as sockets deliver them. A test delivers them one by one, twice, or not at all; or
lets `settle` run everything to its end. At the end of each turn of a worker its gauges of pages are
compared with the lists of who holds which.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdtrace.propagation import RequestContext
from pdtrace.recorder import Recorder
from pdtrace.ring.records import MarkRecord
from pdtrace.stages import Mark, Mode, Role
from pdtrace.testing import FakeClock, MemoryRings
from server.colocated.worker import ColocatedWorker
from server.config import ProcessConfig, Settings
from server.decode.worker import DecodeWorker
from server.engine.base import SamplingParams
from server.engine.fake import FakeEngine, FakeModel, StepShape
from server.heartbeat import Progress
from server.injection.fault import Fault
from server.injection.injector import Injector
from server.injection.workers import disturb, faulty_ports
from server.kv.layout import KvLayout
from server.ports import Ports
from server.prefill.worker import PrefillWorker
from server.round_trips import RoundTrips
from server.scheduler import IDLE_WAIT_S, Scheduler
from server.wire.messages import (
    AnyMessage,
    Cancel,
    CancelCopies,
    ColocatedRequest,
    CopiesDrained,
    CopyDone,
    CopyFailed,
    CopyJob,
    DecodeRequest,
    HeartbeatAck,
    LegClosed,
    Peer,
    PrefillRequest,
    RegisterPool,
    Tokens,
    decode,
    encode,
)
from server.wire.sockets import Received
from tests.support.page_truth import check_pages

GREEDY = SamplingParams()
PAGE = 4
MODEL = FakeModel(num_layers=1, num_kv_heads=1, head_dim=1)


StepTime = Callable[[StepShape], float]
"""Seconds that a step takes."""


def constant(seconds: float) -> StepTime:
    """Every step takes the same time."""

    def step_time(_: StepShape) -> float:
        return seconds

    return step_time


def by_kind(*, decode: Callable[[int], float] | float = 0.0, prompt_token: float = 0.0) -> StepTime:
    """Seconds of a decode step, maybe by its sequences, and of a prompt's pass by its tokens.

    A pass over one token of each prompt looks like a decode step.
    """

    def step_time(shape: StepShape) -> float:
        if shape.num_tokens > shape.num_seqs:
            return prompt_token * shape.num_tokens
        return decode(shape.num_seqs) if callable(decode) else decode

    return step_time


def nothing_lost(_receiver: str, _message: AnyMessage) -> bool:
    return False


@dataclass(slots=True)
class Channels:
    """All messages on their way, by (sender, receiver)."""

    waiting: dict[tuple[str, str], deque[AnyMessage]] = field(
        default_factory=dict[tuple[str, str], deque[AnyMessage]]
    )
    cut: set[str] = field(default_factory=set[str])
    """Endpoints that cannot be reached: sends to them fail."""
    loses: Callable[[str, AnyMessage], bool] = nothing_lost
    """Whether a message is lost on its way to a receiver. Its sender does not notice."""
    lost: list[AnyMessage] = field(default_factory=list[AnyMessage])

    def names(self) -> list[tuple[str, str]]:
        return sorted(name for name, messages in self.waiting.items() if messages)

    def put(self, sender: str, receiver: str, message: AnyMessage) -> None:
        if self.loses(receiver, message):
            self.lost.append(message)
            return
        # Encoded and decoded, so that what is no wire message cannot pass.
        self.waiting.setdefault((sender, receiver), deque()).append(decode(encode(message)))


@dataclass(slots=True)
class BusOutbox:
    name: str
    channels: Channels

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        if endpoint in self.channels.cut:
            return False
        self.channels.put(self.name, endpoint, message)
        return True


@dataclass(slots=True)
class BusInbox:
    """`cost_ms`: how long the reader takes for each message of a type."""

    clock: FakeClock
    waiting: deque[Received] = field(default_factory=deque[Received])
    cost_ms: dict[type, float] = field(default_factory=dict[type, float])

    def get(self, timeout_s: float) -> Received | None:
        return self._read(self.waiting.popleft()) if self.waiting else None

    def drain(self) -> list[Received]:
        messages = [self._read(received) for received in self.waiting]
        self.waiting.clear()
        return messages

    def _read(self, received: Received) -> Received:
        self.clock.advance(ms=self.cost_ms.get(type(received.message), 0))
        return received


class TransferDouble:
    """Copies pages between the engines' pools, one job per `step`, jobs of a handoff in order."""

    def __init__(self, outbox: BusOutbox, pools: Mapping[str, FakeEngine]) -> None:
        self._outbox = outbox
        self._pools = pools
        self._jobs: deque[CopyJob] = deque()
        self._over: set[str] = set()
        self._seen: set[tuple[str, int]] = set()
        self.fail_next: str | None = None
        self.settled = True
        """Whether failed copies say that the destination is not written any more."""
        self.failed: list[str] = []
        self._registered: set[tuple[str, str]] = set()
        self.peer = Peer(instance="transfer-0", endpoint="transfer", incarnation="t1")
        self._restarts = 0
        self.silent = False
        """Takes in nothing and copies nothing, like a process that hangs."""
        self._backlog: deque[AnyMessage] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._backlog) and not self.silent

    def restart(self) -> None:
        """Another process takes over, with an empty memory."""
        self.silent = False
        self._restarts += 1
        self.peer = Peer(
            instance="transfer-0", endpoint="transfer", incarnation=f"t{1 + self._restarts}"
        )
        self._backlog.clear()
        self._jobs.clear()
        self._over.clear()
        self._registered.clear()

    def take(self, message: AnyMessage) -> None:
        self._backlog.append(message)
        if not self.silent:
            self._take_all()

    def _take_all(self) -> None:
        while self._backlog:
            self._take(self._backlog.popleft())

    def _take(self, message: AnyMessage) -> None:
        match message:
            case CopyJob():
                key = (message.context.handoff_id, message.index)
                if message.context.handoff_id not in self._over and key not in self._seen:
                    self._seen.add(key)
                    self._jobs.append(message)
            case RegisterPool():
                self._registered.add((message.pool.owner, message.peer.incarnation))
            case CancelCopies():
                self._end(message.handoff_id)
                self._outbox.send(
                    message.reply_to.endpoint,
                    CopiesDrained(
                        handoff_id=message.handoff_id,
                        transfer=self.peer,
                        started_ns=self._restarts,
                        jobs=self._num_seen() if message.ask_jobs else {},
                    ),
                )
            case _:
                raise AssertionError(f"transfer got {message}")

    def step(self) -> None:
        if not self.silent:
            self._take_all()
        if self.silent or not self._jobs:
            return
        job = self._jobs.popleft()
        handoff_id = job.context.handoff_id
        answer: AnyMessage
        pools = {(ref.owner, ref.incarnation) for ref in (job.source, job.destination)}
        if not pools <= self._registered:
            self.fail_next = "unknown_pool"
        if self.fail_next is not None:
            answer = CopyFailed(
                handoff_id=handoff_id,
                index=job.index,
                reason=self.fail_next,
                message="injected",
                settled=self.settled,
            )
            self.fail_next = None
            self._end(handoff_id)
            self.failed.append(handoff_id)
        else:
            answer = CopyDone(
                handoff_id=handoff_id, index=job.index, last=job.last, num_bytes=self._copy(job)
            )
        for peer in (job.prefill, job.decode):
            self._outbox.send(peer.endpoint, answer)

    def _num_seen(self) -> dict[str, int]:
        return dict(Counter(handoff_id for handoff_id, _ in self._seen))

    def _end(self, handoff_id: str) -> None:
        self._over.add(handoff_id)
        self._jobs = deque(job for job in self._jobs if job.context.handoff_id != handoff_id)

    def _copy(self, job: CopyJob) -> int:
        source, destination = self._pools[job.source.owner], self._pools[job.destination.owner]
        layout = source.layout
        assert len(job.source_pages) == len(job.destination_pages) > 0
        for from_page, to_page in zip(job.source_pages, job.destination_pages, strict=True):
            destination.pool.memory[layout.page_range(to_page)] = source.pool.memory[
                layout.page_range(from_page)
            ]
        return len(job.source_pages) * layout.page_bytes


@dataclass(slots=True)
class Result:
    """What the gateway heard of one handoff. `token_at` by output index."""

    token_at: dict[int, int] = field(default_factory=dict[int, int])
    finish_reasons: list[str] = field(default_factory=list[str])
    closed: dict[str, list[LegClosed]] = field(default_factory=dict[str, list[LegClosed]])
    cached_tokens: int | None = None
    first_from: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Output tokens; fails when one is missing."""
        return [self.token_at[index] for index in range(len(self.token_at))]

    def outcome(self, instance: str) -> str:
        """Outcome of a leg; fails unless it closed exactly once."""
        (closed,) = self.closed[instance]
        return closed.outcome

    def reason(self, instance: str) -> str:
        (closed,) = self.closed[instance]
        return closed.reason


class Cluster:
    """A gateway double and the workers of one mode.

    `late_tokens` would be a bug: tokens of a leg after it was closed. `faulty` workers take faults.
    """

    def __init__(
        self,
        directory: Path,
        *,
        settings: Settings | None = None,
        colocated: bool = False,
        model: FakeModel = MODEL,
        decode_model: FakeModel | None = None,
        decode_layout: KvLayout | None = None,
        step_ms: float = 0.0,
        step_time: StepTime | None = None,
        record: bool = True,
        clock: FakeClock | None = None,
        registered: bool = True,
        faulty: bool = False,
    ) -> None:
        self.settings = settings or Settings(
            model="fake",
            page_size=PAGE,
            prefill_pages=32,
            decode_pages=32,
            prefill_budget=8,
            reserve_output_tokens=4,
            max_running=4,
            allow_faults=True,
        )
        self.clock = clock or FakeClock()
        self.rings = MemoryRings(clock=self.clock)
        self.model = model
        self.channels = Channels()
        self.results: dict[str, Result] = {}
        self.gateway = Peer(instance="gateway-0", endpoint="gateway", incarnation="g")
        self.beats = 0
        self.engines: dict[str, FakeEngine] = {}
        self.workers: dict[str, Scheduler[Any]] = {}
        self.inboxes: dict[str, BusInbox] = {}
        self.pauses: dict[str, list[tuple[int, int]]] = {}
        """Times in which a worker's process stood still."""
        self.injectors: dict[str, Injector] = {}
        self._faulty = faulty
        self.delivered: list[tuple[str, AnyMessage]] = []
        """Every message handed over, with its receiver, in order."""
        self._num_requests = 0
        self._record = record
        self.step_time: StepTime = step_time or constant(step_ms / 1e3)
        """Seconds that a step of any worker takes; may be replaced at any time."""
        roles = (
            {"worker-0": Role.WORKER}
            if colocated
            else {
                "prefill-0": Role.PREFILL,
                "decode-0": Role.DECODE,
            }
        )
        self._directory = directory
        self._decode_model = decode_model or model
        for instance, role in roles.items():
            self._add_worker(instance, role, life=1)
        self.transfer = TransferDouble(BusOutbox("transfer", self.channels), self.engines)
        if registered and not colocated:
            self.step()
            self.step()
            assert self.prefill.registration.known
            assert self.decode.registration.known
            self.delivered.clear()

    def _add_worker(self, instance: str, role: Role, *, life: int) -> None:
        config = ProcessConfig(
            settings=self.settings,
            role=role,
            instance=instance,
            incarnation=f"{instance}-{life}",
            endpoint=instance,
            gateway_endpoint="gateway",
            transfer_endpoint=None if role is Role.WORKER else "transfer",
        )
        pages = self.settings.prefill_pages if role is Role.PREFILL else self.settings.decode_pages
        engine = FakeEngine(
            pool_path=self._directory / f"{instance}-{life}.kv",
            owner=instance,
            num_pages=pages,
            page_size=self.settings.page_size,
            model=self._decode_model if role is Role.DECODE else self.model,
            step_time=self._take_step,
            sleep=lambda seconds: self.clock.advance(s=seconds),
        )
        self.engines[instance] = engine
        inbox = self.inboxes[instance] = BusInbox(self.clock)
        ports = Ports(
            inbox=inbox,
            outbox=BusOutbox(instance, self.channels),
            recorder=self.rings.recorder(role) if self._record else Recorder.disabled(),
            progress=Progress(self.clock),
            clock=self.clock.monotonic_ns,
            round_trips=RoundTrips(config.incarnation),
            pauses=lambda begin_ns, end_ns: [
                pause
                for pause in self.pauses.get(instance, ())
                if pause[0] < end_ns and pause[1] > begin_ns
            ],
        )
        classes = {
            Role.PREFILL: PrefillWorker,
            Role.DECODE: DecodeWorker,
            Role.WORKER: ColocatedWorker,
        }
        injector: Injector | None = None
        if self._faulty:
            me = Peer(instance=instance, endpoint=instance, incarnation=config.incarnation)
            injector = self.injectors[instance] = Injector(
                me,
                role=role,
                now_ns=self.clock.monotonic_ns,
                sleep=lambda seconds: self.clock.advance(s=seconds),
            )
        worker = classes[role](config, engine, faulty_ports(ports, injector))
        disturb(worker, injector, ())
        if self._record:
            self._watch_pages(worker, role)
        self.workers[instance] = worker

    def _watch_pages(self, worker: Scheduler[Any], role: Role) -> None:
        publish = worker.publish

        def publish_the_truth() -> None:
            publish()
            check_pages(worker, self.rings.reader(role).gauges())

        worker.publish = publish_the_truth

    def restart(self, instance: str) -> None:
        """A worker is killed, with all that lay in its inbox, and started again."""
        role = {"prefill": Role.PREFILL, "decode": Role.DECODE, "worker": Role.WORKER}[
            instance.rpartition("-")[0]
        ]
        life = int(self.workers[instance].peer.incarnation.rpartition("-")[2]) + 1
        self.engines[instance].close()
        self._add_worker(instance, role, life=life)

    def answer_beats(self, gateway: Peer | None = None) -> None:
        """The gateway answers a heartbeat of every worker."""
        self.beats += 1
        for instance, worker in self.workers.items():
            now_ns = self.clock.monotonic_ns()
            self.channels.put(
                "gateway",
                instance,
                HeartbeatAck(
                    incarnation=worker.peer.incarnation,
                    seq=self.beats,
                    sent_ns=now_ns,
                    received_ns=now_ns,
                    answered_ns=now_ns,
                    clock_id="",
                    gateway=self.gateway if gateway is None else gateway,
                ),
            )

    def _take_step(self, shape: StepShape) -> float:
        return self.step_time(shape)

    @property
    def prefill(self) -> PrefillWorker:
        worker = self.workers["prefill-0"]
        assert isinstance(worker, PrefillWorker)
        return worker

    @property
    def decode(self) -> DecodeWorker:
        worker = self.workers["decode-0"]
        assert isinstance(worker, DecodeWorker)
        return worker

    @property
    def colocated(self) -> ColocatedWorker:
        worker = self.workers["worker-0"]
        assert isinstance(worker, ColocatedWorker)
        return worker

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    # -- requests -----------------------------------------------------------------------------

    def stand_still(self, instance: str, ms: float) -> None:
        """A worker's process is stopped, and goes on after `ms`."""
        begin_ns = self.clock.monotonic_ns()
        self.clock.advance(ms=ms)
        self.pauses.setdefault(instance, []).append((begin_ns, self.clock.monotonic_ns()))

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        sampling: SamplingParams = GREEDY,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = False,
        early: bool = False,
        faults: dict[str, int] | None = None,
        decode_len: int | None = None,
        decode_digest: str | None = None,
    ) -> str:
        """Send a request to its legs (not delivered yet); returns its handoff id."""
        self._num_requests += 1
        number = self._num_requests
        colocated = "worker-0" in self.workers
        mode = Mode.COLOCATED if colocated else Mode.PD_EARLY if early else Mode.PD
        context = RequestContext(
            request_id=f"r{number}",
            trace_id=f"{number:032x}",
            root_span_id=f"{number:016x}",
            attempt_span_id=f"{number + 1000:016x}",
            handoff_id=f"h{number}",
            mode=mode,
        )
        self.results[context.handoff_id] = Result()
        if colocated:
            self.channels.put(
                "gateway",
                "worker-0",
                ColocatedRequest(
                    context=context,
                    prompt_ids=tuple(prompt),
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stop=stop,
                    ignore_eos=ignore_eos,
                    gateway=self.gateway,
                    faults=faults or {},
                ),
            )
            return context.handoff_id
        digest = f"digest-{hash(tuple(prompt))}"
        self.channels.put(
            "gateway",
            "decode-0",
            DecodeRequest(
                context=context,
                prompt_len=len(prompt) if decode_len is None else decode_len,
                prompt_digest=decode_digest or digest,
                max_tokens=max_tokens,
                sampling=sampling,
                stop=stop,
                ignore_eos=ignore_eos,
                early=early,
                prefill=self.workers["prefill-0"].peer,
                gateway=self.gateway,
                faults=faults or {},
                prompt_ids=tuple(prompt),
            ),
        )
        self.channels.put(
            "gateway",
            "prefill-0",
            PrefillRequest(
                context=context,
                prompt_ids=tuple(prompt),
                prompt_digest=digest,
                max_tokens=max_tokens,
                sampling=sampling,
                early=early,
                ignore_eos=ignore_eos,
                decode=self.workers["decode-0"].peer,
                gateway=self.gateway,
                faults=faults or {},
            ),
        )
        return context.handoff_id

    def cancel(self, handoff_id: str) -> None:
        """The client went away: tell every leg."""
        for instance in self.workers:
            self.channels.put(
                "gateway",
                instance,
                Cancel(
                    handoff_id=handoff_id,
                    outcome="cancelled",
                    reason="client_disconnected",
                    by="client",
                    gateway=self.gateway,
                ),
            )

    def expected(
        self, prompt: Sequence[int], count: int, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        return self.model.expected_tokens(prompt, count, sampling)

    def inject(self, *faults: Fault) -> None:
        """Arm `faults` in the workers that they name; for a cluster made `faulty`."""
        for injector in self.injectors.values():
            injector.arm(faults)

    # -- time and messages --------------------------------------------------------------------

    def deliver(self, channel: tuple[str, str]) -> None:
        """Hand the next message of `channel` to its receiver."""
        message = self.channels.waiting[channel].popleft()
        self.delivered.append((channel[1], message))
        self.hand(channel[1], message)

    def hand(self, receiver: str, message: AnyMessage) -> None:
        """Hand over a message, be it for the first time or again."""
        if receiver == "gateway":
            self._hear(message)
        elif receiver == "transfer":
            self.transfer.take(message)
        else:
            self.inboxes[receiver].waiting.append(Received(message, self.clock.monotonic_ns()))

    def deliver_all(self) -> None:
        """Hand over every message on its way."""
        while names := self.channels.names():
            for name in names:
                self.deliver(name)

    def step(self) -> None:
        """Everybody takes one turn; all messages are delivered before and after."""
        self.deliver_all()
        for worker in self.workers.values():
            worker.step(0)
        self.transfer.step()
        self.deliver_all()

    def settle(self, *, max_turns: int = 20_000) -> None:
        """Run until nothing is in flight, moving the clock when all wait: to the next timer, or as
        far as an idle loop sleeps."""
        for _ in range(max_turns):
            before = self._progress()
            self.step()
            if not any(len(worker.legs) for worker in self.workers.values()):
                self.step()
                return
            if self._progress() == before and not self.transfer.busy:
                self._sleep()
        states = {
            name: [(leg.handoff_id, str(leg.state)) for leg in worker.legs]
            for name, worker in self.workers.items()
        }
        raise AssertionError(f"stuck after {max_turns} turns: {states}")

    def run_for(self, ms: float, *, turn_ms: float = 1.0) -> None:
        """Take turns of `turn_ms` for `ms`."""
        end_ns = self.clock.monotonic_ns() + round(ms * 1e6)
        while self.clock.monotonic_ns() < end_ns:
            self.step()
            self.clock.advance(ms=turn_ms)

    def _progress(self) -> tuple[object, ...]:
        return (
            tuple(
                (leg.handoff_id, leg.state, getattr(leg, "computed", 0))
                for worker in self.workers.values()
                for leg in worker.legs
            ),
            len(self.delivered),
        )

    def _sleep(self) -> None:
        wakes = [
            wake_ns
            for worker in self.workers.values()
            if (wake_ns := worker.legs.next_wake_ns()) is not None
        ]
        wakes += [
            due_ns
            for injector in self.injectors.values()
            if (due_ns := injector.next_due_ns) is not None
        ]
        now_ns = self.clock.monotonic_ns()
        if wakes and min(wakes) > now_ns:
            self.clock.advance(ns=min(min(wakes) - now_ns, round(IDLE_WAIT_S * 1e9)))

    def _hear(self, message: AnyMessage) -> None:
        match message:
            case Tokens():
                for item in message.items:
                    result = self.results[item.handoff_id]
                    assert message.instance not in result.closed, "tokens after LegClosed"
                    assert item.token_ids or item.finish_reason
                    if item.index == 0:
                        result.cached_tokens = item.cached_tokens
                        result.first_from = message.instance
                    for offset, token_id in enumerate(item.token_ids):
                        assert item.index + offset not in result.token_at, "token sent twice"
                        result.token_at[item.index + offset] = token_id
                    if item.finish_reason is not None:
                        result.finish_reasons.append(item.finish_reason)
            case LegClosed():
                result = self.results.setdefault(message.handoff_id, Result())
                result.closed.setdefault(message.instance, []).append(message)
            case _:
                raise AssertionError(f"gateway got {message}")

    # -- what was recorded --------------------------------------------------------------------

    def marks(self, role: Role) -> list[MarkRecord]:
        """Marks that a role recorded since the last call, in order."""
        return [record for record in self.rings.records(role) if isinstance(record, MarkRecord)]

    def marks_by_leg(self, role: Role) -> dict[int, list[MarkRecord]]:
        """The same by leg, without waits."""
        legs: dict[int, list[MarkRecord]] = {}
        for record in self.marks(role):
            if record.mark is not Mark.WAITING:
                legs.setdefault(record.key, []).append(record)
        return legs

    def check(self) -> None:
        """Everything is whole, and nothing is held once nothing is in flight."""
        for worker in self.workers.values():
            worker.check_integrity()
            assert worker.ignored["integrity"] == 0
            if len(worker.legs) == 0:
                cache = getattr(worker, "cache", None)
                cached = 0 if cache is None else cache.num_pages
                kept = getattr(worker, "quarantine", None)
                held = 0 if kept is None else kept.num_pages
                assert worker.allocator.num_used == cached + held


def mark_names(records: Sequence[MarkRecord]) -> list[str]:
    return [Mark(record.mark).name for record in records]
