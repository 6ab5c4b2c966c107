"""Writes `docs/stages.md` out of `pdtrace.stages`, so that the page cannot drift from the code.

python -m pdtrace.glossary            write the page
python -m pdtrace.glossary --check    exit code 1 if it differs from what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pdtrace.stages import (
    CHAINS,
    MARKS,
    OPTIONAL_STAGES,
    STAGES,
    TERMS,
    GapCause,
    Kind,
    Mark,
    Mode,
    Outcome,
    Role,
    Scale,
    Stage,
    WaitReason,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "stages.md"

_MODES: Mapping[Mode, str] = MappingProxyType(
    {
        Mode.PD: "prefill and decode on two workers; the first token comes from decode",
        Mode.PD_EARLY: "prefill forwards the first token before the KV has landed",
        Mode.COLOCATED: "one worker does both phases",
    }
)
_KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.WORK: "something is computed, copied or sent for this request",
        Kind.WAIT: "the request waits; a reason is recorded",
        Kind.HOP: "a message or a notification is on its way between two processes",
    }
)
_OUTCOMES: Mapping[Outcome, str] = MappingProxyType(
    {
        Outcome.COMPLETED: "The answer was written to the end.",
        Outcome.FAILED: "An error ended it; `pd.outcome.reason` holds the code.",
        Outcome.CANCELLED: "Somebody no longer wanted it, mostly the client; not an error.",
        Outcome.TIMED_OUT: "The deadline of `pd.outcome.stage` passed.",
        Outcome.REJECTED: "It was never admitted: bad input, or no room.",
        Outcome.LOST: "A process died with it; nobody could record its end.",
    }
)
_REASONS: Mapping[WaitReason, tuple[str, str]] = MappingProxyType(
    {
        WaitReason.KV_PAGES: ("free KV pages", "pages"),
        WaitReason.SLOTS: ("a place among the running requests", "requests"),
        WaitReason.TOKEN_BUDGET: ("room in the token budget of a step", "tokens per step"),
        WaitReason.CONCURRENCY: ("the gateway's concurrency limit", "admitted requests"),
        WaitReason.NO_WORKER: ("a ready pair of workers", "ready workers"),
        WaitReason.PEER_NOT_READY: ("the answer of the other leg", "–"),
        WaitReason.WORKER_BUSY: ("the end of a step of other requests", "–"),
        WaitReason.HEAD_OF_LINE: ("an earlier request in the same queue", "–"),
        WaitReason.PREEMPTED: ("pages that were taken away during decode", "pages"),
        WaitReason.COPY_QUEUE: ("copy jobs ahead of its own", "jobs"),
        WaitReason.BANDWIDTH: ("the bytes of copies that share its path", "copies"),
        WaitReason.PROCESS_PAUSED: (
            "its process, which stood still: stopped by a signal, frozen, or without a processor",
            "milliseconds that it did",
        ),
        WaitReason.INJECTED: ("a fault hook (`--allow-faults`)", "–"),
        WaitReason.UNKNOWN: ("the reason was not recorded", "–"),
    }
)
_GAP_CAUSES: Mapping[GapCause, str] = MappingProxyType(
    {
        GapCause.INTERFERING_PREFILL: "a prompt ran in the same worker: `pd.wait.blocker` names it",
        GapCause.BATCH_GROWTH: "the step itself took longer: more or longer sequences in the batch",
        GapCause.PREEMPTION: "its pages were taken away for others",
        GapCause.TRANSFER_LANDING: "the loop took in KV that had landed for other requests",
        GapCause.SCHEDULER_BUSY: "the loop did something else between two steps",
        GapCause.PROCESS_PAUSED: "the whole process stood still: stopped by a signal, frozen, or "
        "without a processor",
        GapCause.INJECTED: "a fault hook (`--allow-faults`)",
        GapCause.UNKNOWN: "none of these explains it",
    }
)
_SCALES: Mapping[Scale, str] = MappingProxyType(
    {
        Scale.CONSTANT: "–",
        Scale.PROMPT_TOKENS: "prompt tokens",
        Scale.OUTPUT_TOKENS: "output tokens",
    }
)


def page() -> str:
    """The whole page, Markdown."""
    return "\n".join(
        [
            *_intro(),
            *_terms(),
            *_chains(),
            *_stage_tables(),
            *_marks(),
            *_reasons(),
            *_gap_causes(),
            *_ends(),
        ]
    )


def _intro() -> Iterable[str]:
    yield "# Stages and marks"
    yield ""
    yield "<!-- Generated from pdtrace/stages.py by `python -m pdtrace.glossary`; do not edit. -->"
    yield ""
    yield (
        "A *mark* is an instant that one process records. A *stage* is the time between two marks. "
        "The stages of a *chain* follow each other, and their times sum to the whole request: each "
        "nanosecond belongs to one stage or to `unexplained`. Stages beside the chain overlap it "
        "and show the same time from another side."
    )
    yield ""
    yield from _table(("kind", "meaning"), ((kind.value, text) for kind, text in _KINDS.items()))


def _terms() -> Iterable[str]:
    yield "## Terms"
    yield ""
    yield from _table(("term", "meaning"), TERMS.items())


def _chains() -> Iterable[str]:
    yield "## Chains"
    yield ""
    for mode, chain in CHAINS.items():
        yield f"**`{mode.value}`** ({_MODES[mode]}):"
        yield ""
        yield " → ".join(f"`{stage.name}`" for stage in chain)
        yield ""
    optional = ", ".join(f"`{name}`" for name in sorted(OPTIONAL_STAGES))
    yield (
        f"A completed request may lack {optional} (an answer without content has no first token), "
        "and after one output token everything that follows `prefill.compute`."
    )
    yield ""
    yield (
        "An answer in one piece (`gen_ai.request.stream` is false) sends its first token with its "
        "last: its time to first token, `pd.ttft`, is as long as its generation. Metrics keep the "
        "two apart by the label `streamed`."
    )
    yield ""


def _stage_tables() -> Iterable[str]:
    chained = {stage.name for chain in CHAINS.values() for stage in chain}
    for title, wanted in (("Stages of the chain", True), ("Stages beside the chain", False)):
        yield f"## {title}"
        yield ""
        yield from _table(
            ("stage", "kind", "owner", "from → to", "grows with", "meaning", "when it is long"),
            (_stage_row(stage) for stage in STAGES if (stage.name in chained) is wanted),
        )


def _stage_row(stage: Stage) -> tuple[str, ...]:
    begin = " or ".join(f"`{_mark(mark)}`" for mark in stage.begin) or "its recorded length"
    name = f"`{stage.name}`"
    if stage.within:
        name += f" (in `{stage.within}`)"
    return (
        name,
        stage.kind.value,
        _roles(stage.roles),
        f"{begin} → `{_mark(stage.end)}`",
        _SCALES[stage.scale],
        stage.meaning,
        stage.advice,
    )


def _marks() -> Iterable[str]:
    yield "## Marks"
    yield ""
    yield "Attribute values follow a mark in this order. Numbers are stored in ring files."
    yield ""
    yield from _table(
        ("number", "mark", "recorded by", "instant", "attributes"),
        (
            (
                str(mark.value),
                f"`{_mark(mark)}`",
                _roles(spec.roles),
                spec.doc,
                " ".join(f"`{attr.key}`" for attr in spec.attrs) or "–",
            )
            for mark, spec in MARKS.items()
        ),
    )


def _reasons() -> Iterable[str]:
    yield "## Wait reasons"
    yield ""
    yield "`pd.wait.needed`, `pd.wait.free` and `pd.wait.limit` are in the unit of the reason."
    yield ""
    rows = ((f"`{reason.value}`", *_REASONS[reason]) for reason in WaitReason)
    yield from _table(("reason", "the request waits for", "unit"), rows)


def _gap_causes() -> Iterable[str]:
    yield "## Gap causes"
    yield ""
    rows = ((f"`{cause.value}`", _GAP_CAUSES[cause]) for cause in GapCause)
    yield from _table(("cause", "what made the token late"), rows)


def _ends() -> Iterable[str]:
    yield "## Outcomes"
    yield ""
    yield from _table(("outcome", "meaning"), ((f"`{o.value}`", _OUTCOMES[o]) for o in Outcome))
    yield (
        "A request whose end was overwritten in its ring before anybody read it has no outcome: it "
        "is shown as `outcome unknown`, with `no_end_recorded` as its reason, and counts as "
        "incomplete."
    )
    yield ""


def _mark(mark: Mark) -> str:
    return mark.name.lower()


def _roles(roles: frozenset[Role]) -> str:
    if roles == frozenset(Role):
        return "any"
    return ", ".join(role.value for role in Role if role in roles)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join(['---'] * len(header))}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def main(arguments: Sequence[str] | None = None, *, path: Path = PAGE) -> int:
    """Write or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pdtrace.glossary", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    wanted = page()
    if parser.parse_args(arguments).check:
        current = path.read_text(encoding="utf-8") if path.exists() else ""
        if current != wanted:
            print(f"{path} is out of date: run python -m pdtrace.glossary", file=sys.stderr)
            return 1
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
