"""Start a server, watch it, stop it.

Owns which processes a server has, their endpoints and the order of stopping; the command line is
`server.cli`, pids and exits are `server.children`, folders and locks are `server.rundir`.

Order of stopping: gateway (drains), workers, transfer, agent. The agent is last, so that what the
others recorded while they stopped is exported too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from server import children
from server.children import PROCESS_MODULE, Child
from server.config import COLOCATED, NO_AGENT_HTTP, PD, ProcessConfig, Settings
from server.disk_cache import DiskCache
from server.engine.config import load_config
from server.engine.fake import FakeModel
from server.engine.loader import load_model_info
from server.errors import ServerError, StartError
from server.kv.layout import KvLayout
from server.models import is_fake, locate_model
from server.process import AGENT, EXIT_START_ERROR
from server.rundir import RunDir, point_latest

STATE_VERSION = 1
_POLL_S = 0.1
_STOP_S = 10.0
_AGENT_STOP_S = 20.0
_AGENT_RESTART_S = (1.0, 60.0)  # first and longest pause before a dead agent is started again
_STOP_ORDER = (("gateway",), ("prefill", "decode", "worker"), ("transfer",), (AGENT,))

logger = logging.getLogger(__name__)


class ServerCrashedError(ServerError):
    """A process of the running server ended unasked; the message has its last log lines."""

    code = "server_crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a running server tells others: printed by `up --json`, written to `server.json`."""

    url: str
    agent_url: str | None
    model: str
    mode: str
    pid: int
    run_dir: str
    processes: list[dict[str, object]]
    settings: dict[str, object]
    started_at: float
    version: int = STATE_VERSION
    ready: bool = False
    stopped_at: float | None = None


def plan_processes(
    settings: Settings,
    *,
    endpoint: Callable[[str], str],
    pools: Path,
    http_fd: int,
    free_port: Callable[[], int],
) -> list[ProcessConfig]:
    """Every serving process of one host (the agent is `agent_config`), in order of starting.

    With `transfer="tcp"` the prefill side and the decode side get a transfer process each, as on
    two hosts, and the bytes cross a TCP connection on loopback.
    """
    gateway = endpoint("gateway-0")

    def process(role: str, index: int, **extra: str | int | None) -> ProcessConfig:
        instance = f"{role}-{index}"
        fields = {
            "settings": settings,
            "role": role,
            "instance": instance,
            "incarnation": secrets.token_hex(8),
            "endpoint": endpoint(instance),
            "gateway_endpoint": gateway,
            **extra,
        }
        return ProcessConfig(**fields)  # pyright: ignore[reportArgumentType]  msgspec checks below

    def pool(role: str, index: int) -> str:
        return str(pools / f"{role}-{index}")

    plan: list[ProcessConfig] = []
    if settings.mode == COLOCATED:
        plan += [
            process("worker", index, pool_path=pool("worker", index))
            for index in range(settings.workers)
        ]
    else:
        hosts = 2 if settings.transfer == "tcp" else 1
        addresses = [
            f"127.0.0.1:{free_port()}" if settings.transfer == "tcp" else None for _ in range(hosts)
        ]
        plan += [
            process("transfer", host, transfer_address=addresses[host]) for host in range(hosts)
        ]
        for role, count, host in (
            ("prefill", settings.prefill, 0),
            ("decode", settings.decode, hosts - 1),
        ):
            plan += [
                process(
                    role,
                    index,
                    pool_path=pool(role, index),
                    transfer_endpoint=endpoint(f"transfer-{host}"),
                    transfer_address=addresses[host],
                )
                for index in range(count)
            ]
    plan.append(process("gateway", 0, http_fd=http_fd))
    return plan


def agent_config(settings: Settings, *, endpoint: Callable[[str], str]) -> ProcessConfig:
    """The recording's agent; it speaks to no other process."""
    return ProcessConfig(
        settings=settings,
        role=AGENT,
        instance=AGENT,
        incarnation=secrets.token_hex(8),
        endpoint=endpoint(AGENT),
        gateway_endpoint=endpoint("gateway-0"),
    )


def pool_bytes(settings: Settings) -> int:
    """Bytes of all KV pools together. Raises ModelError when the model's files are unusable."""
    if is_fake(settings.model):
        layout = FakeModel().layout(settings.page_size)
    else:
        config = load_config(locate_model(settings.model), DiskCache.default())
        layout = KvLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=settings.page_size,
            dtype=settings.dtype,
        )
    if settings.mode == PD:
        pages = settings.prefill * settings.prefill_pages + settings.decode * settings.decode_pages
    else:
        pages = settings.workers * settings.decode_pages
    return pages * layout.page_bytes


def listen(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """A socket that listens. Raises StartError, naming `option`, when it cannot."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(f"host {host!r} cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise StartError(
            f"port {port} on {host} cannot be used ({error.strerror}): choose another with {option}"
        ) from error
    return listener


def free_loopback_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def choose_agent_port(settings: Settings) -> int:
    """Where the agent is to answer, so that a restarted one answers there too; -1 for nowhere.

    Raises StartError when the port that was asked for is taken.
    """
    if not settings.record or settings.agent_port == NO_AGENT_HTTP:
        return NO_AGENT_HTTP
    with listen("127.0.0.1", settings.agent_port, option="--agent-port") as probe:
        return int(probe.getsockname()[1])


def is_ready(host: str, port: int) -> bool:
    """Whether GET /ready answers 200. False while the gateway is not up."""
    connection = http.client.HTTPConnection(host, port, timeout=2.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def reachable_host(host: str) -> str:
    """The address under which this machine reaches a socket bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104


@dataclass(slots=True)
class Launcher:
    """One server. `start`, `wait_until_ready`, `watch`, `stop`; `stop` is safe at any point.

    process_module   what the children run: takes the arguments of `server.process`
    """

    settings: Settings
    run_dir: RunDir
    listener: socket.socket
    model_name: str
    children: list[Child] = field(default_factory=list[Child])
    started_at: float = field(default_factory=time.time)
    process_module: str = PROCESS_MODULE
    _signals: int = 0
    _was_ready: bool = False
    _agent_pause_s: float = _AGENT_RESTART_S[0]
    _agent_due_s: float | None = None
    _plan: list[ProcessConfig] = field(default_factory=list[ProcessConfig])

    @classmethod
    def prepare(cls, settings: Settings, *, fresh: bool = False) -> Launcher:
        """Check everything that can be checked before a process starts.

        Raises StartError or ModelError: no such model, port taken, run directory in use, no room.
        """
        info = load_model_info(settings.model)
        needed = pool_bytes(settings)
        agent_port = choose_agent_port(settings)
        listener = listen(settings.host, settings.port)
        try:
            run_dir = RunDir.acquire(settings.run_path, fresh=fresh)
            try:
                run_dir.place_pools(needed)
            except BaseException:
                run_dir.release()
                raise
        except BaseException:
            listener.close()
            raise
        model = settings.model
        settings = msgspec.structs.replace(
            settings,
            port=listener.getsockname()[1],
            run_dir=str(run_dir.path),
            model=model if model is None or is_fake(model) else str(Path(model).absolute()),
            served_name=settings.served_name or info.name,
            agent_port=agent_port,
        )
        return cls(settings, run_dir, listener, settings.served_name or info.name)

    @property
    def url(self) -> str:
        host = reachable_host(self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}"

    @property
    def agent_url(self) -> str | None:
        """Where the agent answers; None where it does not."""
        port = self.settings.agent_port
        return None if port == NO_AGENT_HTTP else f"http://127.0.0.1:{port}"

    @property
    def stop_requested(self) -> bool:
        return self._signals > 0

    def catch_signals(self) -> None:
        """SIGINT, SIGTERM and SIGHUP ask for a stop; a second one hurries it, see `stop`."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def start(self) -> None:
        """Spawn all processes. The gateway owns the public socket from here on."""
        assert self.run_dir.pools is not None
        self._plan = plan_processes(
            self.settings,
            endpoint=self.run_dir.endpoint,
            pools=self.run_dir.pools,
            http_fd=self.listener.fileno(),
            free_port=free_loopback_port,
        )
        if self.settings.record:
            self._plan.insert(0, agent_config(self.settings, endpoint=self.run_dir.endpoint))
        for config in self._plan:
            try:
                _write_private(self.run_dir.config(config.instance), msgspec.json.encode(config))
                self.children.append(self._spawn(config))
            except OSError as error:
                raise StartError(
                    f"cannot start {config.instance} in {self.run_dir.path}: {error.strerror}. "
                    "Make room there, or choose another --run-dir"
                ) from error
        # While a copy stays open here, connections would be accepted after the gateway's death.
        self.listener.close()
        self._write_state()

    def wait_until_ready(self, *, timeout_s: float, progress: Callable[[float], None]) -> bool:
        """Wait until a generation is possible; False when a stop was asked for meanwhile.

        Raises StartError with the reason when a process ends or time is up.
        """
        begin = time.monotonic()
        host = reachable_host(self.settings.host)
        while not self.stop_requested:
            exited = children.first_exited(self.children)
            if exited is not None:
                raise StartError(explain_start_failure(exited))
            if is_ready(host, self.settings.port):
                self._was_ready = True
                self._write_state(ready=True)
                return True
            waited = time.monotonic() - begin
            if waited > timeout_s:
                raise StartError(
                    f"not ready after {waited:.0f} s: see {self.run_dir.path / 'logs'}, "
                    "or wait longer with --start-timeout"
                )
            progress(waited)
            time.sleep(_POLL_S)
        return False

    def watch(self) -> None:
        """Return when a stop is asked for. Raises ServerCrashedError when a process ends before.

        An agent that ends is started again: it goes on where the last one stopped, and serving
        does not depend on it.
        """
        while not self.stop_requested:
            serving = [child for child in self.children if child.role != AGENT]
            exited = children.first_exited(serving)
            if exited is not None:
                raise ServerCrashedError(explain_crash(exited))
            agent = next((child for child in self.children if child.role == AGENT), None)
            if agent is not None and agent.exit_code is not None:
                self._restart_agent(agent)
            time.sleep(_POLL_S)

    def stop(self) -> list[Child]:
        """Stop every process in order, each within a bound. Returns those that had to be killed.

        Another signal meanwhile kills those that serve; the agent, which has their marks to
        export, is killed by the signal after it.
        """
        killed: list[Child] = []
        already = self._signals
        for roles in _STOP_ORDER:
            more = 1 if AGENT in roles else 0
            group = [child for child in self.children if child.role in roles]
            if "gateway" in roles:
                timeout_s = self.settings.deadlines.drain_s + _STOP_S
            else:
                timeout_s = _AGENT_STOP_S if AGENT in roles else _STOP_S
            killed += children.stop(
                group,
                timeout_s=timeout_s,
                hurry=lambda enough=already + more: self._signals > enough,
            )
        agent = next((child for child in self.children if child.role == AGENT), None)
        if agent is not None and agent not in killed and agent.exit_code and self._was_ready:
            self._export_the_rest(agent, hurry=lambda: self._signals > already + 1)
        return killed

    def _export_the_rest(self, agent: Child, *, hurry: Callable[[], bool]) -> None:
        """The agent died and was not back, or not yet able to stop in order: let another one read
        what is left in the rings."""
        config = msgspec.structs.replace(
            next(config for config in self._plan if config.instance == agent.instance),
            until_closed=True,
        )
        try:
            _write_private(self.run_dir.config(config.instance), msgspec.json.encode(config))
            last = self._spawn(config)
        except OSError as error:
            trouble = f"no agent can be started: {error.strerror}"
        else:
            if children.wait(last, timeout_s=_AGENT_STOP_S, hurry=hurry) == 0:
                return
            children.kill([last])
            trouble = last.describe_exit()
        _warn(
            f"{trouble}; what was not exported is in the rings: "
            f"pdtrace agent --rings {self.settings.rings_path} --out {self.run_dir.path} "
            "--until-closed"
        )

    def close(self) -> None:
        """Kill whatever still runs and release the run directory. Idempotent."""
        children.kill(self.children)
        self.listener.close()
        if self.children:
            self._write_state(stopped_at=time.time())
        self.run_dir.release()

    def state(self, *, ready: bool = False, stopped_at: float | None = None) -> ServerState:
        """What `server.json` says; the API key is left out."""
        settings = msgspec.to_builtins(self.settings)
        settings["api_key"] = None if self.settings.api_key is None else "(set)"
        return ServerState(
            url=self.url,
            agent_url=self.agent_url,
            model=self.model_name,
            mode=self.settings.mode,
            pid=os.getpid(),
            run_dir=str(self.run_dir.path),
            processes=[
                {
                    "instance": child.instance,
                    "role": child.role,
                    "pid": child.pid,
                    "endpoint": config.endpoint,
                    "log": str(child.log),
                }
                for child, config in zip(self.children, self._plan, strict=False)
            ],
            settings=settings,
            started_at=self.started_at,
            ready=ready,
            stopped_at=stopped_at,
        )

    def _spawn(self, config: ProcessConfig) -> Child:
        return children.spawn(
            instance=config.instance,
            role=config.role,
            config=self.run_dir.config(config.instance),
            log=self.run_dir.log(config.instance),
            environment=thread_limits(self.settings.threads),
            pass_fds=[] if config.http_fd is None else [config.http_fd],
            module=self.process_module,
        )

    def _restart_agent(self, ended: Child) -> None:
        now_s = time.monotonic()
        if self._agent_due_s is None:
            _warn(
                f"{ended.describe_exit()}; recording goes on, the agent is started again "
                f"in {self._agent_pause_s:.0f} s (log: {ended.log})"
            )
            self._agent_due_s = now_s + self._agent_pause_s
            self._agent_pause_s = min(self._agent_pause_s * 2, _AGENT_RESTART_S[1])
        elif now_s >= self._agent_due_s:
            self._agent_due_s = None
            index = self.children.index(ended)
            try:
                self.children[index] = self._spawn(self._plan[index])
            except OSError as error:
                _warn(f"the agent cannot be started: {error.strerror}")
                return
            self._write_state(ready=True)

    def _write_state(self, *, ready: bool = False, stopped_at: float | None = None) -> None:
        """A disk that is full costs who reads the file, not those who are served."""
        state = msgspec.to_builtins(self.state(ready=ready, stopped_at=stopped_at))
        temporary = self.run_dir.path / ".server.json"
        try:
            _write_private(temporary, json.dumps(state, indent=2).encode() + b"\n")
            temporary.replace(self.run_dir.state_file)
        except OSError as error:
            _warn(f"cannot write {self.run_dir.state_file}, which is out of date: {error.strerror}")

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1


def run_server(
    settings: Settings,
    *,
    fresh: bool,
    start_timeout_s: float,
    progress: Callable[[float], None],
    on_ready: Callable[[Launcher], None],
    latest: bool = False,
) -> int:
    """Run a server until it is stopped; the exit code of `python -m server up`.

    0 after a stop that was asked for, 1 when a process of the running server ended unasked, 2 when
    it cannot start. The reason goes to stderr.
    """
    try:
        launcher = Launcher.prepare(settings, fresh=fresh)
    except (ServerError, ValueError) as error:  # ModelError is a ValueError
        print(f"error: {error}", file=sys.stderr)
        return EXIT_START_ERROR
    exit_code = 0
    try:
        launcher.catch_signals()
        launcher.start()
        if launcher.wait_until_ready(timeout_s=start_timeout_s, progress=progress):
            if latest:  # not earlier: a failed start has nothing to show
                point_latest(launcher.run_dir.path)
            on_ready(launcher)
            launcher.watch()
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = EXIT_START_ERROR
    except ServerCrashedError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = 1
    finally:
        killed = launcher.stop()
        launcher.close()
    for child in killed:
        _warn(f"{child.instance} did not stop in time and was killed")
    return exit_code


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that keeps every numeric library of a process to `threads` threads."""
    count = str(threads)
    names = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "RAYON")
    return {
        **{f"{name}_NUM_THREADS": count for name in names},
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def explain_start_failure(child: Child) -> str:
    """One line where the child left one, else how it ended and the end of its log."""
    tail = child.log_tail()
    if child.exit_code == EXIT_START_ERROR and tail and tail[-1].startswith("error: "):
        return f"{child.instance}: {tail[-1].removeprefix('error: ')}"
    return explain_crash(child)


def explain_crash(child: Child) -> str:
    """How `child` ended, and the last lines of its log."""
    lines: Sequence[str] = child.log_tail()
    quoted = "".join(f"\n  {line}" for line in lines)
    return f"{child.describe_exit()}; the end of {child.log}:{quoted or ' (empty)'}"


def _warn(text: str) -> None:
    """On stderr, which may be a file on a disk that is full."""
    with contextlib.suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _write_private(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
