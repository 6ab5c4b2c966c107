"""Spans that no collector takes: `pdtrace check` and the agent's health tell of them."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdtrace.agent.command import Agent
from pdtrace.analysis.sources import read_source
from pdtrace.check import check_recording
from pdtrace.export.queue import TAKEN, Answer, QueueLimits, Sent
from pdtrace.export.settings import ExportPlan
from pdtrace.export.sink import LOCK_NAME, FileSink, SinkPosition
from pdtrace.export.spill import CURSORS_NAME, Spill
from pdtrace.live.health import RunHealth, read_health
from pdtrace.recorder import Recorder
from pdtrace.spans import Span
from pdtrace.stages import Role
from pdtrace.testing import open_recorders, record_request

DOWN = Answer(sent=Sent.RETRY, reason="connection refused", code="unreachable")
GONE = Answer(sent=Sent.REFUSED, reason="401 who are you", code="401")


class Collector:
    """A target that answers as it is told."""

    kind = "otlp"

    def __init__(self, answer: Answer, name: str = "otlp http://127.0.0.1:1/v1/traces") -> None:
        self.name = name
        self.answer = answer
        self.calls = 0
        self.goes_on = threading.Event()
        self.goes_on.set()

    def send(self, spans: Sequence[Span]) -> Answer:
        self.calls += 1
        self.goes_on.wait(60)
        return self.answer

    def shutdown(self) -> None:
        self.goes_on.set()


def eventually(condition: Callable[[], bool], within_s: float = 30) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def recorders(tmp_path: Path) -> Generator[Mapping[Role, Recorder]]:
    opened = open_recorders(tmp_path / "rings")
    record_request(opened, request_id="r-0")
    yield opened
    for recorder in opened.values():
        recorder.close()


def agent_of(run: Path, collector: Collector | None) -> Agent:
    plan = None
    if collector is not None:
        plan = ExportPlan(targets=[collector], limits=QueueLimits(delay_s=0.01))
    agent = Agent(run / "rings", out=run, export=plan)
    agent.poll()
    return agent


def exporters(agent: Agent) -> list[dict[str, Any]]:
    """What /health says of them, as JSON; the agent is well whatever they do."""
    healthy, facts = agent.health()
    assert (healthy, facts["status"]) == (True, "ok")
    return json.loads(json.dumps(facts))["exporters"]


def delivered(found: RunHealth, run: Path) -> tuple[int, str, tuple[str, ...]]:
    """How often the rule is broken, its first example, and the notes."""
    report = check_recording(read_source(run), [found])
    [rule] = [rule for rule in report.rules if rule.name == "delivered"]
    return rule.broken, (*rule.examples, "")[0], report.notes


@pytest.mark.usefixtures("recorders")
def test_dead_collector_is_a_note_while_the_agent_runs_and_a_broken_rule_after(
    tmp_path: Path,
) -> None:
    collector = Collector(DOWN)
    agent = agent_of(tmp_path, collector)
    eventually(lambda: not exporters(agent)[0]["takes_spans"])
    [state] = exporters(agent)
    num_spans = read_source(tmp_path).spans
    assert (state["name"], state["reason"]) == (collector.name, "connection refused")
    assert state["spans_waiting"] == num_spans
    assert abs(state["since_unix_ns"] - time.time_ns()) < 60e9
    eventually(lambda: bool(read_health(tmp_path).waiting))
    broken, _, notes = delivered(read_health(tmp_path), tmp_path)
    assert broken == 0
    [note] = notes
    assert note.startswith(f"{num_spans} spans wait to be exported with {collector.name} since ")
    assert note.endswith(" UTC (connection refused); the agent goes on trying.")

    agent.close()
    broken, example, notes = delivered(read_health(tmp_path), tmp_path)
    assert (broken, notes) == (num_spans, ())
    assert f"{tmp_path}: {num_spans} spans wait to be exported with {collector.name}" in example
    assert example.endswith(
        f"(connection refused); no agent is there: `pdtrace agent --rings {tmp_path}/rings "
        f"--out {tmp_path}` sends them"
    )

    collector = Collector(TAKEN)
    agent = agent_of(tmp_path, collector)
    eventually(lambda: exporters(agent)[0]["spans_waiting"] == 0)
    agent.close()
    assert read_health(tmp_path).waiting == []
    assert delivered(read_health(tmp_path), tmp_path) == (0, "", ())


@pytest.mark.usefixtures("recorders")
def test_begin_of_an_outage_survives_a_restart_and_ends_with_it(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, Collector(DOWN))
    eventually(lambda: not exporters(agent)[0]["takes_spans"])
    agent.close()
    [before] = read_health(tmp_path).waiting
    collector = Collector(DOWN)
    agent = agent_of(tmp_path, collector)
    eventually(lambda: not exporters(agent)[0]["takes_spans"])
    [after] = read_health(tmp_path).waiting
    assert before.failing is not None
    assert after == before
    collector.answer = TAKEN
    eventually(lambda: exporters(agent)[0]["takes_spans"])
    assert exporters(agent)[0]["since_unix_ns"] is None
    agent.close()
    assert read_health(tmp_path).waiting == []


@pytest.mark.usefixtures("recorders")
def test_collector_that_never_answers_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdtrace.export.queue.SILENT_S", 0.01)
    collector = Collector(TAKEN)
    collector.goes_on.clear()
    agent = agent_of(tmp_path, collector)
    eventually(lambda: not exporters(agent)[0]["takes_spans"])
    assert exporters(agent)[0]["reason"].startswith("it has not answered for ")
    # Nobody has said yet that it fails, and a moment is no delay.
    assert read_health(tmp_path).waiting == []
    monkeypatch.setattr("pdtrace.live.health._UNDER_WAY_NS", -(10**12))
    assert len(read_health(tmp_path).waiting) == 1
    agent.close()


@pytest.mark.usefixtures("recorders")
def test_collector_that_refuses_for_good_is_told_of(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, Collector(GONE))
    eventually(lambda: agent.dropped()["refused"] > 0)
    [state] = exporters(agent)
    assert (state["takes_spans"], state["reason"]) == (False, "401 who are you")
    agent.close()


@pytest.mark.usefixtures("recorders")
def test_run_without_an_exporter_waits_for_none(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, None)
    assert exporters(agent) == []
    agent.close()
    assert delivered(read_health(tmp_path), tmp_path) == (0, "", ())


def test_looking_for_a_writer_keeps_none_from_starting(tmp_path: Path) -> None:
    FileSink(tmp_path).close()
    with (tmp_path / LOCK_NAME).open("rb") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        timer = threading.Timer(0.03, fcntl.flock, (looker, fcntl.LOCK_UN))
        timer.start()
        FileSink(tmp_path).close()
        timer.join()


def test_keys_of_the_totals_are_names(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, Collector(TAKEN))
    _, facts = agent.health()
    agent.close()

    def keys(value: Any) -> list[str]:
        if not isinstance(value, dict):
            return []
        return [*value, *(key for inner in value.values() for key in keys(inner))]

    found = keys(json.loads(json.dumps(facts)))
    assert {"spans_waiting", "lines_lost", "files_deleted"} <= set(found)
    assert [key for key in found if not key.isidentifier()] == []


def test_cursor_behind_the_end_passes_over_nothing_that_is_written_later(tmp_path: Path) -> None:
    """Somebody removed the files: what comes then is new, also for the agent after the next."""
    end, later = SinkPosition(), SinkPosition(offset=500)
    first = Spill(tmp_path / "traces", tmp_path / CURSORS_NAME, later)
    first.move("otlp", later)
    assert Spill(tmp_path / "traces", tmp_path / CURSORS_NAME, end).open_cursor("otlp") == end
    further = SinkPosition(offset=900)
    assert Spill(tmp_path / "traces", tmp_path / CURSORS_NAME, further).open_cursor("otlp") == end
