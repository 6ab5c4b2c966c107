"""What can be looked at while the demo plays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any

import pytest

from server.demo import run

PAUSE = "import time; time.sleep(600)"


def test_latest_names_the_demo_while_it_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "before").mkdir(parents=True)
    (tmp_path / "run" / "latest").symlink_to("before")
    servers: list[subprocess.Popen[str]] = []
    seen: list[str] = []

    def start(
        run_dir: Path, _errors: IO[str], _options: object
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        run_dir.mkdir()
        assert (tmp_path / "run" / "latest").resolve().name == "before", "nothing is there yet"
        servers.append(subprocess.Popen([sys.executable, "-c", PAUSE], text=True))
        return servers[0], {"url": "http://127.0.0.1:1", "model": "m", "processes": []}

    def play(*_: object, **__: object) -> Coroutine[Any, Any, object]:
        seen.append((tmp_path / "run" / "latest").resolve().name)
        raise run.DemoError("seen enough")

    monkeypatch.setattr(run, "_start", start)
    monkeypatch.setattr(run, "play", play)
    assert run.run_demo() == 1
    assert "seen enough" in capsys.readouterr().err
    assert len(seen) == 1
    assert seen[0].startswith("demo-")
    assert servers[0].wait(timeout=30) != 0
