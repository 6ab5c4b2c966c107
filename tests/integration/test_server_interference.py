"""A long prompt in a colocated worker makes the tokens of others late, and `why` names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdtrace import semconv as a
from pdtrace.stages import GapCause, WaitReason
from tests.support.completions import Ask, ask
from tests.support.recorded import in_flight, spans_of, wait_for
from tests.support.server import ROOT, RunningServer, running_server

pytestmark = pytest.mark.server

MODEL = "fake:step_ms=4,token_us=2000"
"""The culprit's pass over 800 tokens takes 1.6 s, a step of the batch some 10 ms."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A colocated server in which a victim has met its culprit."""
    options = ("--mode", "colocated", "--unchunked", "--gap-threshold-s", "0.3")
    run_dir = tmp_path_factory.mktemp("interference") / "run"
    with running_server(run_dir, *options, model=MODEL) as server:
        for number in range(6):
            prompt = list(range(1 + number, 30 + number))
            ask(server, Ask(request_id=f"usual-{number}", prompt=prompt, max_tokens=60))
        with ThreadPoolExecutor() as pool:
            victim = Ask(request_id="victim", prompt=list(range(40, 70)), max_tokens=200)
            answer = pool.submit(ask, server, victim)
            wait_for(
                lambda: (in_flight(server, "victim") or {}).get("stage") == "decode.generate",
                "a victim that generates",
            )
            culprit = [(7 * i) % 200 + 1 for i in range(800)]
            ask(server, Ask(request_id="culprit", prompt=culprit, max_tokens=4))
            assert answer.result().status == 200
        yield server


def test_gap_has_its_cause_its_step_and_a_link_to_the_culprit(server: RunningServer) -> None:
    spans = spans_of(server, "victim")
    (culprit,) = [s for s in spans_of(server, "culprit") if s.name == "prefill.compute"]
    (gap,) = [
        span
        for span in spans
        if span.name == "decode.gap"
        and span.attributes[a.GAP_CAUSE.key] == GapCause.INTERFERING_PREFILL
    ]
    seconds = gap.attributes[a.GAP_CAUSE_SECONDS.key]
    assert isinstance(seconds, float)
    assert seconds >= 0.5  # less what the machine kept the process from running
    assert gap.attributes[a.WAIT_BLOCKER.key] == "culprit"
    assert gap.attributes[a.STEP_NUMBER.key]
    assert [link.trace_id for link in gap.links] == [culprit.trace_id]


def test_why_names_the_request_whose_prompt_stalled_it(server: RunningServer) -> None:
    for name in ("victim", "culprit"):
        spans_of(server, name)
    assert "culprit" in why(server, "victim")
    document: dict[str, Any] = json.loads(why(server, "victim", "--json"))
    assert document["requests"][0]["verdict"]["stage"] == "decode.gap"


def test_time_in_which_the_worker_was_stopped_is_nobodys_fault(server: RunningServer) -> None:
    with ThreadPoolExecutor() as pool:
        asked = [
            Ask(request_id=f"stopped-{number}", prompt=list(range(20)), max_tokens=800)
            for number in range(4)
        ]
        answers = [pool.submit(ask, server, each) for each in asked]
        for number in range(3):
            wait_for(
                lambda: (in_flight(server, "stopped-3") or {}).get("stage") == "decode.generate",
                "requests that generate",
            )
            pid = server.pid("worker-0")
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(pid, signal.SIGCONT)
            pool.submit(ask, server, Ask(request_id=f"joins-{number}", max_tokens=2)).result()
        assert all(answer.result().status == 200 for answer in answers)
    gaps = [
        span
        for number in range(4)
        for span in spans_of(server, f"stopped-{number}")
        if span.name == "decode.gap" and float(str(span.attributes[a.GAP_SECONDS.key])) > 1.4
    ]
    assert gaps
    assert {span.attributes[a.GAP_CAUSE.key] for span in gaps} == {GapCause.PROCESS_PAUSED}


def test_time_in_which_the_gateway_was_stopped_is_told_of_what_waited_for_it(
    server: RunningServer,
) -> None:
    """A message that comes just behind the pause waited for it, unless the machine is so slow that
    "just behind" is long over, or that the request is: so it is tried some times. The answer is
    short: a worker lets go of requests whose gateway is silent for longer than `dead_after_s`."""
    waits: list[object] = []

    def stage_of(name: str) -> object:
        """None: it is not in flight."""
        return (in_flight(server, name) or {}).get("stage")

    with ThreadPoolExecutor() as pool:
        for number in range(8):
            name = f"gateway-stopped-{number}"
            asked = Ask(request_id=name, prompt=list(range(20)), max_tokens=120, stream=False)
            answer = pool.submit(ask, server, asked)
            wait_for(
                lambda name=name, answer=answer: (
                    stage_of(name) == "decode.generate" or answer.done()
                ),
                f"{name} in decode.generate",
            )
            pid = server.pid("gateway-0")
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_for(
                    lambda name=name: stage_of(name) in {"gateway.finish", None},
                    f"{name} in gateway.finish",
                )
                time.sleep(0.5)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert answer.result().status == 200
            waits += [
                span.attributes.get(a.WAIT_REASON.key)
                for span in spans_of(server, name)
                if span.name in {"hop.token", "gateway.finish"}
            ]
            if WaitReason.PROCESS_PAUSED in waits:
                return
    raise AssertionError(f"no trace says that the gateway stood still: {waits}")


def test_request_that_its_worker_gave_up_waits_for_the_stopped_gateway(
    server: RunningServer,
) -> None:
    """The worker waits `dead_after_s` for a gateway that is silent, 3 s."""
    name = "given-up"
    asked = Ask(request_id=name, prompt=list(range(20)), max_tokens=900, stream=False)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server, asked)
        wait_for(
            lambda: (in_flight(server, name) or {}).get("stage") == "decode.generate",
            "a request that generates",
        )
        pid = server.pid("gateway-0")
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(
                lambda: (in_flight(server, name) or {}).get("stage") == "gateway.finish",
                "what the worker gave up",
            )
            seen = in_flight(server, name)
            assert seen is not None
            assert (seen["worker"], seen["attempt"]) == ("gateway-0", 1)
            text = why(server, name)
            assert "gateway.finish" in text and "gateway-0" in text, text
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.result().status == 200
    spans = spans_of(server, name)
    assert [s.attributes[a.OUTCOME.key] for s in spans if s.name == "attempt"][-1] == "completed"
    [given_up, _] = [span for span in spans if span.name == "decode.generate"]
    assert given_up.attributes[a.OUTCOME.key] != "completed"


def why(server: RunningServer, request_id: str, *options: str) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pdtrace",
            "why",
            request_id,
            "--from",
            str(server.run_dir),
            *options,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout
