"""Ids and words of callers that mean it ill, through rings and agent to everything that shows them:
spans on disk and on the wire, metrics, logs, the terminal, file names."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from typer.testing import CliRunner

from pdtrace import semconv as a
from pdtrace.agent.command import Agent, AgentConfig, run_agent
from pdtrace.agent.metrics import AgentMetrics, AgentNumbers, Exposition
from pdtrace.cli import app
from pdtrace.export.delivery import TRACES_NAME
from pdtrace.export.sink import lines_since
from pdtrace.otlp.json_lines import decode_line
from pdtrace.propagation import RemoteParent
from pdtrace.spans import Span
from pdtrace.stages import ROOT_SPAN, Outcome, WaitReason
from pdtrace.testing import open_recorders, record_request
from tests.support.otlp_receivers import http_receiver

MARK = "FORGED"
HOSTILE = {
    "newlines": f"a\n{MARK}\r\nb",
    "control": f"\x1b[31m{MARK}\x07\x00\x9b2J",
    "long": MARK * 1700,
    "unicode": f"{MARK}\u202e\u2028é🌍\u200b",
    "surrogate": f"{MARK}\ud800\udfff",
    "label": f'{MARK}",x="1"}} 1\n# EOF',
    "braces": f"{{{MARK}}} [bold]%s%n",
    "path": f"../../../{MARK}/x",
    "empty": "",
}
MAX_CHARS = 300
"""A ring keeps 256 bytes of a text."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Rings of requests under each of these ids, whose ends, waits and callers have them, too."""
    recorders = open_recorders(tmp_path / "rings")
    for number, hostile in enumerate(HOSTILE.values()):
        parent = RemoteParent(
            trace_id=f"{number + 1:032x}",
            span_id=f"{number + 1:016x}",
            sampled=True,
            tracestate=hostile,
        )
        record_request(
            recorders,
            request_id=hostile,
            parent=parent,
            waits={"decode.reserve": {"reason": WaitReason.KV_PAGES, "blocker": hostile}},
        )
        record_request(
            recorders,
            request_id=hostile,
            outcome=Outcome.FAILED,
            stop_in="transfer",
            reason=hostile or "none",
            by=hostile or "nobody",
        )
        record_request(recorders, request_id=hostile, outcome=None, stop_in="decode.generate")
    for recorder in recorders.values():
        recorder.close()
    return tmp_path


@pytest.fixture(autouse=True)
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def texts(span: Span) -> Iterator[str]:
    """All words in a span."""
    yield span.name
    yield span.status_message
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        for key, value in attributes.items():
            yield key
            values = value if isinstance(value, Sequence) else (value,)
            yield from (text for text in values if isinstance(text, str))


def test_spans_hold_hostile_words_as_values_alone_and_lines_are_one_each(run: Path) -> None:
    with http_receiver() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        run_agent(run / "rings", out=run, until_closed=True)
        exported = collector.spans()
    lines = list(lines_since(run / TRACES_NAME))
    for line in lines:
        assert min(line.rstrip(b"\n")) >= ord(" "), "what is no character stands escaped"
        json.loads(line)
    spans = [span for line in lines for span in decode_line(line)]
    assert len(spans) == len(exported)
    assert sum(span.attributes.get(a.SPAN.key) == ROOT_SPAN for span in spans) == 3 * len(HOSTILE)
    for span in spans:
        assert MARK not in span.name
        assert not [key for key in span.attributes if MARK in key]
        for text in texts(span):
            text.encode()  # no half of a character
            assert len(text) <= MAX_CHARS, span.name
    for span in exported:  # protobuf has checked that all is UTF-8
        assert MARK not in span.name
        assert not [item.key for item in span.attributes if MARK in item.key]
    assert not [path for path in run.rglob("*") if MARK in str(path.relative_to(run))]


def test_metrics_stay_metrics_and_have_no_label_of_a_caller(run: Path) -> None:
    metrics = AgentMetrics()
    agent = Agent(run / "rings", out=run, metrics=metrics, config=AgentConfig(grace_s=0.1))
    deadline = time.monotonic() + 30
    while not agent.is_drained:
        agent.poll()
        assert time.monotonic() < deadline
    exposition = Exposition(metrics, agent.look, AgentNumbers)
    body, _ = exposition.render("application/openmetrics-text; version=1.0.0")
    samples = [
        sample
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    ]
    agent.close()
    assert len(samples) > 100
    words = {"request_id", "id", "trace_id"}
    for sample in samples:
        assert not words & sample.labels.keys()
        assert MARK not in sample.name
    of_callers = {
        label for sample in samples for label, value in sample.labels.items() if MARK in value
    }
    assert of_callers <= {"reason"}, "which is a code of the process that recorded it"


@pytest.mark.parametrize(
    "arguments",
    [("why", "--slowest", "40"), ("why", "--in-flight"), ("check",), ("top", "--once")],
    ids=" ".join,
)
def test_terminal_gets_no_command_and_no_line_of_a_caller(
    run: Path, arguments: tuple[str, ...]
) -> None:
    run_agent(run / "rings", out=run, until_closed=True)
    result = CliRunner().invoke(app, [*arguments, "--from", str(run)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    for line in (result.stdout + result.stderr).split("\n"):
        assert line.isprintable(), (arguments, line)
        assert not line.startswith(MARK + "\r")


def test_log_lines_are_one_each(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    run_agent(run / "rings", out=run, until_closed=True)
    for record in caplog.records:
        assert record.getMessage().isprintable(), record.getMessage()
