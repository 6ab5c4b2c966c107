"""docs/agent.md names every metric of the agent, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from pdtrace.agent.metrics import AgentMetrics, AgentNumbers, Exposition
from pdtrace.agent.summary import AgentSummary
from pdtrace.inflight import Look, ProcessNow, ProcessState
from pdtrace.stages import Gauge

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agent.md"
EXPORT = (
    "spans_exported",
    "spans_replayed",
    "spans_unsampled",
    "spans_waiting",
    "spans_dropped",
    "lines_lost",
    "files_deleted",
)


def exposition(accept: str) -> str:
    """What an agent with every metric answers."""
    process = ProcessNow(
        role="decode",
        instance="decode-0",
        pid=1,
        host_id="h",
        state=ProcessState.ALIVE,
        progress_age_s=1.0,
        gauges={gauge.name.lower(): 1 for gauge in Gauge},
    )
    look = Look(at_ns=1, processes=(process,))
    numbers = AgentNumbers(summary=AgentSummary(export=dict.fromkeys(EXPORT, 1)))
    body, _ = Exposition(AgentMetrics(), lambda: look, lambda: numbers).render(accept)
    return body.decode()


def exposed() -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", exposition("text/plain"), re.MULTILINE))


def test_page_names_every_metric_and_no_other() -> None:
    named = set(re.findall(r"`(pd_\w+)`", PAGE.read_text()))
    assert named == exposed()
