from __future__ import annotations

import os

import msgspec
import pytest

from server.config import ProcessConfig, Settings
from server.readiness import ReadyPipe, announce_ready


def config(ready_fd: int | None) -> ProcessConfig:
    return ProcessConfig(
        settings=Settings(),
        role="decode",
        instance="decode-0",
        incarnation="1",
        endpoint="ipc:///a",
        gateway_endpoint="ipc:///b",
        ready_fd=ready_fd,
    )


def test_process_is_ready_once_it_said_so() -> None:
    pipe = ReadyPipe()
    theirs = os.dup(pipe.write_fd)  # as a process has it after a fork
    pipe.close_writer()
    assert not pipe.is_ready()
    announce_ready(config(theirs))
    assert pipe.is_ready()
    assert pipe.is_ready(), "what was said stays said"
    pipe.close()
    pipe.close()
    assert pipe.is_ready()


def test_process_that_ended_without_a_word_was_never_ready() -> None:
    pipe = ReadyPipe()
    pipe.close_writer()
    assert not pipe.is_ready()
    pipe.close()
    assert not pipe.is_ready()


def test_process_whose_launcher_is_gone_goes_on() -> None:
    pipe = ReadyPipe()
    theirs = os.dup(pipe.write_fd)
    pipe.close()
    announce_ready(config(theirs))


def test_process_without_a_launcher_tells_nobody() -> None:
    announce_ready(config(None))


@pytest.mark.parametrize("ready_fd", [None, 9])
def test_pipe_survives_the_configurations_file(ready_fd: int | None) -> None:
    given = config(ready_fd)
    assert msgspec.json.decode(msgspec.json.encode(given), type=ProcessConfig) == given
