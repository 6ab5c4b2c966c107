"""Starts the real server, `python -m server up`, and looks at what it left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.present import Process, processes_of

ROOT = Path(__file__).resolve().parents[2]
START_S = 150.0
STOP_S = 60.0


@dataclass(slots=True)
class RunningServer:
    """A server that was ready once. `state` is the line that `up --json` printed; who runs at a
    given moment is `process_of`, for processes are replaced when they end."""

    process: subprocess.Popen[str]
    run_dir: Path
    state: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.state["url"])

    @property
    def model(self) -> str:
        return str(self.state["model"])

    def process_of(self, instance: str) -> dict[str, Any]:
        """What `server.json` says of an instance's present process. Raises KeyError when there is
        no such instance."""
        return {p["instance"]: p for p in self._processes()}[instance]

    def pid(self, instance: str) -> int:
        """Pid of the present process of an instance. Raises KeyError when there is none."""
        return int(self.process_of(instance)["pid"])

    @property
    def pids(self) -> list[int]:
        """Of the present processes, without the launcher."""
        return [int(p["pid"]) for p in self._processes()]

    def present(self) -> Sequence[Process]:
        """The present process of each instance."""
        return processes_of(self.run_dir)

    def agent_url(self) -> str | None:
        return self.state["agent_url"]

    def send_signal(self, instance: str, number: int) -> int:
        """Send a signal to an instance's process; its pid."""
        pid = self.pid(instance)
        os.kill(pid, number)
        return pid

    def wait_for_successor(self, instance: str, pid: int, *, timeout_s: float = 60.0) -> int:
        """Pid of the process that took the place of `pid`, once it says that it serves."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.process_of(instance)
            if found["pid"] != pid and found["state"] == "ready":
                return int(found["pid"])
            assert time.monotonic() < deadline, f"no successor of {instance}: {found}"
            time.sleep(0.02)

    @property
    def stderr(self) -> str:
        """What the launcher told its operator."""
        return self.run_dir.with_name(self.run_dir.name + ".stderr").read_text()

    def _processes(self) -> list[dict[str, Any]]:
        state: dict[str, Any] = json.loads((self.run_dir / "server.json").read_text())
        return state["processes"]

    def client(self, *, timeout_s: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def log(self, instance: str) -> str:
        return (self.run_dir / "logs" / f"{instance}.log").read_text()

    def stop(self) -> int:
        """SIGTERM; the exit code. The recording is complete afterwards."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_S)


@contextlib.contextmanager
def running_server(
    run_dir: Path, *options: str, model: str | None = "fake"
) -> Generator[RunningServer]:
    """A server on a free port, ready, and its agent; stopped, or killed with all its children, on
    leaving.

    `model` None is the packaged default. Raises AssertionError with stderr when it does not start.
    """
    arguments = [sys.executable, "-m", "server", "up", "--json", "--port", "0"]
    arguments += ["--run-dir", str(run_dir), "--start-timeout", str(START_S), *options]
    if model is not None:
        arguments += ["--model", model]
    errors = run_dir.with_name(run_dir.name + ".stderr")
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait(timeout=STOP_S)
            raise AssertionError(f"server exited with {process.returncode}: {errors.read_text()}")
        server = RunningServer(process, run_dir, json.loads(line))
        _wait_for_agent(server)
        yield server
        server.stop()
    finally:
        if process.poll() is None:
            process.kill()  # the children die with it
            process.wait(timeout=STOP_S)
        if process.stdout is not None:
            process.stdout.close()


def _wait_for_agent(server: RunningServer) -> None:
    """Until it answers. A server waits for nobody who only records."""
    deadline = time.monotonic() + START_S
    while server.agent_url() is not None and not (server.run_dir / "agent.json").exists():
        assert time.monotonic() < deadline, f"no agent answers: {server.log('agent')}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether `pid` exists and is no zombie."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
