"""A server with too few pages and slots: everybody is served in the end, and each wait says why.

One request holds nearly all pages until every other one waits for them; then it lets go, and those
that come after it grow beyond what there is.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.stages import Outcome, WaitReason
from server.injection.fault import Freeze
from tests.support.aftermath import expected_text
from tests.support.completions import Ask, ask, ask_all
from tests.support.injection import clear, inject, wait_injected
from tests.support.recorded import requests_in_flight, wait_for
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.server

PAGES = 32
ASKED = 12
HELD = Freeze(stage="decode.generate", request="holder", ms=600_000)
HOLDER = Ask(prompt=[33 + k % 90 for k in range(464)], max_tokens=3, request_id="holder")
"""29 pages and one for its output; a request of the others needs 4 to begin, and 9 in the end."""
ASKS = [
    Ask(
        prompt=[33 + (i * 13 + k * 5) % 90 for k in range(40)],
        max_tokens=90,
        request_id=f"squeezed-{i}",
    )
    for i in range(ASKED)
]


@pytest.fixture(scope="module", params=["pd", "colocated"])
def squeezed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Timeline]:
    """The holder, and twelve requests on 32 pages."""
    run_dir: Path = tmp_path_factory.mktemp("squeezed") / "run"
    options = ("--mode", request.param, "--decode-pages", str(PAGES), "--max-running", "6")
    options += ("--reserve-output-tokens", "16", "--allow-faults")
    with running_server(run_dir, *options, model="fake:step_ms=2") as server:
        inject(server, HELD)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(ask, server, HOLDER, timeout_s=240)
            wait_injected(server, HELD)
            others = pool.submit(ask_all, server, ASKS, at_once=ASKED, timeout_s=240)
            wait_for(lambda: waiting_for_pages(server) == ASKED, "everybody to wait for pages")
            clear(server)
            answers = [first.result(), *others.result()]
    for request_, answer in zip((HOLDER, *ASKS), answers, strict=True):
        assert answer.text == expected_text(request_), request_.request_id
    return {t.request_id or "": t for t in build_timelines(read_source(run_dir).traces)}


def waiting_for_pages(server: RunningServer) -> int:
    """Requests that wait for pages now, as the agent tells."""
    waits = [request["wait"] for request in requests_in_flight(server)]
    return sum(wait is not None and wait["reason"] == WaitReason.KV_PAGES for wait in waits)


def test_all_complete_and_partition_exactly(squeezed: dict[str, Timeline]) -> None:
    assert len(squeezed) == 1 + ASKED
    for name, timeline in squeezed.items():
        assert timeline.outcome is Outcome.COMPLETED, name
        assert timeline.violations == (), name
        assert timeline.unexplained_ns <= 0.01 * timeline.total_ns, name


def test_pages_ran_out_and_the_waits_say_so(squeezed: dict[str, Timeline]) -> None:
    for name in [asked.request_id or "" for asked in ASKS]:
        waits = [wait for visit in squeezed[name].visits for wait in visit.waits]
        queued = [
            wait
            for wait in waits
            if wait.reason == WaitReason.KV_PAGES and wait.stage != "decode.preempted"
        ]
        assert queued, name
        for wait in queued:
            assert wait.needed is not None
            assert wait.free is not None
            assert wait.needed > wait.free
            assert wait.limit == PAGES


def test_preempted_requests_show_their_pauses(squeezed: dict[str, Timeline]) -> None:
    pauses = [v for t in squeezed.values() for v in t.visits_of("decode.preempted")]
    assert pauses
    assert all(visit.duration_ns > 0 for visit in pauses)
