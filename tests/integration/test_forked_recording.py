"""Spans from every process, however it came to be: forked, forked by multiprocessing, spawned."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdtrace import (
    Mark,
    Mode,
    Outcome,
    Recorder,
    RequestContext,
    Role,
    scan_rings,
)

# The processes that multiprocessing forks find the recorder here, as a preloaded application does.
_recorder: Recorder | None = None


def serve(recorder: Recorder, request_id: str) -> None:
    """What a gateway worker records of a request that it answers itself."""
    context = RequestContext.create(request_id=request_id, mode=Mode.COLOCATED)
    with recorder.begin(context) as request:
        request.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
        request.mark(Mark.TOKENIZED, "m", 12, 16, True, Mode.COLOCATED)
        request.mark(Mark.COMPLETED, Outcome.REJECTED, "no_worker", "gateway", 503, 0)


def serve_after_fork(request_id: str) -> None:
    assert _recorder is not None
    serve(_recorder, request_id)
    _recorder.close()


def serve_in_a_new_process(rings: str, request_id: str) -> None:
    with Recorder.open(rings, role=Role.GATEWAY, instance="gateway-0") as recorder:
        serve(recorder, request_id)


def serve_and_die(recorder: Recorder, request_id: str) -> None:
    """A bare fork that ends as os.fork users often do: without a word to anybody."""
    pid = os.fork()
    if pid == 0:
        try:
            serve(recorder, request_id)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.case("EXP-03")
def test_every_forked_and_spawned_worker_has_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rings = tmp_path / "rings"
    recorder = Recorder.open(rings, role=Role.GATEWAY, instance="gateway-0", raise_errors=True)
    monkeypatch.setattr(sys.modules[__name__], "_recorder", recorder)
    serve(recorder, "parent-before")

    forks = multiprocessing.get_context("fork")
    spawns = multiprocessing.get_context("spawn")
    workers = [
        *(forks.Process(target=serve_after_fork, args=(f"fork-{n}",)) for n in range(3)),
        *(
            spawns.Process(target=serve_in_a_new_process, args=(str(rings), f"spawn-{n}"))
            for n in range(3)
        ),
    ]
    for worker in workers:
        worker.start()
    for n in range(3):
        serve_and_die(recorder, f"bare-{n}")
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    serve(recorder, "parent-after")
    recorder.close()
    assert len(scan_rings(rings)) == 10  # one for each process

    out = tmp_path / "out"
    subprocess.run(
        [
            *(sys.executable, "-m", "pdtrace", "agent"),
            *("--rings", str(rings), "--out", str(out), "--until-closed"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    spans_of: dict[str, set[str]] = {}
    for path in (out / "traces").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            for batch in json.loads(line)["resourceSpans"]:
                for scope in batch["scopeSpans"]:
                    for span in scope["spans"]:
                        names = {
                            one["key"]: one["value"].get("stringValue")
                            for one in span["attributes"]
                        }
                        spans_of.setdefault(names["pd.request.id"], set()).add(span["name"])
    expected = {f"{how}-{n}" for how in ("fork", "spawn", "bare") for n in range(3)}
    assert spans_of.keys() == expected | {"parent-before", "parent-after"}
    assert len({frozenset(names) for names in spans_of.values()}) == 1  # the same of each
    assert any("gateway.ingest" in names for names in spans_of.values())
