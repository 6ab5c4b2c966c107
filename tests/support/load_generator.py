"""Runs aiperf, a load generator from elsewhere, against a server, and reads what it reports.

It lives in an environment of its own, .venv-loadgen, which `.ci/loadgen` makes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ROOT, RunningServer

AIPERF = ROOT / ".venv-loadgen" / "bin" / "aiperf"
INSTALL_S = 300.0
_UNREACHABLE = re.compile(
    r"Failed to fetch|error sending request|dns error|Could not connect|Connection refused"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """One request as aiperf saw it. Times in seconds, on its own clock.

    latency_s      from sending to the last piece of text
    chunks         pieces of text, of which the first ends `ttft_s`
    usage          what the server said in the stream: prompt and completion tokens
    prompt_tokens  what aiperf's own tokenizer and chat template make of the prompt
    text_tokens    what its tokenizer makes of the text that came
    """

    request_id: str
    ttft_s: float
    latency_s: float
    itl_s: float
    chunk_gaps_s: Sequence[float]
    usage: tuple[int, int]
    prompt_tokens: int
    text_tokens: int

    @property
    def chunks(self) -> int:
        return len(self.chunk_gaps_s) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """`summary` and `scraped` are aiperf's own files: its totals, and /metrics as it read them."""

    records: Sequence[ClientRecord]
    summary: dict[str, Any]
    scraped: dict[str, Any]


def require_load_generator() -> None:
    """Bring .venv-loadgen up to date. Without a network the test is skipped; in CI it fails."""
    fault = _install()
    if fault is None:
        return
    reason = f".ci/loadgen: {' '.join(fault.split())[-400:]}"
    if not os.environ.get("CI") and _UNREACHABLE.search(fault):
        pytest.skip(reason)
    pytest.fail(reason)


@cache
def _install() -> str | None:
    """What went wrong; tried once."""
    done = subprocess.run(
        [ROOT / ".ci" / "loadgen"],
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    return None if done.returncode == 0 else done.stderr


def run_aiperf(
    server: RunningServer, tokenizer: Path, folder: Path, *options: str, timeout_s: float
) -> LoadReport:
    """Run `aiperf profile` on a server's chat endpoint, streaming; all it writes goes to `folder`.

    tokenizer   a Hugging Face folder: no model hub is asked for anything
    """
    out, home = folder / "aiperf", folder / "home"
    home.mkdir()
    command = [
        *(AIPERF, "profile", "--url", server.url, "--model", server.model),
        *("--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", tokenizer, "--apply-chat-template"),
        *("--workers-max", "1", "--record-processors", "1", "--no-gpu-telemetry", "--ui", "none"),
        *("--output-artifact-dir", out, "--server-metrics-formats", "json"),
        *options,
    ]
    process = subprocess.Popen(
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it has some ten processes
        output, _ = process.communicate()
        raise AssertionError(f"aiperf took over {timeout_s:g} s: {output[-4000:]}") from None
    assert process.returncode == 0, output[-4000:]
    lines = (out / "profile_export.jsonl").read_text().splitlines()
    return LoadReport(
        records=[_record(json.loads(line)) for line in lines],
        summary=json.loads((out / "profile_export_aiperf.json").read_text()),
        scraped=json.loads((out / "server_metrics_export.json").read_text()),
    )


def _record(line: dict[str, Any]) -> ClientRecord:
    assert line.get("error") is None, line
    values = {name: metric["value"] for name, metric in line["metrics"].items()}
    units = {name: metric["unit"] for name, metric in line["metrics"].items()}
    assert {units[name] for name in ("time_to_first_token", "request_latency")} == {"ms"}
    return ClientRecord(
        request_id=line["metadata"]["x_request_id"],
        ttft_s=values["time_to_first_token"] / 1e3,
        latency_s=values["request_latency"] / 1e3,
        itl_s=values["inter_token_latency"] / 1e3,
        chunk_gaps_s=[gap / 1e3 for gap in values["inter_chunk_latency"]],
        usage=(values["usage_prompt_tokens"], values["usage_completion_tokens"]),
        prompt_tokens=values["input_sequence_length"],
        text_tokens=values["output_sequence_length"],
    )
