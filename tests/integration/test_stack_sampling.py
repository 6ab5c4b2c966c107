"""Jaeger behind several agents: the parts of a request come one after the other, and of what is
normal a share is kept."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdtrace.agent.command import AgentConfig, run_agent
from pdtrace.propagation import RequestContext
from pdtrace.stages import Mode, Outcome, Role
from pdtrace.testing import open_recorders, record_request
from tests.support.real_stack import RealStack, need_programs, real_stack, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

WAIT_S = 20
APART_S = 6.0
"""Between the parts of a request: more than `make stack` waits by itself, less than WAIT_S."""
KEEP_PERCENT = 50
NORMAL, FAILED, LATE = 100, 6, 6
"""Requests of each kind, in each of two groups."""
LEGS = (Role.PREFILL, Role.TRANSFER, Role.DECODE)
BEGUN_AGO_NS = 10_000_000_000
QUICK = AgentConfig(grace_s=0.2, flush_s=20.0)


@dataclass(frozen=True)
class Group:
    """Requests whose gateway and whose workers have an agent each. By kind, trace id → spans."""

    gateway: Path
    legs: Path
    requests: Mapping[str, list[str]]


def record_group(folder: Path) -> Group:
    gateway, legs = folder / "gateway", folder / "legs"
    recorders = {
        **open_recorders(gateway, roles=(Role.GATEWAY,)),
        **open_recorders(legs, roles=LEGS),
    }
    requests: dict[str, list[str]] = {"normal": [], "failed": [], "late": []}

    def record(kind: str, **how: Any) -> None:
        context = RequestContext.create(request_id=f"{kind}-{secrets.token_hex(4)}", mode=Mode.PD)
        start_ns = time.monotonic_ns() - BEGUN_AGO_NS
        record_request(recorders, context=context, start_ns=start_ns, **how)
        requests[kind].append(context.trace_id)

    for _ in range(NORMAL):
        record("normal")
    for _ in range(FAILED):  # after the workers had done their part
        record("failed", outcome=Outcome.FAILED, stop_in="gateway.finish", reason="broken")
    for _ in range(LATE):  # only who knows the whole of it can tell
        record("late", stage_ms={"gateway.queue": 3_000.0})
    for recorder in recorders.values():
        recorder.close()
    return Group(gateway, legs, requests)


def test_parts_that_come_apart_are_one_decision_and_a_share_of_what_is_normal_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_programs()
    options = ("--keep", str(KEEP_PERCENT), "--decision-wait", f"{WAIT_S}s")
    first, second = record_group(tmp_path / "first"), record_group(tmp_path / "second")
    with real_stack(tmp_path / "stack", *options) as stack:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", stack.otlp)

        def export(*rings: Path) -> None:
            for each in rings:
                summary = run_agent(each, until_closed=True, config=QUICK)
                assert summary.requests == NORMAL + FAILED + LATE, summary.line()

        begin_s = time.monotonic()
        export(first.legs, second.gateway)
        time.sleep(APART_S)
        export(first.gateway, second.legs)
        took_s = time.monotonic() - begin_s
        assert took_s < WAIT_S, f"the parts came {took_s:.0f} s apart: this says nothing"
        check(stack, first, second)


def check(stack: RealStack, *groups: Group) -> None:
    """All of a request is kept, or none; of what went wrong all, of the others about half."""
    kinds = [(kind, ids) for group in groups for kind, ids in group.requests.items()]
    asked = sum(len(ids) for _, ids in kinds)
    counted = "otelcol_processor_tail_sampling_global_count_traces_sampled_total"
    wait_for(lambda: stack.value(f"sum({counted})") == asked, "a decision on each trace")
    sampled = stack.value(f'sum({counted}{{sampled="true"}})')

    def whole() -> list[list[tuple[str, ...]]] | None:
        """Names of the spans of each trace that is kept. Requests of a kind are alike: where all
        have the same spans, none lacks some."""
        found = [
            [tuple(sorted(names)) for one in ids if (names := stack.span_names(one))]
            for _, ids in kinds
        ]
        alike = all(len(set(traces)) == 1 for traces in found)
        return found if alike and sum(map(len, found)) == sampled else None

    found = wait_for(whole, "the whole of all that is kept")
    normal = 0
    for (kind, ids), traces in zip(kinds, found, strict=True):
        of_both = {"prefill.compute", "transfer", "decode.generate", "gateway.dispatch"}
        assert of_both <= set(traces[0])
        if kind == "normal":
            normal += len(traces)
        else:
            assert len(traces) == len(ids), kind
    assert 0.3 < normal / (len(groups) * NORMAL) < 0.7
