"""W3C trace context in and out of HTTP headers, and the identity that travels between processes.

`RequestContext` is made once, by the gateway, and embedded in every wire message of the request.
Knows nothing of rings or spans.

Header rules (https://www.w3.org/TR/trace-context/): names match in any case; a bad `traceparent`
means a new trace and drops `tracestate`; a bad `tracestate` is dropped alone; only bit 0 of the
flags is read, because SDKs also set bit 1 ("random trace id").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from pdtrace.ids import RANDOM_IDS, Ids
from pdtrace.stages import Mode

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

MAX_TRACESTATE_MEMBERS = 32
MAX_TRACESTATE_CHARS = 512
LONG_MEMBER_CHARS = 128  # members above this size go first when tracestate must shrink

_SAMPLED_BIT = 0x01
_TRACEPARENT_PATTERN = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<rest>-.*)?"
)
_SIMPLE_KEY = r"[a-z0-9][_0-9a-z\-*/]{0,255}"
_TENANT_KEY = r"[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13}"
_MEMBER_PATTERN = re.compile(
    rf"(?P<key>{_TENANT_KEY}|{_SIMPLE_KEY})"
    r"=(?P<value>[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)

Headers = Mapping[str, str] | Iterable[tuple[str, str] | tuple[bytes, bytes]]
"""Any mapping (plain dict, Starlette `Headers`) or raw pairs as ASGI gives them."""


@dataclass(frozen=True, slots=True)
class RemoteParent:
    """The caller's span, as its headers named it.

    trace_id  32 lowercase hex digits
    span_id   16 lowercase hex digits
    """

    trace_id: str
    span_id: str
    sampled: bool
    tracestate: str = ""


class RequestContext(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True
):
    """Identity of one attempt of a request, the same in every process that works on it.

    request_id              caller's id, any text; a ring keeps its first 256 UTF-8 bytes
    trace_id                32 lowercase hex digits
    root_span_id            16 hex digits: the gateway's request span
    attempt_span_id         16 hex digits: parent of this attempt's stages
    client_parent_span_id   16 hex digits: the caller's span, None when the trace begins here
    sampled                 the caller's decision, or True; the agent's sampler has the last word
    tracestate              as received, "" when absent
    attempt                 from 1
    handoff_id              of this attempt
    mode                    how the request crosses the processes

    Encoded as an array: add fields at the end only, with a default.
    """

    request_id: str
    trace_id: str
    root_span_id: str
    attempt_span_id: str
    client_parent_span_id: str | None = None
    sampled: bool = True
    tracestate: str = ""
    attempt: int = 1
    handoff_id: str = ""
    mode: Mode = Mode.PD

    @classmethod
    def create(
        cls,
        *,
        request_id: str | None = None,
        parent: RemoteParent | None = None,
        mode: Mode = Mode.PD,
        ids: Ids = RANDOM_IDS,
    ) -> RequestContext:
        """Context of a first attempt: continues `parent`'s trace, or begins one.

        Pass `parent=extract(headers)` when callers are trusted to set the trace, else None.
        """
        return cls(
            request_id=ids.request_id() if request_id is None else request_id,
            trace_id=ids.trace_id() if parent is None else parent.trace_id,
            root_span_id=ids.span_id(),
            attempt_span_id=ids.span_id(),
            client_parent_span_id=None if parent is None else parent.span_id,
            sampled=True if parent is None else parent.sampled,
            tracestate="" if parent is None else parent.tracestate,
            handoff_id=ids.handoff_id(),
            mode=mode,
        )

    def next_attempt(self, *, ids: Ids = RANDOM_IDS) -> RequestContext:
        """Same request and root span; the next attempt number, its own span and handoff ids."""
        return msgspec.structs.replace(
            self,
            attempt=self.attempt + 1,
            attempt_span_id=ids.span_id(),
            handoff_id=ids.handoff_id(),
        )


def parse_traceparent(value: str) -> RemoteParent | None:
    """The parent that a `traceparent` header names, or None when it is not valid."""
    match = _TRACEPARENT_PATTERN.fullmatch(value.strip(" \t"))
    if match is None:
        return None
    version = match["version"]
    # Versions above 00 may append fields, which a reader of 00 skips; ff is forbidden.
    if version == "ff" or (version == "00" and match["rest"] is not None):
        return None
    if not int(match["trace"], 16) or not int(match["span"], 16):
        return None
    return RemoteParent(
        trace_id=match["trace"],
        span_id=match["span"],
        sampled=bool(int(match["flags"], 16) & _SAMPLED_BIT),
    )


def format_traceparent(trace_id: str, span_id: str, *, sampled: bool) -> str:
    """Version 00 `traceparent` for 32 and 16 lowercase hex digits."""
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"


def parse_tracestate(value: str) -> str:
    """A normalised `tracestate`, or "" when it breaks the grammar.

    More than 32 members or a repeated key drop it whole; above 512 characters it loses members over
    128 characters first and then the rightmost (oldest) ones.
    """
    members = [member for raw in value.split(",") if (member := raw.strip(" \t"))]
    if len(members) > MAX_TRACESTATE_MEMBERS:
        return ""
    keys: set[str] = set()
    for member in members:
        match = _MEMBER_PATTERN.fullmatch(member)
        if match is None or match["key"] in keys:
            return ""
        keys.add(match["key"])
    if len(",".join(members)) > MAX_TRACESTATE_CHARS:
        members = [member for member in members if len(member) <= LONG_MEMBER_CHARS]
    while len(",".join(members)) > MAX_TRACESTATE_CHARS:
        members.pop()
    return ",".join(members)


def extract(headers: Headers) -> RemoteParent | None:
    """The caller's span from request headers; None begins a new trace.

    Several `traceparent` headers are not valid; several `tracestate` headers are one list.
    """
    parents: list[str] = []
    states: list[str] = []
    pairs = cast("Mapping[str, str]", headers).items() if isinstance(headers, Mapping) else headers
    for raw_name, raw_value in pairs:
        name = _text(raw_name).lower()
        if name == TRACEPARENT:
            parents.append(_text(raw_value))
        elif name == TRACESTATE:
            states.append(_text(raw_value))
    if len(parents) != 1:
        return None
    parent = parse_traceparent(parents[0])
    if parent is None or not states:
        return parent
    return RemoteParent(
        trace_id=parent.trace_id,
        span_id=parent.span_id,
        sampled=parent.sampled,
        tracestate=parse_tracestate(",".join(states)),
    )


def inject(context: RequestContext) -> dict[str, str]:
    """Headers that hand `context`'s attempt to the next process or to another service."""
    headers = {
        TRACEPARENT: format_traceparent(
            context.trace_id, context.attempt_span_id, sampled=context.sampled
        )
    }
    if context.tracestate:
        headers[TRACESTATE] = context.tracestate
    return headers


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
