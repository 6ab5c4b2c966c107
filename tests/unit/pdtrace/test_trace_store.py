"""Traces come out of a file as they would have stayed in memory, whatever way their spans came."""

from __future__ import annotations

import errno
import gc
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrace.analysis.sources import read_sources
from pdtrace.analysis.trace_store import Joined, StoredTraces, StoreError, TraceStore
from pdtrace.otlp.json_lines import encode_line
from pdtrace.spans import Span, Trace
from tests.support.copies import replace
from tests.support.pd_traces import Story, noisy

STORIES = [noisy(f"r-{n}", random.Random(n)).trace() for n in range(12)]
SPANS = [span for trace in STORIES for span in trace.spans]


def joined(batches: Sequence[Sequence[Span]], max_held: int) -> Joined:
    store = TraceStore(max_held)
    for batch in batches:
        store.add(batch)
    assert len(store) == sum(map(len, batches))
    return store.joined()


def contents(found: Joined) -> tuple[tuple[Trace, ...], int, int, int]:
    return tuple(found.traces), found.spans, found.duplicates, found.conflicts


def stored(max_held: int = 10) -> StoredTraces:
    traces = joined([SPANS], max_held).traces
    assert isinstance(traces, StoredTraces)
    return traces


def changed(span: Span, longer: int, later: int) -> Span:
    return replace(span, start_ns=span.start_ns + later, end_ns=span.end_ns + later + longer)


@given(
    spans=st.lists(
        st.builds(
            changed,
            st.sampled_from(SPANS[:40] + SPANS[-8:]),
            st.sampled_from([0, 0, 1000]),
            st.sampled_from([0, 0, 60 * 10**9]),
        ),
        min_size=1,
        max_size=60,
    ),
    size=st.integers(1, 20),
    max_held=st.integers(0, 30),
)
def test_file_changes_nothing(spans: Sequence[Span], size: int, max_held: int) -> None:
    """Spans of one trace far apart, spans that come again, spans that contradict each other."""
    batches = [spans[at : at + size] for at in range(0, len(spans), size)]
    assert contents(joined(batches, max_held)) == contents(joined(batches, 10**9))


def test_few_spans_stay_in_memory_and_more_do_not() -> None:
    assert isinstance(joined([SPANS], len(SPANS)).traces, tuple)
    assert isinstance(joined([SPANS], len(SPANS) - 1).traces, StoredTraces)


def test_traces_in_a_file_can_be_picked() -> None:
    whole, traces = joined([SPANS], 10**9).traces, stored()
    assert len(traces) == len(whole) == len(STORIES)
    assert traces[3] == whole[3]
    assert traces[-1] == whole[-1]
    assert traces[2:9:3] == whole[2:9:3]
    assert list(traces) == list(whole)
    with pytest.raises(IndexError):
        traces[len(STORIES)]


def test_many_traces_take_little_memory_and_little_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files: list[IO[bytes]] = []

    def open_there(buffering: int) -> IO[bytes]:
        files.append((tmp_path / "spilled").open("w+b", buffering=buffering))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", open_there)
    traces = stored()
    written = (tmp_path / "spilled").stat().st_size
    assert written * 8 < len(encode_line(SPANS)), "packed"
    assert not files[0].closed
    del traces
    gc.collect()
    assert files[0].closed


@pytest.mark.parametrize("where", ["open", "write"])
def test_no_room_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def full(**_: object) -> IO[bytes]:
        if where == "open":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return Path("/dev/full").open("r+b", buffering=0)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(StoreError, match=r"No space left on device; .* set TMPDIR"):
        stored()


def test_damaged_file_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "spilled"

    def open_there(buffering: int) -> IO[bytes]:
        return path.open("w+b", buffering=buffering)

    monkeypatch.setattr(tempfile, "TemporaryFile", open_there)
    traces = stored()
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be read back"):
        list(traces)


def test_sources_are_read_into_a_file_as_into_memory(tmp_path: Path) -> None:
    shuffled = random.Random(1).sample(SPANS, len(SPANS))
    for number in range(3):
        lines = [encode_line(shuffled[at : at + 7]) for at in range(7 * number, len(SPANS), 21)]
        (tmp_path / f"agent-{number}.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "again.jsonl").write_bytes(encode_line(Story().trace().spans) * 2)
    whole = read_sources([tmp_path])
    filed = read_sources([tmp_path], max_held=50)
    assert isinstance(filed.traces, StoredTraces)
    assert tuple(filed.traces) == whole.traces
    assert (filed.spans, filed.lines, filed.problems) == (
        whole.spans,
        whole.lines,
        whole.problems,
    )
    assert whole.problems.duplicates == len(Story().trace().spans)
