"""A server with too few pages and slots: everybody is served in the end, and each wait says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.stages import Outcome
from server.engine.fake import expected_tokens
from tests.support.completions import Ask, ask_all
from tests.support.server import running_server

pytestmark = pytest.mark.server

PROMPT = 40
OUTPUT = 90


@pytest.fixture(scope="module", params=["pd", "colocated"])
def squeezed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Timeline]:
    """Twelve requests on 32 pages; each needs 9 in the end, and 4 to begin."""
    run_dir: Path = tmp_path_factory.mktemp("squeezed") / "run"
    options = ("--mode", request.param, "--decode-pages", "32", "--max-running", "6")
    asks = [
        Ask(
            prompt=[33 + (i * 13 + k * 5) % 90 for k in range(PROMPT)],
            max_tokens=OUTPUT,
            request_id=f"squeezed-{i}",
        )
        for i in range(12)
    ]
    with running_server(
        run_dir, *options, "--reserve-output-tokens", "16", model="fake:step_ms=2"
    ) as server:
        answers = ask_all(server, asks, at_once=12)
    for request_, answer in zip(asks, answers, strict=True):
        assert not isinstance(request_.prompt, str)
        text = "".join(map(chr, expected_tokens(request_.prompt, OUTPUT)))
        assert answer.text == text, request_.request_id
    return {t.request_id or "": t for t in build_timelines(read_source(run_dir).traces)}


def test_all_complete_and_partition_exactly(squeezed: dict[str, Timeline]) -> None:
    assert len(squeezed) == 12
    for name, timeline in squeezed.items():
        assert timeline.outcome is Outcome.COMPLETED, name
        assert timeline.violations == (), name
        assert timeline.unexplained_ns <= 0.01 * timeline.total_ns, name


def test_pages_ran_out_and_the_waits_say_so(squeezed: dict[str, Timeline]) -> None:
    waits = [wait for t in squeezed.values() for v in t.visits for wait in v.waits]
    for_pages = [wait for wait in waits if wait.reason == "kv_pages"]
    assert for_pages
    queued = [wait for wait in for_pages if wait.stage != "decode.preempted"]
    assert queued
    for wait in queued:
        assert wait.needed is not None
        assert wait.free is not None
        assert wait.limit == 32


def test_preempted_requests_show_their_pauses(squeezed: dict[str, Timeline]) -> None:
    pauses = [v for t in squeezed.values() for v in t.visits_of("decode.preempted")]
    assert pauses
    assert all(visit.duration_ns > 0 for visit in pauses)
