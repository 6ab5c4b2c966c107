"""A server put together by the test, process by process: it may begin with any of them, kill one
and go on without it, or start another in its place. Nobody else restarts anything."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import Timeline, build_timelines
from server.config import ProcessConfig, Settings
from server.listening import free_loopback_port
from server.plan import agent_config, plan_processes, successor
from server.wire.endpoints import EndpointDirectory
from tests.support.present import Process

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
EXPORT_S = 60.0


class OwnServer:
    """Processes of one server by instance name. The public socket is the test's, as it would be a
    launcher's: connections wait in its backlog while there is no gateway."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        self.settings = settings
        self.run_dir = run_dir
        self._endpoints = EndpointDirectory(run_dir)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._plan = {
            config.instance: config
            for config in plan_processes(
                settings,
                endpoint=self._endpoints.endpoint,
                pools=run_dir,
                http_fd=self._listener.fileno(),
                free_port=free_loopback_port,
            )
        }
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        settings.rings_path.mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def model(self) -> str:
        return "fake"

    @property
    def workers(self) -> list[str]:
        """Every instance but the gateway."""
        return [instance for instance in self._plan if instance != "gateway-0"]

    def present(self) -> Sequence[Process]:
        """Those that run."""
        return [
            Process(
                instance=instance,
                role=self._plan[instance].role,
                pid=child.pid,
                state="ready" if child.poll() is None else "ended",
            )
            for instance, child in self._children.items()
            if instance in self._plan
        ]

    def agent_url(self) -> None:
        """None: no agent runs beside it."""

    def client(self, *, timeout_s: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def start(self, *instances: str, gate: Path | None = None, **changes: object) -> None:
        """Start these processes; ones that ran before become new incarnations.

        gate      a file without which they do not load their engines
        changes   settings that these have of their own
        """
        for instance in instances:
            config = self._plan[instance]
            if changes:
                settings = msgspec.structs.replace(config.settings, **changes)
                config = msgspec.structs.replace(config, settings=settings)
            if instance in self._children:
                config = successor(config)
            self._children[instance] = self._spawn(config, gate)

    def _spawn(self, config: ProcessConfig, gate: Path | None = None) -> subprocess.Popen[bytes]:
        path = self.run_dir / f"{config.instance}.json"
        path.write_bytes(msgspec.json.encode(config))
        program = ["server.process", str(path)]
        if gate is not None:
            program = ["tests.support.slow_load", str(path), str(gate)]
        with (self.run_dir / f"{config.instance}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *program],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stderr=log,
                pass_fds=() if config.http_fd is None else (config.http_fd,),
            )

    def kill(self, instance: str) -> None:
        """SIGKILL; returns once it is gone."""
        self._children[instance].kill()
        self._children[instance].wait()

    def signal(self, instance: str, number: signal.Signals) -> None:
        self._children[instance].send_signal(number)

    def sockets(self, instance: str) -> int:
        """Sockets that a process has open."""
        count = 0
        for entry in Path(f"/proc/{self._children[instance].pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it may be closed by now
                count += str(entry.readlink()).startswith("socket:")
        return count

    def log(self, instance: str) -> str:
        return (self.run_dir / f"{instance}.log").read_text()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Raises AssertionError with the logs' ends when it does not come true."""
        end_s = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end_s:
                logs = "\n".join(f"{name}: {self.log(name)[-1500:]}" for name in self._children)
                raise AssertionError(f"waited {WAIT_S} s in vain for {what}\n{logs}")
            time.sleep(0.02)

    def status(self, path: str) -> int:
        """Status of a GET; 0 where nobody answers."""
        try:
            with self.client(timeout_s=5.0) as client:
                return client.get(path).status_code
        except httpx.TransportError:
            return 0

    def health(self) -> dict[str, Any]:
        with self.client() as client:
            return client.get("/health").json()

    def wait_ready(self) -> None:
        """Wait until every process is ready."""
        self.wait_until(lambda: self.status("/health") == 200, "health")

    def metric(self, line: str) -> bool:
        """Whether the gateway's metrics have this line."""
        with self.client() as client:
            return line in client.get("/metrics").text.splitlines()

    def values(self, prefix: str) -> list[float]:
        """Values of the gateway's series that begin with `prefix`."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(prefix)]

    def idle(self) -> bool:
        """Whether the gateway has given back every place."""
        return self.metric("pd_requests_in_flight 0.0")

    def stop(self) -> None:
        """SIGTERM to all, in the launcher's order; SIGKILL to who does not obey."""
        for instance in ("gateway-0", *self.workers):
            child = self._children.get(instance)
            if child is not None and child.poll() is None:
                child.terminate()
                child.send_signal(signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=30)

    def timelines(self) -> list[Timeline]:
        """Stop everything and read what it recorded."""
        self.stop()
        agent = agent_config(self.settings, endpoint=self._endpoints.endpoint)
        child = self._spawn(msgspec.structs.replace(agent, until_closed=True))
        self._children["agent"] = child
        assert child.wait(timeout=EXPORT_S) == 0, self.log("agent")
        return build_timelines(read_source(self.run_dir).traces)

    def close(self) -> None:
        """Kill what still runs."""
        for child in self._children.values():
            if child.poll() is None:
                child.kill()
            child.wait()
        self._listener.close()
        self._endpoints.close()


@contextlib.contextmanager
def own_server(run_dir: Path, *, start: bool = True, **changes: object) -> Generator[OwnServer]:
    """Two pairs without a model, ready; killed on leaving what still runs."""
    run_dir.mkdir(parents=True)
    values: dict[str, object] = {
        "run_dir": str(run_dir),
        "model": "fake:step_ms=2,token_us=20",
        "prefill": 2,
        "decode": 2,
        "policy": "round_robin",
        "allow_faults": True,
        **changes,
    }
    server = OwnServer(run_dir, msgspec.convert(values, Settings))
    try:
        if start:
            server.start("gateway-0", *server.workers)
            server.wait_ready()
        yield server
    finally:
        server.close()
