"""The gateway process: `run(config)`.

Owns what lives as long as the process (event loop, sockets, ring, HTTP server) and its stopping:
a signal makes it not ready, lets open requests finish for `drain_s`, ends the rest with an error,
and exits with 0. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from pdtrace.clock import SYSTEM_CLOCK
from pdtrace.recorder import Recorder
from pdtrace.stages import Role
from server.config import ProcessConfig
from server.engine.loader import load_model_info
from server.errors import StartError
from server.gateway.cluster import Mail
from server.gateway.connections import Connections, affordable
from server.gateway.http import create_app
from server.gateway.pipeline import Gateway
from server.gateway.protocol import protocol_class
from server.injection.gateways import disturb, faulty_inbox, faulty_mail
from server.injection.ports import AsyncSource
from server.injection.process import make_injector, recorder_class
from server.pauses import Pauses, PauseThread
from server.readiness import announce_ready
from server.recording import open_recorder
from server.tokenizer import load_tokenizer
from server.wire.curve import load_keys
from server.wire.messages import Heartbeat, HeartbeatAck, Peer
from server.wire.sockets import AsyncInbox, InboxCounters, Outbox

HTTP_STOP_S = 2
NEVER_S = 24 * 3600
STOP_GRACE_S = 5.0

_logger = logging.getLogger(__name__)


def run(config: ProcessConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError or ModelError when it cannot start."""
    # uvicorn reports its own start and stop; what matters of them is said here.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    listener = _listener(config)
    try:
        asyncio.run(_serve(config, listener))
    finally:
        listener.close()


async def _serve(config: ProcessConfig, listener: socket.socket) -> None:
    settings = config.settings
    model = load_model_info(settings.model)
    tokenizer = load_tokenizer(settings.model)
    keys = load_keys(settings.curve_keys)
    inbox = AsyncInbox(config.endpoint, keys=keys)
    outbox = Outbox(keys=keys)
    recorder = Recorder.disabled()
    pauses = Pauses()
    pause_thread = PauseThread(pauses)
    try:
        injector = make_injector(config)
        mail = faulty_mail(outbox, injector)
        recorder = open_recorder(config, Role.GATEWAY, SYSTEM_CLOCK, recorder_class(injector))
        gateway = Gateway(
            settings=settings,
            me=Peer(
                instance=config.instance,
                endpoint=config.endpoint,
                incarnation=config.incarnation,
            ),
            model=model,
            tokenizer=tokenizer,
            mail=mail,
            recorder=recorder,
            pauses=pauses.within,
        )
        disturb(gateway, injector, settings.faults)
        server = HttpServer(gateway, on_start=lambda: announce_ready(config))
        source = faulty_inbox(inbox, injector)
        pause_thread.start()
        tasks = [
            asyncio.create_task(_deliver(source, mail, gateway, recorder.clock_id)),
            asyncio.create_task(_tick(gateway, inbox.counters, settings.heartbeat_s)),
            asyncio.create_task(_stop_on_signal(gateway, server)),
        ]
        try:
            await server.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        pause_thread.stop()
        inbox.close()
        outbox.close()
        recorder.close()


class HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to us, speaks our protocol and says when it accepts."""

    def __init__(self, gateway: Gateway, *, on_start: Callable[[], None] = lambda: None) -> None:
        self._on_start = on_start
        limits = gateway.settings.client_limits
        table = Connections(affordable(limits.max_connections), gateway.metrics.registry)
        super().__init__(
            uvicorn.Config(
                create_app(gateway),
                http=protocol_class(limits, table, gateway.now),
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=NEVER_S,  # `protocol` closes idle connections, and counts them
                timeout_graceful_shutdown=HTTP_STOP_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listener(config: ProcessConfig) -> socket.socket:
    """The public socket: the launcher's, or one made here."""
    if config.http_fd is not None:
        return socket.socket(fileno=config.http_fd)
    host, port = config.settings.host, config.settings.port
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartError(
            f"port {port} on {host} cannot be used ({reason}): choose another with --port"
        ) from error


async def _deliver(inbox: AsyncSource, mail: Mail, gateway: Gateway, clock_id: str) -> None:
    me = gateway.cluster.me
    while True:
        for received in await inbox.receive():
            try:
                if isinstance(received.message, Heartbeat):
                    beat = received.message
                    mail.send(
                        beat.peer.endpoint,
                        acknowledge(beat, received.arrived_ns, me, clock_id, gateway.now.ns()),
                    )
                gateway.cluster.deliver(received.message)
            except Exception:  # one message must not stop the others
                _logger.exception("%s could not be handled", type(received.message).__name__)


def acknowledge(
    beat: Heartbeat, received_ns: int, me: Peer, clock_id: str, answered_ns: int
) -> HeartbeatAck:
    """The answer to `beat`, to be sent at `answered_ns`, which is now."""
    return HeartbeatAck(
        incarnation=beat.peer.incarnation,
        seq=beat.seq,
        sent_ns=beat.sent_ns,
        received_ns=received_ns,
        answered_ns=answered_ns,
        clock_id=clock_id,
        gateway=me,
    )


async def _tick(gateway: Gateway, inbox: InboxCounters, every_s: float) -> None:
    malformed = 0
    while True:
        try:
            gateway.tick()
            gateway.metrics.denied = inbox.denied
            for _ in range(inbox.malformed - malformed):
                gateway.metrics.ignored("malformed")
                malformed += 1
        except Exception:  # deaths must go on being noticed
            _logger.exception("the gateway's clock failed; it goes on")
        await asyncio.sleep(every_s)


async def _stop_on_signal(gateway: Gateway, server: HttpServer) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await signals.get()
    hurried = asyncio.create_task(signals.get())
    stopped = asyncio.create_task(
        gateway.shutdown(min(STOP_GRACE_S, gateway.settings.deadlines.drain_s))
    )
    await asyncio.wait((hurried, stopped), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    stopped.cancel()
    server.should_exit = True
