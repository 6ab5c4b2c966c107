"""A whole server in one thread under a fake clock: the real gateway, workers and transfer process.

Only sockets, HTTP and time are doubles. Every message lies in a channel until it is delivered, so
that a test may lose, repeat, hold back or reorder any; processes die, hang and start again as the
test says. The gateway's event loop takes its time from the fake clock and never waits.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdtrace.propagation import RequestContext
from pdtrace.ring.records import MarkRecord
from pdtrace.stages import Mark, Role
from pdtrace.testing import FakeClock, MemoryRings
from server.colocated.worker import ColocatedWorker
from server.config import COLOCATED, Deadlines, ProcessConfig, Settings
from server.decode.worker import DecodeWorker
from server.engine.fake import FakeEngine
from server.fake_tokenizer import FakeTokenizer
from server.gateway.openai_api import GenerationRequest, Operation, parse_request
from server.gateway.pipeline import Gateway
from server.heartbeat import Progress
from server.injection import transfers, workers
from server.injection.damage import FaultyShmTransfer
from server.injection.injector import Injector
from server.injection.transfers import faulty_sink, faulty_source, faulty_transfer
from server.injection.workers import faulty_ports
from server.kv.transfer.shm import ShmTransfer
from server.kv.transfer.worker import TransferWorker, take_step
from server.ports import Ports
from server.prefill.worker import PrefillWorker
from server.round_trips import RoundTrips
from server.scheduler import Scheduler
from server.standstill import Pause
from server.taken import TakenRequests
from server.wire.messages import (
    AnyMessage,
    Heartbeat,
    HeartbeatAck,
    InjectFaults,
    Peer,
    RegisterPool,
    decode,
    encode,
)
from server.wire.sockets import Received
from tests.support.scheduler_bus import MODEL, PAGE, BusInbox

GATEWAY = "gateway-0"
TRANSFER = "transfer-0"
TURN_MS = 20.0
TOKENIZER = FakeTokenizer()

Channel = tuple[str, str]
"""Sender and receiver."""


def scarce_settings(**changes: Any) -> Settings:
    """Two pairs, little of everything, and deadlines of seconds."""
    values: dict[str, Any] = {
        "model": "fake",
        "page_size": PAGE,
        "prefill": 2,
        "decode": 2,
        "prefill_pages": 24,
        "decode_pages": 16,
        "prefill_budget": 8,
        "reserve_output_tokens": 4,
        "max_running": 3,
        "max_waiting": 3,
        "max_concurrency": 5,
        "max_queue": 3,
        "preempted_pages": 6,
        "heartbeat_s": 0.2,
        "dead_after_s": 1.0,
        "stalled_after_s": 3.0,
        "deadlines": Deadlines(
            gateway_queue_s=4.0,
            accept_s=0.5,
            reserve_s=3.0,
            handshake_s=2.0,
            prefill_queue_s=3.0,
            prefill_compute_s=3.0,
            transfer_s=2.0,
            await_kv_s=9.0,
            decode_queue_s=3.0,
            preempted_s=3.0,
            drain_s=1.0,
            peer_silence_s=2.0,
            request_s=12.0,
        ),
        **changes,
    }
    return Settings(**values)


class _NeverWaits(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        del timeout
        return super().select(0)


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """An event loop for which time passes on a fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(_NeverWaits())
        self._clock = clock

    def time(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    def settle(self) -> None:
        """Run what is ready, and what becomes ready by it."""
        while True:
            self.call_soon(self.stop)
            self.run_forever()
            if not getattr(self, "_ready"):  # noqa: B009 - nothing public tells
                return


@dataclass(slots=True)
class Post:
    """All messages on their way, by channel.

    blocked   channels in which nothing moves for now
    held      messages that come later than those behind them
    down      processes that do not exist: what is sent to them is refused, or lost without a word
    mute      of these, the ones of which senders do not notice
    """

    waiting: dict[Channel, deque[AnyMessage]] = field(
        default_factory=dict[Channel, deque[AnyMessage]]
    )
    held: list[tuple[Channel, AnyMessage]] = field(default_factory=list[tuple[Channel, AnyMessage]])
    blocked: set[Channel] = field(default_factory=set[Channel])
    down: set[str] = field(default_factory=set[str])
    mute: set[str] = field(default_factory=set[str])

    def channels(self) -> list[Channel]:
        return sorted(channel for channel, messages in self.waiting.items() if messages)

    def put(self, channel: Channel, message: AnyMessage) -> bool:
        _, receiver = channel
        if receiver in self.down:
            return receiver in self.mute
        # Encoded and decoded, so that what is no wire message cannot pass.
        self.waiting.setdefault(channel, deque()).append(decode(encode(message)))
        return True

    def take(self, channel: Channel) -> AnyMessage:
        return self.waiting[channel].popleft()

    def release_held(self) -> None:
        """What was held back comes now, behind everything else."""
        for channel, message in self.held:
            if channel[1] not in self.down:
                self.waiting.setdefault(channel, deque()).append(message)
        self.held.clear()

    def forget(self, receiver: str) -> None:
        for channel, messages in self.waiting.items():
            if channel[1] == receiver:
                messages.clear()


@dataclass(slots=True)
class Outlet:
    """What one incarnation sends through. A dead one sends nothing any more."""

    sender: str
    post: Post
    alive: bool = True

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        return not self.alive or self.post.put((self.sender, endpoint), message)

    def forget(self, endpoint: str) -> None:
        if self.alive and (waiting := self.post.waiting.get((self.sender, endpoint))):
            waiting.clear()

    def is_lost(self, endpoint: str) -> bool:
        return endpoint in self.post.down and endpoint not in self.post.mute


@dataclass(slots=True)
class Process:
    """One incarnation of a worker or of the transfer process."""

    worker: Scheduler[Any] | TransferWorker
    inbox: BusInbox
    outlet: Outlet
    injector: Injector
    progress: Progress
    peer: Peer
    role: Role
    engine: FakeEngine | None = None
    transfer: ShmTransfer | None = None
    frozen: bool = False
    taken: TakenRequests = field(default_factory=TakenRequests)
    beats: int = 0
    beat_ns: int = 0

    def step(self) -> None:
        if isinstance(self.worker, TransferWorker):
            take_step(self.worker, 0.0)
        else:
            self.worker.step(0.0)

    def close(self) -> None:
        self.outlet.alive = False
        if self.transfer is not None:
            self.transfer.close()
        if self.engine is not None:
            self.engine.close()


class Client:
    """One request as its client sees it."""

    def __init__(
        self, number: int, prompt: Sequence[int], max_tokens: int, *, stream: bool
    ) -> None:
        self.request_id = f"r{number}"
        self.prompt = tuple(prompt)
        self.max_tokens = max_tokens
        self.stream = stream
        self.left = asyncio.Event()
        self.cut_off = False
        """Its gateway died."""
        self.messages: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None
        self.begun_ns = 0

    async def send(self, message: Any) -> None:
        if not self.cut_off:
            assert not self.ended, f"{self.request_id}: {message} behind the end"
            self.messages.append(message)

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        return any(
            m["type"] == "http.response.body" and not m.get("more_body") for m in self.messages
        )

    @property
    def is_over(self) -> bool:
        assert self.task is not None
        return self.cut_off or self.task.done()

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.messages if "status" in m), None)

    @property
    def body(self) -> str:
        return b"".join(m.get("body", b"") for m in self.messages).decode()

    @property
    def events(self) -> list[Any]:
        """Of a stream: the JSON of each event, `[DONE]` as text."""
        blocks = [block.removeprefix("data: ") for block in self.body.split("\n\n")[:-1]]
        return [block if block == "[DONE]" else json.loads(block) for block in blocks]

    @property
    def text(self) -> str:
        """What came of the answer."""
        if self.status != 200:
            return ""
        if not self.stream:
            return json.loads(self.body)["choices"][0]["text"] if self.ended else ""
        chunks = [event for event in self.events if event != "[DONE]"]
        return "".join(c["text"] for chunk in chunks for c in chunk.get("choices", ()))

    @property
    def right_text(self) -> str:
        return TOKENIZER.decode(MODEL.expected_tokens(self.prompt, self.max_tokens))

    @property
    def ending(self) -> str:
        """In a word: the status, the code of an error, or why there is none."""
        if self.cut_off:
            return "the gateway's death"
        if not self.ended:
            return "its client's leaving"
        if self.status != 200:
            return f"{self.status} {json.loads(self.body)['error']['code']}"
        errors = [e for e in self.events if e != "[DONE]" and "error" in e] if self.stream else []
        return f"200 and {errors[0]['error']['code']}" if errors else "200"

    def check(self) -> None:
        """What came is right so far; fails where it is not. One status, one end, no other text."""
        assert sum("status" in m for m in self.messages) <= 1
        if self.messages:
            assert self.status is not None
        text, right = self.text, self.right_text
        assert right.startswith(text), f"{self.request_id}: {text!r} is not of {right!r}"
        if not self.ended:
            return
        if self.status != 200:
            assert json.loads(self.body)["error"]["code"]
        elif self.stream:
            errors = [event for event in self.events if event != "[DONE]" and "error" in event]
            assert self.events.count("[DONE]") == 1
            assert self.events[-1] == "[DONE]"
            assert len(errors) <= 1
            if not errors:
                assert text == right
        else:
            assert text == right


class WholeServer:
    """Everybody of one server. `close` it.

    post      carries the messages; a test may have one of its own
    clients   every request that was sent
    """

    def __init__(self, directory: Path, settings: Settings, post: Post | None = None) -> None:
        self.settings = settings
        self.clock = FakeClock()
        self.loop = FakeTimeLoop(self.clock)
        self.rings = MemoryRings(clock=self.clock)
        self.post = Post() if post is None else post
        self.clients: list[Client] = []
        self.processes: dict[str, Process] = {}
        self.ends: Counter[str] = Counter()
        """How often the present gateway recorded a request's end, by root span."""
        self._directory = directory
        self._lives: Counter[str] = Counter()
        self._gateway: Gateway | None = None
        self._gateway_outlet: Outlet | None = None
        self._tick_ns = 0
        self._gateway_stands = False
        self._gateway_pauses: list[Pause] = []
        self.start(GATEWAY)
        for instance in self.workers:
            self.start(instance)
        self.run(until=lambda: self.gateway is not None and self.gateway.is_ready(), limit_s=5)

    @property
    def workers(self) -> list[str]:
        """Every instance but the gateway."""
        if self.settings.mode == COLOCATED:
            return [f"worker-{n}" for n in range(self.settings.workers)]
        return [
            TRANSFER,
            *(f"prefill-{n}" for n in range(self.settings.prefill)),
            *(f"decode-{n}" for n in range(self.settings.decode)),
        ]

    @property
    def gateway(self) -> Gateway | None:
        """The present one; None while there is none."""
        return self._gateway

    # -- processes ----------------------------------------------------------------------------

    def is_up(self, instance: str) -> bool:
        return instance not in self.post.down

    def start(self, instance: str) -> None:
        """A new incarnation, at the same address, started later than any before it."""
        self.clock.advance(ms=1)
        self._lives[instance] += 1
        peer = Peer(
            instance=instance,
            endpoint=instance,
            incarnation=f"{instance}-{self._lives[instance]}",
        )
        self.post.down.discard(instance)
        self.post.mute.discard(instance)
        outlet = Outlet(instance, self.post)
        if instance == GATEWAY:
            self._gateway_outlet = outlet
            self._tick_ns = self.clock.monotonic_ns()
            self._gateway = Gateway(
                settings=self.settings,
                me=peer,
                model=MODEL.info,
                tokenizer=TOKENIZER,
                mail=outlet,
                recorder=self.rings.recorder(Role.GATEWAY, peer.incarnation),
                clock=self.clock,
                pauses=self._paused_within,
            )
            return
        self.processes[instance] = self._make(peer, outlet)

    def _make(self, peer: Peer, outlet: Outlet) -> Process:
        role = Role(peer.instance.rpartition("-")[0])
        config = ProcessConfig(
            settings=self.settings,
            role=role,
            instance=peer.instance,
            incarnation=peer.incarnation,
            endpoint=peer.endpoint,
            gateway_endpoint=GATEWAY,
            transfer_endpoint=None if role is Role.WORKER else TRANSFER,
        )
        inbox, progress = BusInbox(self.clock), Progress(self.clock)
        recorder = self.rings.recorder(role, peer.incarnation)
        injector = Injector(
            peer,
            role=role,
            now_ns=self.clock.monotonic_ns,
            sleep=lambda seconds: self.clock.advance(s=seconds),
        )
        if role is Role.TRANSFER:
            transfer = FaultyShmTransfer(verify=True, clock=self.clock, injector=injector)
            mover = TransferWorker(
                config,
                transfer=faulty_transfer(transfer, injector),
                inbox=faulty_source(inbox, injector, self.clock),
                outbox=faulty_sink(outlet, injector),
                recorder=recorder,
                progress=progress,
                clock=self.clock,
            )
            transfers.disturb(mover, injector, ())
            return Process(mover, inbox, outlet, injector, progress, peer, role, transfer=transfer)
        settings = self.settings
        engine = FakeEngine(
            pool_path=self._directory / f"{peer.incarnation}.kv",
            owner=peer.instance,
            num_pages=settings.prefill_pages if role is Role.PREFILL else settings.decode_pages,
            page_size=settings.page_size,
            model=MODEL,
            sleep=lambda seconds: self.clock.advance(s=seconds),
        )
        # No step may see what an earlier life, or nobody, has left there.
        engine.pool.memory[:] = b"\x5a" * len(engine.pool.memory)
        ports = Ports(
            inbox=inbox,
            outbox=outlet,
            recorder=recorder,
            progress=progress,
            clock=self.clock.monotonic_ns,
            round_trips=RoundTrips(peer.incarnation),
            taken=TakenRequests(),
        )
        classes = {
            Role.PREFILL: PrefillWorker,
            Role.DECODE: DecodeWorker,
            Role.WORKER: ColocatedWorker,
        }
        worker = classes[role](config, engine, faulty_ports(ports, injector))
        workers.disturb(worker, injector, ())
        return Process(
            worker, inbox, outlet, injector, progress, peer, role, engine=engine, taken=ports.taken
        )

    def clear_faults(self) -> None:
        """Nothing goes wrong inside any more; what was taken is given back."""
        for process in self.processes.values():
            process.injector.obey(InjectFaults(clear=True))

    def kill(self, instance: str, *, noticed: bool) -> None:
        """It is gone, with all that lay in its inbox. `noticed`: sends to it are refused."""
        self.post.down.add(instance)
        if not noticed:
            self.post.mute.add(instance)
        self.post.forget(instance)
        if instance != GATEWAY:
            self.processes.pop(instance).close()
            return
        assert self._gateway_outlet is not None
        self._gateway_outlet.alive = False
        self._gateway = None
        self.ends.clear()
        for client in self.clients:
            if not client.is_over:
                client.cut_off = True
                assert client.task is not None
                client.task.cancel()
        self.loop.settle()

    # -- requests -----------------------------------------------------------------------------

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stream: bool,
        request_id: str | None = None,
    ) -> Client:
        """A client's request, by default under an id of its own. Fails without a gateway."""
        gateway = self.gateway
        assert gateway is not None
        client = Client(len(self.clients), prompt, max_tokens, stream=stream)
        client.request_id = request_id or client.request_id
        client.begun_ns = self.clock.monotonic_ns()
        self.clients.append(client)
        client.task = self.loop.create_task(self._serve(gateway, client))
        self.loop.settle()
        return client

    async def _serve(self, gateway: Gateway, client: Client) -> None:
        body = {
            "model": "fake",
            "prompt": client.prompt,
            "max_tokens": client.max_tokens,
            "stream": client.stream,
            "temperature": 0,
            "ignore_eos": True,
        }

        async def read() -> GenerationRequest:
            return parse_request(
                Operation.TEXT_COMPLETION,
                json.dumps(body).encode(),
                served_name=gateway.served_name,
            )

        call = gateway.begin(
            Operation.TEXT_COMPLETION,
            "/v1/completions",
            context=RequestContext.create(request_id=client.request_id, mode=gateway.mode),
            received_ns=self.clock.monotonic_ns(),
            send=client.send,
            headers=(),
        )
        await gateway.serve(call, read, client.receive)

    # -- time and messages --------------------------------------------------------------------

    def deliver(self, channel: Channel) -> None:
        """Hand over the next message of a channel."""
        self._hand(channel[1], self.post.take(channel))

    def _hand(self, receiver: str, message: AnyMessage) -> None:
        if receiver != GATEWAY:
            process = self.processes.get(receiver)
            if process is None:  # an address that a foreign message gave
                return
            process.inbox.waiting.append(Received(message, self.clock.monotonic_ns()))
            return
        gateway = self.gateway
        assert gateway is not None
        if isinstance(message, Heartbeat):
            now_ns = self.clock.monotonic_ns()
            assert self._gateway_outlet is not None
            self._gateway_outlet.send(
                message.peer.endpoint,
                HeartbeatAck(
                    incarnation=message.peer.incarnation,
                    seq=message.seq,
                    sent_ns=message.sent_ns,
                    received_ns=now_ns,
                    answered_ns=now_ns,
                    clock_id="",
                    gateway=gateway.cluster.me,
                ),
            )
        gateway.cluster.deliver(message)
        self.loop.settle()

    def deliver_all(self) -> None:
        """Hand over what is on its way now and not blocked; not what comes of it."""
        for channel in self.post.channels():
            if channel in self.post.blocked or (self._gateway_stands and channel[1] == GATEWAY):
                continue
            for _ in range(len(self.post.waiting[channel])):
                if self.post.waiting[channel]:  # the gateway may forget some meanwhile
                    self.deliver(channel)

    def turn(self, *, ms: float = TURN_MS) -> None:
        """All messages are delivered, everybody takes a turn, and time passes."""
        self.deliver_all()
        for process in list(self.processes.values()):
            if not process.frozen:
                process.step()
        self._follow_stopped()
        self._beat()
        self.clock.advance(ms=ms)
        gateway = self.gateway
        if self._gateway_stands:
            return
        if gateway is not None and self.clock.monotonic_ns() >= self._tick_ns:
            self._tick_ns = self.clock.monotonic_ns() + round(self.settings.heartbeat_s * 1e9)
            gateway.tick()
        self.loop.settle()

    def pause_gateway(self, *, ms: float) -> None:
        """The gateway's process stands still while the others go on."""
        begin_ns = self.clock.monotonic_ns()
        self._gateway_stands = True
        while self.clock.monotonic_ns() < begin_ns + ms * 1e6:
            self.turn()
        self._gateway_stands = False
        self._gateway_pauses.append((begin_ns, self.clock.monotonic_ns()))

    def _paused_within(self, begin_ns: int, end_ns: int) -> list[Pause]:
        return [
            pause for pause in self._gateway_pauses if pause[0] < end_ns and pause[1] > begin_ns
        ]

    def _follow_stopped(self) -> None:
        """Who was told to stop and has nothing left ends, and is started again."""
        for instance, worker in self.schedulers().items():
            if worker.draining and len(worker.legs) == 0:
                self.kill(instance, noticed=True)
                self.start(instance)

    def _beat(self) -> None:
        now_ns = self.clock.monotonic_ns()
        for process in self.processes.values():
            if process.frozen or now_ns < process.beat_ns:
                continue
            process.beat_ns = now_ns + round(self.settings.heartbeat_s * 1e9)
            process.beats += 1
            state, engine = process.progress.state, process.engine
            taken = process.taken.state
            process.taken.telling(process.beats, taken)
            process.outlet.send(
                GATEWAY,
                Heartbeat(
                    peer=process.peer,
                    role=process.role,
                    seq=process.beats,
                    sent_ns=now_ns,
                    load=state.load,
                    progress_age_s=process.progress.age_s,
                    busy=state.busy,
                    draining=process.progress.draining,
                    info=None if engine is None else MODEL.info,
                    layout=None if engine is None else engine.layout,
                    ignored=dict(state.ignored),
                    heard=taken.heard,
                    taken=taken.ids,
                ),
            )
            if engine is not None and self.settings.mode != COLOCATED:
                pool = RegisterPool(peer=process.peer, pool=engine.pool.descriptor)
                process.outlet.send(TRANSFER, pool)

    def run(self, *, until: Callable[[], bool], limit_s: float, turn_ms: float = TURN_MS) -> None:
        """Take turns until `until`. Fails, saying who holds what, if that takes longer."""
        end_ns = self.clock.monotonic_ns() + round(limit_s * 1e9)
        while not until():
            assert self.clock.monotonic_ns() < end_ns, f"stuck: {self.what_is_open()}"
            self.turn(ms=turn_ms)

    # -- what must hold -----------------------------------------------------------------------

    def schedulers(self) -> dict[str, Scheduler[Any]]:
        return {
            instance: process.worker
            for instance, process in self.processes.items()
            if isinstance(process.worker, Scheduler)
        }

    def check(self) -> None:
        """What holds at every moment."""
        for instance, worker in self.schedulers().items():
            worker.check_integrity()
            assert worker.ignored["integrity"] == 0, instance
        for process in self.processes.values():
            if isinstance(process.worker, TransferWorker):
                process.worker.jobs.check_integrity()
        for client in self.clients:
            client.check()
        gateway = self.gateway
        if gateway is None:
            return
        gateway.admission.check_integrity()
        for record in self.rings.records(Role.GATEWAY, gateway.cluster.me.incarnation):
            if isinstance(record, MarkRecord) and record.mark is Mark.COMPLETED:
                self.ends[str(record.key)] += 1
        assert set(self.ends.values()) <= {1}, f"requests ended twice: {self.ends}"

    def what_is_open(self) -> dict[str, object]:
        """Everything that is still in flight or held, by who says so."""
        found: dict[str, object] = {}
        for instance, worker in self.schedulers().items():
            legs = [f"{leg.handoff_id} {leg.state}" for leg in worker.legs]
            cache = getattr(worker, "cache", None)
            cached = 0 if cache is None else cache.num_pages
            held = worker.allocator.num_used - cached
            if legs or held:
                found[instance] = (legs, f"{held} pages")
        for instance, process in self.processes.items():
            if isinstance(process.worker, TransferWorker) and not process.worker.jobs.is_idle:
                found[instance] = [job.handoff_id for job in process.worker.jobs]
        waiting = [client.request_id for client in self.clients if not client.is_over]
        if waiting:
            found["clients"] = waiting
        gateway = self.gateway
        if gateway is None:
            found[GATEWAY] = "is not there"
        elif gateway.admission.in_flight or len(gateway.cluster.attempts):
            found[GATEWAY] = (gateway.admission.in_flight, len(gateway.cluster.attempts))
        elif not gateway.is_ready():
            found[GATEWAY] = gateway.unready_reason()
        return found

    def close(self) -> None:
        """Close everything; a request in flight is cancelled."""
        for client in self.clients:
            if client.task is not None and not client.task.done():
                client.task.cancel()
        self.loop.settle()
        for process in self.processes.values():
            process.close()
        self.loop.close()
