"""Every command that the README shows is run, as written but for the port, and the example too.

The README's port may be taken here, so each command gets a free one in its place.
`make` targets are run by `.ci/run` itself. `python -m server up` runs in the background while the
commands below it in the same block run; it has to be stopped, so it has to be the block's first.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.listening import free_loopback_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
START_S = 150.0

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """Commands of a block: continued lines joined, comments and blank lines left out."""
    lines = [line.split("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def is_make(command: str) -> bool:
    return command.startswith("make ")


def is_server(command: str) -> bool:
    return "-m server up" in command


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the checkout, without recordings in it."""
    folder = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        if entry.name not in {"run", ".git"}:
            (folder / entry.name).symlink_to(entry)
    return folder


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PDTRACE_"))}
    return {**kept, "COLUMNS": "120", "NO_PROXY": "127.0.0.1,localhost"}


def run(command: str, folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{command} printed nothing"


class Background:
    """A command that runs until it is told to stop; `wait_for` reads its output meanwhile."""

    def __init__(self, command: str, folder: Path, output: Path) -> None:
        self._output = output
        with output.open("w") as file:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START_S
        while text not in self._output.read_text():
            assert self._process.poll() is None, self._output.read_text()
            assert time.monotonic() < deadline, self._output.read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            assert self._process.wait(timeout=60) == 0, self._output.read_text()
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def recorded(checkout: Path) -> Iterator[Path]:
    """The checkout after the README's server block has run, so that `run/latest` is a recording."""
    (block,) = (b for b in blocks("sh") if any(is_server(c) for c in commands(b)))
    (shown,) = re.findall(r"--port (\d+)", block)
    first, *rest = commands(block.replace(shown, str(free_loopback_port())))
    assert is_server(first)
    server = Background(first, checkout, checkout / "server-output")
    try:
        server.wait_for("is ready at")
        for command in rest:
            run(command, checkout)
    finally:
        server.stop()
    yield checkout


def test_server_block_runs_and_leaves_a_recording(recorded: Path) -> None:
    assert list((recorded / "run" / "latest" / "traces").glob("*.jsonl"))


OTHERS = [
    command
    for block in blocks("sh")
    if not any(is_server(c) for c in commands(block))
    for command in commands(block)
    if not is_make(command)
]


@pytest.mark.parametrize("command", OTHERS)
def test_command_runs(recorded: Path, command: str) -> None:
    run(command, recorded)


def test_make_targets_are_run_by_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    shown = {c for block in blocks("sh") for c in commands(block) if is_make(c)}
    assert {"make demo", "make test"} <= shown
    for command in shown:
        assert f"step {command}" in script, f"{command} is in the README, not in .ci/run"


def test_example_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_file_tree_names_what_exists() -> None:
    (tree,) = blocks("text")
    named = re.findall(r"^([\w./-]+)(?: |$)", tree, re.MULTILINE)
    assert len(named) > 8
    for name in named:
        assert (ROOT / name).exists(), name
    tops = {entry.name for entry in ROOT.iterdir() if entry.is_dir()}
    shown = {name.split("/")[0] for name in named}
    hidden = {name for name in tops if name.startswith(".")} | {"run", "dist", "build"}
    assert tops - hidden - shown - {"node_modules"} == set()
