"""Every stage, held up in a running server, is blamed on itself; nobody else is blamed.

One server per way through the processes: twelve requests show what is usual, then one request per
stage carries a fault for it. `decode.reserve` has the server to itself: its fault keeps others out.
"""

from __future__ import annotations

import pytest

from pdtrace.analysis.sources import read_source
from pdtrace.analysis.timeline import Timeline, build_timelines
from pdtrace.analysis.verdict import Verdict, judge_all
from pdtrace.stages import CHAINS, Mode
from tests.integration.conftest import FAST_FAKE
from tests.support.completions import Ask, ask, ask_all
from tests.support.server import running_server

pytestmark = pytest.mark.server

STALL_MS = 900
OPTIONS = {
    Mode.PD: (),
    Mode.PD_EARLY: ("--first-token", "prefill"),
    Mode.COLOCATED: ("--mode", "colocated"),
}
ALONE = frozenset({"decode.reserve"})
"""The fault fills the pool: requests beside it would wait too, and rightly be blamed."""


@pytest.fixture(scope="module", params=list(OPTIONS), ids=lambda mode: mode.value)
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Mode, dict[str, tuple[Timeline, Verdict]]]:
    """Mode, and timeline and verdict of each request by its id."""
    mode: Mode = request.param
    run_dir = tmp_path_factory.mktemp(mode.value) / "run"
    stages = [stage.name for stage in CHAINS[mode]] + ["decode.gap"]
    with running_server(run_dir, "--allow-faults", *OPTIONS[mode], model=FAST_FAKE) as server:
        usual = [
            Ask(prompt="x" * (20 + 10 * i), max_tokens=8 + i, stream=True, request_id=f"usual-{i}")
            for i in range(12)
        ]
        faulty = {
            name: Ask(
                prompt="y" * 50,
                max_tokens=10,
                stream=True,
                request_id=name,
                faults={name: STALL_MS},
            )
            for name in stages
        }
        answers = ask_all(server, usual, at_once=2)
        answers += ask_all(server, [faulty[n] for n in stages if n not in ALONE], at_once=20)
        answers += [ask(server, faulty[n]) for n in stages if n in ALONE]
        assert [answer.status for answer in answers] == [200] * len(answers)
    timelines = build_timelines(read_source(run_dir).traces)
    verdicts = judge_all(timelines)
    return mode, {
        timeline.request_id or "": (timeline, verdict)
        for timeline, verdict in zip(timelines, verdicts, strict=True)
    }


def test_every_stage_is_blamed_for_its_own_stall(
    judged: tuple[Mode, dict[str, tuple[Timeline, Verdict]]],
) -> None:
    mode, by_id = judged
    blamed = {
        name: by_id[name][1].stage if by_id[name][1].stalled else None
        for name in [stage.name for stage in CHAINS[mode]] + ["decode.gap"]
    }
    assert blamed == {name: name for name in blamed}


def test_stall_is_as_long_as_what_was_injected(
    judged: tuple[Mode, dict[str, tuple[Timeline, Verdict]]],
) -> None:
    mode, by_id = judged
    # Spans, not parts: with early forwarding some of `transfer` lies under `hop.token`.
    for stage in CHAINS[mode]:
        (visit,) = by_id[stage.name][0].visits_of(stage.name)
        assert visit.duration_ns >= STALL_MS * 1_000_000, stage.name


def test_requests_that_were_not_held_up_are_not_blamed(
    judged: tuple[Mode, dict[str, tuple[Timeline, Verdict]]],
) -> None:
    _, by_id = judged
    wrongly = [
        v.sentence for name, (_, v) in by_id.items() if name.startswith("usual") and v.stalled
    ]
    assert wrongly == []


def test_stalled_requests_partition_exactly_and_are_explained(
    judged: tuple[Mode, dict[str, tuple[Timeline, Verdict]]],
) -> None:
    mode, by_id = judged
    for name, (timeline, _) in by_id.items():
        assert timeline.mode is mode
        assert sum(part.ns for part in timeline.parts) == timeline.total_ns, name
        assert timeline.unexplained_ns <= 0.01 * timeline.total_ns, name
        assert timeline.violations == (), name


def test_held_wait_says_that_it_was_injected_and_a_full_pool_says_pages(
    judged: tuple[Mode, dict[str, tuple[Timeline, Verdict]]],
) -> None:
    mode, by_id = judged
    wait = by_id["prefill.queue"][1].wait
    assert wait is not None
    assert wait.reason == "injected"
    if mode is Mode.PD:
        wait = by_id["decode.reserve"][1].wait
        assert wait is not None
        assert wait.reason == "kv_pages"
        assert wait.needed is not None
        assert wait.free is not None
        assert wait.needed > wait.free


def test_recording_holds_every_request(
    judged: tuple[Mode, dict[str, tuple[Timeline, Verdict]]],
) -> None:
    mode, by_id = judged
    assert len(by_id) == 12 + len(CHAINS[mode]) + 1
