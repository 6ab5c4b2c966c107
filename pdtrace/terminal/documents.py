"""The JSON documents that `--json` prints: stable keys, times in integer nanoseconds.

    pdtrace.why/1      source, requests[]: identity, outcome, verdict, parts, details, waits, …
    pdtrace.stages/1   stages[], chains, marks[]
    pdtrace.top/1      `pdtrace.terminal.top.top_document`
    pdtrace.check/1    `pdtrace.check.CheckReport.document`

Keys are only added within a schema version; `docs/cli.md` describes each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from pdtrace.analysis.sources import Recording
from pdtrace.analysis.timeline import UNEXPLAINED, Timeline
from pdtrace.analysis.verdict import Verdict
from pdtrace.stages import CHAINS, MARKS, STAGES, TERMS
from pdtrace.terminal.palette import LETTERS

WHY_SCHEMA = "pdtrace.why/1"
STAGES_SCHEMA = "pdtrace.stages/1"


def why_document(
    recording: Recording,
    pairs: Sequence[tuple[Timeline, Verdict]],
    requests: int,
    standing: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """`pdtrace why --json`.

    requests  how many the recording holds
    standing  sentences on processes that cannot go on, by root span id
    """
    return {
        "schema": WHY_SCHEMA,
        "source": {
            "name": recording.source,
            "files": recording.files,
            "lines": recording.lines,
            "spans": recording.spans,
            "traces": len(recording.traces),
            "requests": requests,
            "problems": recording.problems.sentences(),
        },
        "requests": [
            {
                **_request(timeline, verdict),
                "standing": list(standing.get(timeline.root_id or "", ())),
            }
            for timeline, verdict in pairs
        ],
    }


def _request(timeline: Timeline, verdict: Verdict) -> dict[str, Any]:
    judged = {a.leaf.name: a for a in verdict.assessments if a.leaf.name == a.leaf.outer}
    parts: list[dict[str, Any]] = []
    for part in timeline.parts:
        assessment = judged.get(part.name)
        usual = assessment.usual if assessment else None
        parts.append(
            {
                "stage": part.name,
                "ns": part.ns,
                "usual_ns": round(usual.ns) if usual else None,
                "peers": usual.peers if usual else 0,
            }
        )
    return {
        "request_id": timeline.request_id,
        "trace_id": timeline.trace_id,
        "open": timeline.open,
        "mode": timeline.mode.value,
        "outcome": timeline.outcome.value if timeline.outcome else None,
        "outcome_reason": timeline.outcome_reason,
        "outcome_by": timeline.outcome_by,
        "outcome_stage": timeline.outcome_stage,
        "started_unix_ns": timeline.started_unix_ns,
        "total_ns": timeline.total_ns,
        "ttft_ns": timeline.ttft_ns,
        "tpot_ns": timeline.tpot_ns,
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "attempts": timeline.attempts,
        "prefill_worker": timeline.prefill_worker,
        "decode_worker": timeline.decode_worker,
        "verdict": _verdict(verdict),
        "parts": parts,
        "unexplained_ns": timeline.part_ns(UNEXPLAINED),
        "details": {
            outer: [{"stage": part.name, "ns": part.ns} for part in inner]
            for outer, inner in timeline.details.items()
        },
        "segments": [
            {"stage": s.name, "begin_ns": s.begin_ns, "end_ns": s.end_ns, "attempt": s.attempt}
            for s in timeline.segments
        ],
        "waits": [asdict(wait) for visit in timeline.visits for wait in visit.waits],
        "tries": [
            {**asdict(one), "outcome": one.outcome.value if one.outcome else None}
            for one in timeline.tries
        ],
        "steps": [asdict(steps) for steps in timeline.steps],
        "stuck": [asdict(report) for report in timeline.stuck],
        "violations": [
            {"kind": v.kind.value, "stage": v.stage, "span_id": v.span_id, "message": v.message}
            for v in timeline.violations
        ],
        "clocks": [{**asdict(clock), "basis": clock.basis.value} for clock in timeline.clocks],
        "explained": list(timeline.explained),
        "exact": timeline.exact,
        "lacks": list(timeline.lacks),
        "unknowns": list(timeline.unknowns),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": verdict.kind.value,
        "stage": verdict.stage,
        "chain_stage": verdict.chain_stage,
        "detail": verdict.detail,
        "stalled": verdict.stalled,
        "stall_stage": verdict.stall.leaf.name if verdict.stall else None,
        "stage_ns": verdict.stage_ns,
        "usual_ns": verdict.usual_ns,
        "excess_ns": verdict.excess_ns,
        "share": verdict.share,
        "counterfactual_ns": verdict.counterfactual_ns,
        "cause": verdict.cause,
        "wait": asdict(verdict.wait) if verdict.wait else None,
        "advice": verdict.advice,
        "confidence": verdict.confidence.value,
        "peers": verdict.peers,
        "notes": list(verdict.notes),
        "sentence": verdict.sentence,
    }


def stages_document() -> dict[str, Any]:
    """`pdtrace stages --json`."""
    return {
        "schema": STAGES_SCHEMA,
        "stages": [
            {
                "name": stage.name,
                "letter": LETTERS[stage.name],
                "kind": stage.kind.value,
                "begin": [mark.name.lower() for mark in stage.begin],
                "end": stage.end.name.lower(),
                "roles": sorted(role.value for role in stage.roles),
                "parent": stage.parent,
                "within": stage.within,
                "repeats": stage.repeats,
                "scale": stage.scale.value,
                "meaning": stage.meaning,
                "advice": stage.advice,
            }
            for stage in STAGES
        ],
        "terms": [{"term": term, "meaning": meaning} for term, meaning in TERMS.items()],
        "chains": {mode.value: [stage.name for stage in chain] for mode, chain in CHAINS.items()},
        "marks": [
            {
                "name": mark.name.lower(),
                "value": mark.value,
                "roles": sorted(role.value for role in spec.roles),
                "attributes": [attr.key for attr in spec.attrs],
                "meaning": spec.doc,
            }
            for mark, spec in MARKS.items()
        ],
    }
