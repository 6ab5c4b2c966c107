"""What becomes of a process that cannot record: the first of its name ends, one after it serves."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from pdtrace.clock import SYSTEM_CLOCK
from pdtrace.stages import Role
from server.config import ProcessConfig, Settings
from server.errors import StartError
from server.plan import successor
from server.readiness import ReadyPipe, announce_ready
from server.recording import open_recorder


def first(run: Path) -> ProcessConfig:
    return ProcessConfig(
        settings=Settings(run_dir=str(run)),
        role="decode",
        instance="decode-0",
        incarnation="abc",
        endpoint="ipc:///tmp/decode-0.sock",
        gateway_endpoint="ipc:///tmp/gateway-0.sock",
    )


def test_the_first_process_says_that_it_cannot_record(tmp_path: Path) -> None:
    (tmp_path / "rings").write_text("no folder")
    with pytest.raises(StartError, match=r"decode-0 cannot record in .*rings"):
        open_recorder(first(tmp_path), Role.DECODE, SYSTEM_CLOCK)


def test_one_that_follows_serves_unrecorded_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rings").write_text("no folder")
    pipe = ReadyPipe()
    config = msgspec.structs.replace(successor(first(tmp_path)), ready_fd=os.dup(pipe.write_fd))
    with caplog.at_level(logging.WARNING):
        recorder = open_recorder(config, Role.DECODE, SYSTEM_CLOCK)
    assert not pipe.is_ready()
    announce_ready(config)
    assert pipe.is_ready()
    assert pipe.unrecorded
    pipe.close()
    assert not recorder.enabled
    assert "decode-0 serves without being recorded: cannot create a ring" in caplog.text


def test_one_that_follows_records_where_there_is_room(tmp_path: Path) -> None:
    with open_recorder(successor(first(tmp_path)), Role.DECODE, SYSTEM_CLOCK) as recorder:
        assert recorder.enabled
        assert recorder.path is not None
        assert recorder.path.parent == tmp_path / "rings"
