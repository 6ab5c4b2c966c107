"""What is usual is learnt from the newest traces, bounded, whatever else is in their folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pdtrace import semconv as a
from pdtrace.agent.command import Agent, RollingJudge
from pdtrace.analysis import recent
from pdtrace.analysis.recent import recent_requests
from pdtrace.analysis.sources import read_source
from pdtrace.assembly.request_spans import assemble
from pdtrace.otlp import json_lines
from pdtrace.spans import Span
from pdtrace.testing import open_recorders, record_request
from tests.support.copies import replace
from tests.support.marked_requests import pd_moments, request_of

SPANS = assemble(request_of(pd_moments()))


def line_of(request_id: str, *, root_last: bool = False) -> bytes:
    root, *others = SPANS
    root = replace(root, attributes={**root.attributes, a.REQUEST_ID.key: request_id})
    return json_lines.encode_line([*others, root] if root_last else [root, *others])


def ids(found: Sequence[Sequence[Span]]) -> list[object]:
    return [spans[0].attributes[a.REQUEST_ID.key] for spans in found]


def test_newest_requests_come_in_their_order_over_files(tmp_path: Path) -> None:
    (tmp_path / "spans-000001.jsonl").write_bytes(b"".join(map(line_of, ("r-1", "r-2"))))
    (tmp_path / "spans-000002.jsonl").write_bytes(line_of("r-3", root_last=True))
    (tmp_path / "spans-000003.jsonl").touch()  # just begun
    (tmp_path / ".writer.lock").touch()
    assert ids(list(recent_requests(tmp_path))) == ["r-1", "r-2", "r-3"]
    assert list(recent_requests(tmp_path / "none")) == []


def test_no_more_is_read_than_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line_of(f"r-{number}") for number in range(5)]
    (tmp_path / "spans-000001.jsonl").write_bytes(b"".join(lines[:3]))
    (tmp_path / "spans-000002.jsonl").write_bytes(b"".join(lines[3:]))
    monkeypatch.setattr(recent, "MAX_BASELINE_REQUESTS", 2)
    assert ids(list(recent_requests(tmp_path))) == ["r-3", "r-4"]
    monkeypatch.setattr(recent, "MAX_BASELINE_REQUESTS", 512)
    monkeypatch.setattr(recent, "MAX_BASELINE_BYTES", len(lines[0]) * 7 // 2)
    assert ids(list(recent_requests(tmp_path))) == ["r-2", "r-3", "r-4"], "half a line is none"


def test_what_is_no_request_is_passed_over(tmp_path: Path) -> None:
    stray = json_lines.encode_line(SPANS[1:2])
    broken = line_of("r-1")[:-40] + b"\n"
    (tmp_path / "spans-000001.jsonl").write_bytes(
        b"\n".join((b"", b"nonsense", b"{}", stray, broken, line_of("r-2"))) + b"\x00\xff"
    )
    assert ids(list(recent_requests(tmp_path))) == ["r-2"]


@pytest.mark.parametrize("restart", [False, True])
def test_verdicts_go_on_over_a_restart(tmp_path: Path, restart: bool) -> None:
    recorders = open_recorders(tmp_path / "rings")

    def record(request_id: str, stage_ms: Mapping[str, float]) -> None:
        record_request(recorders, request_id=request_id, stage_ms=stage_ms)

    def agent() -> Agent:
        return Agent(tmp_path / "rings", out=tmp_path, judge=RollingJudge())

    one = agent()
    for number in range(25):
        record(f"usual-{number}", {"decode.reserve": 4.0})
    one.poll()
    if restart:
        one.close()
        one = agent()
    record("slow", {"decode.reserve": 900.0})
    one.poll()
    one.close()
    for recorder in recorders.values():
        recorder.close()
    stalled = {
        str(span.attributes[a.REQUEST_ID.key]): span.attributes[a.STALL_STAGE.key]
        for trace in read_source(tmp_path).traces
        for span in trace.spans
        if a.STALL_STAGE.key in span.attributes
    }
    assert stalled == {"slow": "decode.reserve"}
