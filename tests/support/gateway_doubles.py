"""A gateway under test: the real one on a loopback port, with scripted workers on real sockets.

The workers hold no KV and no model. What they say, and when, is a script: an async function of the
leg, so that a test can put any order, repetition or failure on the wire.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdtrace.ring.records import MarkRecord, Record
from pdtrace.stages import Mark, Outcome, Role
from pdtrace.testing import MemoryRings
from server.config import PD, Deadlines, Settings
from server.engine.fake import FakeModel
from server.fake_tokenizer import FakeTokenizer
from server.gateway.pipeline import Gateway
from server.gateway.worker import HttpServer, acknowledge
from server.wire.messages import (
    AnyMessage,
    Cancel,
    ColocatedRequest,
    DecodeRequest,
    Heartbeat,
    HeartbeatAck,
    LegClosed,
    Peer,
    PrefillRequest,
    TokenItem,
    Tokens,
    WorkerLoad,
)
from server.wire.sockets import AsyncInbox, Outbox

LegRequest = DecodeRequest | PrefillRequest | ColocatedRequest
PAGE_SIZE = 16
WAIT_S = 30.0


@dataclass(slots=True)
class LegDouble:
    """One leg of a request in a scripted worker: what its script can say."""

    worker: WorkerDouble
    request: LegRequest
    sent: int = 0

    @property
    def handoff_id(self) -> str:
        return self.request.context.handoff_id

    def say(
        self,
        data: bytes,
        *,
        index: int | None = None,
        finish: str | None = None,
        cached: int | None = None,
    ) -> None:
        """Send `data`, one token per byte, as one item."""
        at = self.sent if index is None else index
        item = TokenItem(
            handoff_id=self.handoff_id,
            index=at,
            token_ids=tuple(data),
            finish_reason=finish,
            cached_tokens=cached,
        )
        self.sent = max(self.sent, at + len(data))
        self.worker.send(Tokens(instance=self.worker.instance, items=(item,)))

    def close(
        self,
        outcome: Outcome = Outcome.COMPLETED,
        *,
        reason: str = "",
        message: str = "",
        by: str | None = None,
    ) -> None:
        self.worker.send(
            LegClosed(
                handoff_id=self.handoff_id,
                instance=self.worker.instance,
                outcome=outcome,
                reason=reason,
                message=message,
                by=self.worker.instance if by is None else by,
            )
        )


Script = Callable[[LegDouble], Awaitable[None]]


async def close_at_once(leg: LegDouble) -> None:
    """A prefill leg that has done its part."""
    leg.close()


def speak(
    text: str | bytes, *, finish: str = "stop", gap_s: float = 0.0, cached: int | None = None
) -> Script:
    """A leg that sends `text` token by token and completes."""
    data = text.encode() if isinstance(text, str) else text

    async def script(leg: LegDouble) -> None:
        for index in range(len(data)):
            last = index == len(data) - 1
            leg.say(
                data[index : index + 1],
                finish=finish if last else None,
                cached=cached if index == 0 else None,
            )
            if gap_s:
                await asyncio.sleep(gap_s)
        if not data:
            leg.say(b"", finish=finish, cached=cached)
        leg.close()

    return script


def endless(text: str = "x", *, gap_s: float = 0.005) -> Script:
    """A leg that goes on until it is cancelled."""

    async def script(leg: LegDouble) -> None:
        while True:
            leg.say(text.encode())
            await asyncio.sleep(gap_s)

    return script


def fails(
    outcome: Outcome, reason: str, *, message: str = "it broke", by: str | None = None
) -> Script:
    """A leg that ends at once, for `reason`."""

    async def script(leg: LegDouble) -> None:
        leg.close(outcome, reason=reason, message=f"{leg.worker.instance}: {message}", by=by)

    return script


async def silent(_leg: LegDouble) -> None:
    """A leg from which nothing is heard."""


class WorkerDouble:
    """A process as the gateway sees it.

    answers_cancel   False: it never answers a Cancel
    cancel_stops     False: a script goes on behind a Cancel, until `stop_legs`
    loses_cancels    Cancels that never reach it, from here on
    acks             heartbeats that were answered
    """

    def __init__(
        self, role: Role, index: int, *, directory: Path, gateway: str, script: Script
    ) -> None:
        self.role = role
        self.instance = f"{role.value}-{index}"
        self.script = script
        self.answers_cancel = True
        self.cancel_stops = True
        self.loses_cancels = 0
        self.acks = 0
        self.page_size = PAGE_SIZE
        self.requests: list[LegRequest] = []
        self.cancels: list[Cancel] = []
        self.load = WorkerLoad(pages_total=1024, pages_free=1024)
        self.beats = True
        self.draining = False
        self._gateway = gateway
        self._inbox = AsyncInbox(f"ipc://{directory / self.instance}")
        self._outbox = Outbox()
        self._seq = 0
        self._legs: dict[str, asyncio.Task[None]] = {}
        self._seen = asyncio.Condition()
        self.restart()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    def restart(self) -> None:
        """Become another incarnation at the same address."""
        self.peer = Peer(
            instance=self.instance,
            endpoint=self._inbox.endpoint,
            incarnation=secrets.token_hex(8),
        )

    def send(self, message: AnyMessage) -> None:
        assert self._outbox.send(self._gateway, message)

    def beat(self, *, progress_age_s: float = 0.0, busy: bool = False) -> None:
        """Send one heartbeat."""
        self._seq += 1
        model = FakeModel()
        self.send(
            Heartbeat(
                peer=self.peer,
                role=self.role,
                seq=self._seq,
                sent_ns=0,
                load=self.load,
                progress_age_s=progress_age_s,
                busy=busy,
                draining=self.draining,
                info=None if self.role is Role.TRANSFER else model.info,
                layout=None if self.role is Role.TRANSFER else model.layout(self.page_size),
            )
        )

    async def tell(self, *, progress_age_s: float = 0.0, busy: bool = False) -> None:
        """Send one heartbeat and wait until the gateway has answered it."""
        self.beat(progress_age_s=progress_age_s, busy=busy)
        sent = self._seq
        await self.until(lambda worker: worker.acks >= sent)

    async def until(self, condition: Callable[[WorkerDouble], bool]) -> None:
        """Wait until what this worker received satisfies `condition`."""
        async with asyncio.timeout(WAIT_S), self._seen:
            await self._seen.wait_for(lambda: condition(self))

    def stop_legs(self) -> None:
        """End every script."""
        for task in self._legs.values():
            task.cancel()
        self._legs.clear()

    async def die(self) -> None:
        """Be gone, as a process that is killed: its connections break, nothing more is said."""
        self.beats = False
        self.stop_legs()
        self._tasks[0].cancel()
        await asyncio.to_thread(self._inbox.close)

    async def close(self) -> None:
        for task in (*self._tasks, *self._legs.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._legs.values(), return_exceptions=True)
        await asyncio.to_thread(self._inbox.close)
        self._outbox.close()

    async def _beat(self) -> None:
        while True:
            if self.beats:
                self.beat()
            await asyncio.sleep(0.05)

    async def _read(self) -> None:
        while True:
            for received in await self._inbox.receive():
                self._take(received.message)
            async with self._seen:
                self._seen.notify_all()

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, HeartbeatAck):
            self.acks += 1
        elif isinstance(message, Cancel):
            self.cancels.append(message)
            if self.loses_cancels:
                self.loses_cancels -= 1
                return
            if self.cancel_stops:
                task = self._legs.pop(message.handoff_id, None)
                if task is not None:
                    task.cancel()
            if self.answers_cancel:
                self.send(
                    LegClosed(
                        handoff_id=message.handoff_id,
                        instance=self.instance,
                        outcome=message.outcome,
                        reason=message.reason,
                        message="",
                        by=message.by,
                    )
                )
        else:
            assert isinstance(message, LegRequest)
            self.requests.append(message)
            leg = LegDouble(self, message)
            self._legs[leg.handoff_id] = asyncio.ensure_future(_run(self.script, leg))


async def _run(script: Script, leg: LegDouble) -> None:
    await script(leg)


@dataclass(slots=True)
class GatewayUnderTest:
    """A running gateway, its workers by instance name, and a client."""

    gateway: Gateway
    server: HttpServer
    url: str
    workers: dict[str, WorkerDouble]
    rings: MemoryRings
    client: httpx.AsyncClient
    _records: list[Record] = field(default_factory=list[Record])

    @property
    def decode(self) -> WorkerDouble:
        return self.workers["decode-0"]

    @property
    def prefill(self) -> WorkerDouble:
        return self.workers["prefill-0"]

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    async def complete(
        self, *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """POST /v1/completions with a short prompt and `fields`."""
        body = {"model": "fake", "prompt": "hi", **fields}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def chat(
        self, *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """POST /v1/chat/completions with a short message and `fields`."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    def marks(self, mark: Mark) -> list[tuple[Any, ...]]:
        """Values of every record of `mark` so far, in order."""
        return [
            record.values
            for record in self.records()
            if isinstance(record, MarkRecord) and record.mark == mark
        ]

    def mark_names(self) -> list[str]:
        """Names of all marks so far, in order."""
        return [r.mark.name for r in self.records() if isinstance(r, MarkRecord)]

    def records(self) -> list[Record]:
        """Everything recorded so far."""
        self._records += self.rings.records(Role.GATEWAY)
        return self._records

    async def marked(self, mark: Mark, count: int = 1) -> None:
        """Wait until the gateway has recorded `mark` so many times."""
        async with asyncio.timeout(WAIT_S):
            while len(self.marks(mark)) < count:  # noqa: ASYNC110 -- marks have no event
                await asyncio.sleep(0.005)

    async def dispatched(self) -> None:
        """Wait until the decode worker has its first request."""
        await self.decode.until(lambda worker: len(worker.requests) == 1)

    async def waiting(self, count: int) -> None:
        """Wait until `count` requests are in the gateway's queue."""
        async with asyncio.timeout(WAIT_S):
            while self.gateway.admission.waiting < count:  # noqa: ASYNC110 -- the gateway has no event for it
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Wait until nothing is in flight and no place is taken."""
        async with asyncio.timeout(WAIT_S):
            while self.gateway.admission.in_flight or len(self.gateway.cluster.attempts):  # noqa: ASYNC110 -- the gateway has no event for it
                await asyncio.sleep(0.005)
        self.gateway.admission.check_integrity()


@asynccontextmanager
async def gateway_under_test(
    directory: Path,
    *,
    decode_script: Script | None = None,
    prefill_script: Script = close_at_once,
    prefill: int = 1,
    decode: int = 1,
    wait_ready: bool = True,
    deadlines: Deadlines | None = None,
    **settings: Any,
) -> AsyncGenerator[GatewayUnderTest, None]:
    """A gateway with workers; in colocated mode its `decode` workers are colocated ones.

    Fails when a request is still in flight at the end, or a place is not given back.
    """
    config = Settings(
        model="fake",
        prefill=prefill,
        decode=decode,
        heartbeat_s=0.05,
        dead_after_s=settings.pop("dead_after_s", 5.0),
        deadlines=deadlines or Deadlines(drain_s=2.0),
        **settings,
    )
    rings = MemoryRings()
    endpoint = f"ipc://{directory / 'gateway-0'}"
    inbox, outbox = AsyncInbox(endpoint), Outbox()
    gateway = Gateway(
        settings=config,
        me=Peer(instance="gateway-0", endpoint=endpoint, incarnation="g"),
        model=FakeModel().info,
        tokenizer=FakeTokenizer(),
        mail=outbox,
        recorder=rings.recorders[Role.GATEWAY],
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(gateway)
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener])),
        asyncio.create_task(_deliver(inbox, outbox, gateway)),
        asyncio.create_task(_tick(gateway)),
    ]
    script = decode_script or speak("Hello!")
    if config.mode == PD:
        plan = [(Role.TRANSFER, 1, silent), (Role.PREFILL, prefill, prefill_script)]
        plan.append((Role.DECODE, decode, script))
    else:
        plan = [(Role.WORKER, config.workers, script)]
    workers: dict[str, WorkerDouble] = {}
    for role, count, role_script in plan:
        for index in range(count):
            worker = WorkerDouble(
                role, index, directory=directory, gateway=endpoint, script=role_script
            )
            workers[worker.instance] = worker
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx.Limits(max_connections=200)
    try:
        async with httpx.AsyncClient(
            base_url=url, timeout=WAIT_S, trust_env=False, limits=limits
        ) as client:
            under_test = GatewayUnderTest(gateway, server, url, workers, rings, client)
            if wait_ready:
                await _until_ready(client)
            yield under_test
            await under_test.idle()
    finally:
        server.should_exit = True
        await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        await asyncio.gather(
            *(worker.close() for worker in workers.values()), asyncio.to_thread(inbox.close)
        )
        outbox.close()
        listener.close()


async def _until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 -- asked over HTTP
            await asyncio.sleep(0.01)


async def _deliver(inbox: AsyncInbox, outbox: Outbox, gateway: Gateway) -> None:
    while True:
        for received in await inbox.receive():
            if isinstance(received.message, Heartbeat):
                beat = received.message
                ack = acknowledge(
                    beat, received.arrived_ns, gateway.cluster.me, "", gateway.now.ns()
                )
                outbox.send(beat.peer.endpoint, ack)
            gateway.cluster.deliver(received.message)


async def _tick(gateway: Gateway) -> None:
    while True:
        gateway.tick()
        await asyncio.sleep(0.02)


def events_of(body: str) -> list[Any]:
    """The JSON of each server-sent event; `[DONE]` stays text. Fails on anything but data lines."""
    events: list[Any] = []
    for block in body.split("\n\n"):
        if not block:
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def text_of(events: Sequence[Any]) -> str:
    """The completion or chat text of a stream."""
    choices = [c for event in events if event != "[DONE]" for c in event.get("choices", ())]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
