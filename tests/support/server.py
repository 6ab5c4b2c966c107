"""Starts the real server, `python -m server up`, and looks at what it left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_S = 150.0
STOP_S = 60.0


@dataclass(slots=True)
class RunningServer:
    """A server that was ready once. `state` is the line that `up --json` printed."""

    process: subprocess.Popen[str]
    run_dir: Path
    state: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.state["url"])

    @property
    def model(self) -> str:
        return str(self.state["model"])

    def pid(self, instance: str) -> int:
        """Pid of a child. Raises KeyError when there is no such instance."""
        return {p["instance"]: int(p["pid"]) for p in self.state["processes"]}[instance]

    @property
    def pids(self) -> list[int]:
        return [int(p["pid"]) for p in self.state["processes"]]

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
    """A server on a free port, ready; stopped, or killed with all its children, on leaving.

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
        yield server
        server.stop()
    finally:
        if process.poll() is None:
            process.kill()  # the children die with it
            process.wait(timeout=STOP_S)
        if process.stdout is not None:
            process.stdout.close()


def is_running(pid: int) -> bool:
    """Whether `pid` exists and is no zombie."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
