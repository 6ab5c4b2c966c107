"""What agent and gateway expose, without a server: freshly started, and after requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdtrace.agent.judging import RollingJudge
from pdtrace.agent.metrics import AgentMetrics, AgentNumbers, Exposition
from pdtrace.agent.summary import AgentSummary
from pdtrace.assembly.collected import CollectedRequest
from pdtrace.assembly.request_spans import assemble
from pdtrace.export.queue import DropReason
from pdtrace.inflight import Look, ProcessNow, ProcessState
from pdtrace.ring.records import StepRecord
from pdtrace.stages import Gauge, Outcome, Role, StepKind
from server.gateway.metrics import GatewayMetrics
from server.gateway.openai_api import Operation
from server.gateway.registry import MemberReport, MemberState

PROCESSES = ("gateway-0", "prefill-0", "transfer-0", "decode-0")
_EXPORT = ("spans_exported", "spans_waiting", "lines_lost", "files_deleted")
_POOL = 64


def fresh_agent() -> AgentMetrics:
    return AgentMetrics()


def serve(metrics: AgentMetrics, *requests: CollectedRequest) -> None:
    """The agent takes in finished requests, and a forward pass of each kind for each."""
    judge = RollingJudge()
    judge.told = metrics.owned
    for request in requests:
        spans = assemble(request)
        judge(spans)
        metrics.request(request, spans)
        for kind, instance in ((StepKind.PREFILL, "prefill-0"), (StepKind.DECODE, "decode-0")):
            step = StepRecord(number=1, kind=kind, begin_ns=0, end_ns=20_000_000, tokens=1, size=1)
            metrics.step(instance, step)


def agent_samples(
    metrics: AgentMetrics, *, finished: int = 0, closed: Collection[str] = ()
) -> list[Sample]:
    """What the agent of a healthy, idle server exposes.

    closed  processes that have ended in order
    """
    processes = tuple(
        _process(instance, ProcessState.CLOSED if instance in closed else ProcessState.ALIVE)
        for instance in PROCESSES
    )
    look = Look(at_ns=1, processes=processes)
    numbers = AgentNumbers(
        summary=AgentSummary(requests=finished, export=dict.fromkeys(_EXPORT, 0)),
        dropped={reason.value: 0 for reason in DropReason},
        lag_s=0.05,
        poll_age_s=0.05,
    )
    body, _ = Exposition(metrics, lambda: look, lambda: numbers).render("text/plain")
    return _parsed(body)


def fresh_gateway(
    states: Mapping[str, MemberState] = MappingProxyType({}),
) -> GatewayMetrics:
    """All processes are ready, but for those whose `states` say otherwise."""
    members = [
        MemberReport(
            instance=instance,
            role=instance.partition("-")[0],
            state=states.get(instance, MemberState.READY),
            progress_age_s=0.1,
            heartbeat_age_s=0.1,
            reason=None,
            ignored={},
        )
        for instance in PROCESSES[1:]
    ]
    return GatewayMetrics(
        model="m", in_flight=lambda: 0, waiting=lambda: 0, members=lambda: members
    )


def gateway_samples(metrics: GatewayMetrics) -> list[Sample]:
    return _parsed(metrics.render("text/plain")[0])


def serve_at_gateway(metrics: GatewayMetrics, outcome: Outcome = Outcome.COMPLETED) -> None:
    """One stream of three tokens."""
    reason = "" if outcome is Outcome.COMPLETED else "worker_lost"
    metrics.first_token(Operation.CHAT, 0.1, streamed=True)
    for _ in range(2):
        metrics.gap(Operation.CHAT, 0.02)
    metrics.time_per_token(Operation.CHAT, 0.02)
    metrics.tokens({"input": 12, "output": 3, "cached": 0})
    metrics.ended(Operation.CHAT, outcome, reason, 0.2)


def _process(instance: str, state: ProcessState) -> ProcessNow:
    role = Role(instance.partition("-")[0])
    gauges = {gauge.name.lower(): 0 for gauge in Gauge}
    if role in {Role.PREFILL, Role.DECODE}:
        gauges |= {"kv_pages_total": _POOL, "kv_pages_free": _POOL}
    else:
        gauges = {name: value for name, value in gauges.items() if "pages" not in name}
    gauges["recording_detail"] = 3
    return ProcessNow(
        role=role.value,
        instance=instance,
        pid=1,
        host_id="h",
        state=state,
        progress_age_s=0.1,
        gauges=gauges,
    )


def _parsed(body: bytes) -> list[Sample]:
    families = text_string_to_metric_families(body.decode())
    return [sample for family in families for sample in family.samples]
