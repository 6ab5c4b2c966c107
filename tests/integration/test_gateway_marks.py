"""What the gateway records of a request, and its fault hooks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from pdtrace.gaps import read_gap_counts
from pdtrace.ring.records import MarkRecord
from pdtrace.stages import Mark, WaitReason
from tests.support.gateway_doubles import (
    GatewayUnderTest,
    gateway_under_test,
    speak,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_completed_request_has_all_marks_in_order(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path) as g:
        await g.complete(stream=True, max_tokens=9)
        names = g.mark_names()
        (tokenized,), (completed,) = g.marks(Mark.TOKENIZED), g.marks(Mark.COMPLETED)
        (routed,), (received,) = g.marks(Mark.ROUTED), g.marks(Mark.RECEIVED)
    assert names == [
        "RECEIVED",
        "TOKENIZED",
        "ADMITTED",
        "ROUTED",
        "DISPATCHED",
        "FIRST_TOKEN_SENT",
        "COMPLETED",
    ]
    assert received == ("POST", "/v1/completions", "text_completion")
    assert tokenized == ("fake", 2, 9, True, "pd")
    assert routed[:4] == ("prefill-0", "decode-0", "least_loaded", 1)
    assert completed[:7] == ("completed", None, None, 200, 6, "stop", 0)


async def test_gaps_between_writes_are_counted_and_the_longest_is_told(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak("abc", gap_s=0.5)) as g:
        await g.complete(stream=True, max_tokens=9)
        await g.complete(stream=False, max_tokens=9)
        streamed, whole = g.marks(Mark.COMPLETED)
        metrics = (await g.client.get("/metrics")).text
    gaps, longest_s, counts = streamed[7:]
    assert isinstance(longest_s, float)
    assert longest_s > 0.15
    assert whole[7:] == (0, None, None)
    found = read_gap_counts(counts)
    assert sum(one.count for one in found) == gaps
    assert found[-1].over_ns < longest_s * 1e9 <= (found[-1].upto_ns or 2**63)
    measured = [line for line in metrics.splitlines() if "pd_inter_token_gap_seconds_count" in line]
    assert sum(float(line.split()[-1]) for line in measured) == gaps


async def test_request_begins_at_its_first_byte_and_ends_at_its_last(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, decode_script=speak("abc", gap_s=0.5)) as g:
        began_s = time.monotonic()
        host, port = g.address
        reader, writer = await asyncio.open_connection(host, port)
        body = b'{"model": "fake", "prompt": "hi", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        await asyncio.sleep(1.0)  # a client that is slow with its headers
        head = f"host: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.read()
        writer.close()
        await g.idle()
        took_s = time.monotonic() - began_s
        times = dict(_mark_times(g))
    ingest_s = (times["TOKENIZED"] - times["RECEIVED"]) / 1e9
    stream_s = (times["COMPLETED"] - times["FIRST_TOKEN_SENT"]) / 1e9
    assert ingest_s > 0.19
    assert stream_s > 0.19
    assert ingest_s + stream_s < took_s


def _mark_times(g: GatewayUnderTest) -> list[tuple[str, int]]:
    return [(r.mark.name, r.t_ns) for r in g.records() if isinstance(r, MarkRecord)]


@pytest.mark.parametrize(
    ("stage", "begin", "end"),
    [
        ("gateway.ingest", "RECEIVED", "TOKENIZED"),
        ("gateway.queue", "TOKENIZED", "ADMITTED"),
        ("gateway.route", "ADMITTED", "ROUTED"),
        ("gateway.dispatch", "ROUTED", "DISPATCHED"),
        ("hop.token", "DISPATCHED", "FIRST_TOKEN_SENT"),
        ("gateway.finish", "FIRST_TOKEN_SENT", "COMPLETED"),
    ],
)
async def test_fault_delays_its_own_stage_and_says_it_was_injected(
    tmp_path: Path, stage: str, begin: str, end: str
) -> None:
    async with gateway_under_test(tmp_path, allow_faults=True) as g:
        response = await g.complete(headers={"X-PD-Faults": f"{stage}=600"}, stream=True)
        times = dict(_mark_times(g))
        waits = g.marks(Mark.WAITING)
    assert response.status_code == 200
    spent = {
        (a, b): (times[b] - times[a]) / 1e9
        for a, b in [
            ("RECEIVED", "TOKENIZED"),
            ("TOKENIZED", "ADMITTED"),
            ("ADMITTED", "ROUTED"),
            ("ROUTED", "DISPATCHED"),
            ("DISPATCHED", "FIRST_TOKEN_SENT"),
            ("FIRST_TOKEN_SENT", "COMPLETED"),
        ]
    }
    assert spent[begin, end] >= 0.599
    assert max(spent, key=lambda pair: spent[pair]) == (begin, end)
    assert [wait[:2] for wait in waits] == [(stage, WaitReason.INJECTED)]


async def test_other_faults_travel_to_both_legs(tmp_path: Path) -> None:
    async with gateway_under_test(tmp_path, allow_faults=True) as g:
        await g.complete(headers={"X-PD-Faults": "transfer=7, decode.queue=9"})
        unknown = await g.complete(headers={"X-PD-Faults": "lunch=7"})
        (decode,), (prefill,) = g.decode.requests, g.prefill.requests
    assert decode.faults == prefill.faults == {"transfer": 7, "decode.queue": 9}
    assert unknown.json()["error"]["code"] == "invalid_faults"
