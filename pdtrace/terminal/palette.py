"""One letter, one colour and one fill per stage, for terminals.

A stage's letter stands at the head of its bar and in the table beside it; the fill tells work from
waits from hops without colour. Derived order and kinds come from `pdtrace.stages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pdtrace.analysis.timeline import UNEXPLAINED
from pdtrace.stages import STAGE_BY_NAME, Kind

LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "gateway.ingest": "I",
        "gateway.queue": "W",
        "gateway.route": "R",
        "gateway.dispatch": "D",
        "hop.dispatch": "d",
        "decode.reserve": "K",
        "hop.publish": "p",
        "prefill.queue": "Q",
        "prefill.compute": "P",
        "transfer": "T",
        "hop.notice": "n",
        "decode.queue": "B",
        "decode.first": "F",
        "hop.token": "t",
        "decode.generate": "G",
        "gateway.finish": "E",
        "prefill.bootstrap": "b",
        "prefill.chunk": "c",
        "prefill.hold": "H",
        "transfer.queue": "q",
        "transfer.copy": "C",
        "decode.preempted": "X",
        "decode.gap": "Z",
        UNEXPLAINED: "?",
    }
)
"""K for KV pages, W for the gateway's wait, B for the batch, E for the end, Z for a pause."""

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        # gateway: blues; prefill: greens; transfer: violets; decode: warm; pauses: reds
        "gateway.ingest": "#5fafff",
        "gateway.queue": "#87afd7",
        "gateway.route": "#5f87ff",
        "gateway.dispatch": "#005fff",
        "hop.dispatch": "#00afd7",
        "decode.reserve": "#d7af00",
        "hop.publish": "#5fd7af",
        "prefill.queue": "#87d787",
        "prefill.compute": "#00af5f",
        "transfer": "#af5fd7",
        "hop.notice": "#ffd787",
        "decode.queue": "#ffaf5f",
        "decode.first": "#ffd700",
        "hop.token": "#00d7ff",
        "decode.generate": "#ff8700",
        "gateway.finish": "#5f87d7",
        "prefill.bootstrap": "#87af87",
        "prefill.chunk": "#5faf5f",
        "prefill.hold": "#5f875f",
        "transfer.queue": "#d7afff",
        "transfer.copy": "#875fff",
        "decode.preempted": "#d70000",
        "decode.gap": "#ffafaf",
        UNEXPLAINED: "#bcbcbc",
    }
)

_FILLS = {Kind.WORK: "█", Kind.WAIT: "░", Kind.HOP: "─"}
_ASCII_FILLS = {Kind.WORK: "=", Kind.WAIT: ".", Kind.HOP: "-"}


def fill_of(stage: str, *, ascii_only: bool) -> str:
    """The character that a stage's bar is drawn with, after its letter."""
    known = STAGE_BY_NAME.get(stage)
    if known is None:
        return LETTERS[UNEXPLAINED]
    return (_ASCII_FILLS if ascii_only else _FILLS)[known.kind]
