"""Reads traces out of a Jaeger over HTTP, of any version: API v3 (OTLP) and the older API.

Owns what each version is asked, and errors in words; HTTP is `pdtrace.web_answers`'. What
differs: up to Jaeger 2.18 only the older API finds by attribute, after 2.20 only v3 is left;
parameters were renamed on the way. So both spellings are sent, and one API is asked where the other
is absent.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus

import msgspec

from pdtrace import semconv as a
from pdtrace.analysis.time_range import DEFAULT_SINCE_S, TraceQuery, instant_text
from pdtrace.errors import SourceError
from pdtrace.otlp import json_lines
from pdtrace.otlp.foreign import NotTraces, decode_foreign
from pdtrace.otlp.jaeger_json import decode_jaeger
from pdtrace.spans import Span
from pdtrace.stages import Role
from pdtrace.web_answers import Asked, Web

MAX_SERVICES = 20
"""Services that are searched where none is named as pdtrace names gateways."""
MAX_NAMED = 20
"""Traces in which one request id is looked for."""
PROBE_S = 5.0

_ASKED = Asked(
    error=SourceError,
    give="give http://HOST:PORT of a Jaeger, or of an agent as it prints it",
    late="ask for less with --limit, or wait longer with --timeout",
    large="ask for less with --limit or a shorter time range",
)
_TRIED = replace(_ASKED.plainly(), late="--timeout gives it longer")
_WIDE_NS = 30 * 86400 * 10**9
_AHEAD_NS = 60 * 10**9
"""Clocks of other hosts may be ahead."""
_HEX = re.compile(r"(?:0x)?[0-9a-fA-F]{1,32}")
_PAGE = re.compile(r"/(?:search|monitor|dependencies|trace/[^/]*)$")
"""Where a browser is that shows something; the API is beside it."""
_MAX_MESSAGE = 200


class _Absent(Exception):  # noqa: N818 - an answer, not an error
    """There is no such path, or nothing there."""


class _Services(msgspec.Struct):
    services: list[str] | None = None
    data: list[str] | None = None


class _Details(msgspec.Struct):
    message: str = ""


class _Oops(msgspec.Struct):
    msg: str = ""


class _Failure(msgspec.Struct):
    error: _Details | None = None
    errors: list[_Oops] | None = None


class _Found(msgspec.Struct):
    trace_id: str = msgspec.field(name="traceID")


class _Listed(msgspec.Struct):
    data: list[_Found] | None = None


class _Result(msgspec.Struct):
    result: msgspec.Raw


@dataclass(slots=True)
class FoundTraces:
    """What a Jaeger gave.

    cut  there were as many traces as were asked for: earlier ones were not looked at
    """

    traces: dict[str, list[Span]] = field(default_factory=dict[str, list[Span]])
    bad_spans: int = 0
    cut: bool = False

    def add(self, spans: Iterable[Span]) -> None:
        """Each trace counts once, as it came first: another answer may round its times."""
        known = set(self.traces)
        for span in spans:
            if span.trace_id not in known:
                self.traces.setdefault(span.trace_id, []).append(span)


def is_jaeger(url: str, *, timeout_s: float = PROBE_S) -> bool:
    """Whether a Jaeger answers there; False also where nobody does."""
    return why_no_jaeger(url, timeout_s=timeout_s) is None


def why_no_jaeger(url: str, *, timeout_s: float) -> str | None:
    """Why no Jaeger answers there; None if one does. Raises SourceError for what is no address."""
    jaeger = Jaeger(url, timeout_s=timeout_s, asked=_TRIED)
    try:
        jaeger.services()
    except SourceError as error:
        return str(error).removeprefix(jaeger.url).removeprefix(":").strip()
    return None


def read_jaeger(url: str, query: TraceQuery) -> FoundTraces:
    """The latest traces of the time range, and all that have the wanted id.

    Raises SourceError: nobody answers, no Jaeger, refused, or not one trace.
    """
    jaeger = Jaeger(url, timeout_s=query.timeout_s)
    services = jaeger.services()
    now_ns = time.time_ns()
    until_ns = now_ns + _AHEAD_NS if query.until_ns is None else query.until_ns
    since_ns = query.since_ns
    if since_ns is None:
        since_ns = until_ns - round(DEFAULT_SINCE_S * 1e9)
    if since_ns >= until_ns:
        raise SourceError(
            f"the time range ends ({instant_text(until_ns)}) before it begins "
            f"({instant_text(since_ns)})"
        )
    asked = _services_to_ask(services)
    found = FoundTraces()
    if query.wanted is not None:
        wide_ns = until_ns - _WIDE_NS if query.since_ns is None else since_ns
        for trace_id in jaeger.ids_of(query.wanted, asked, wide_ns, until_ns):
            jaeger.add_trace(trace_id, found)
    for service in asked:
        jaeger.add_latest(service, since_ns, until_ns, query.limit, found)
    if not found.traces:
        shown = ", ".join(services[:MAX_SERVICES]) or "none yet"
        raise SourceError(
            f"{jaeger.url}: no trace between {instant_text(since_ns)} and {instant_text(until_ns)} "
            f"(services: {shown}); look further back with --since"
        )
    return found


def _services_to_ask(services: list[str]) -> list[str]:
    """A request's trace is found by its gateway; where names are somebody's own, by any service."""
    gateway = Role.GATEWAY.service_name
    return [gateway] if gateway in services else services[:MAX_SERVICES]


class Jaeger:
    """One Jaeger. Every method raises SourceError."""

    def __init__(self, url: str, *, timeout_s: float, asked: Asked = _ASKED) -> None:
        self._web = Web(url, asked, timeout_s=timeout_s)
        self._web.url = self.url = _PAGE.sub("", self._web.url)

    def services(self) -> list[str]:
        for path in ("/api/v3/services", "/api/services"):
            try:
                answer = msgspec.json.decode(self._get(path), type=_Services)
            except (_Absent, msgspec.DecodeError, RecursionError):
                continue
            return sorted(answer.services or answer.data or [])
        raise SourceError(f"{self.url}: answers, but is no Jaeger (no list of services)")

    def ids_of(self, wanted: str, services: list[str], since_ns: int, until_ns: int) -> list[str]:
        """Ids of the traces in which `wanted` may be a request's, a trace's or a root span's."""
        ids = [wanted.removeprefix("0x").lower()] if _HEX.fullmatch(wanted) else []
        for service in services:
            named = self._named(wanted, service, since_ns, until_ns)
            ids += [trace_id for trace_id in named if trace_id not in ids]
        return ids

    def add_trace(self, trace_id: str, found: FoundTraces) -> None:
        """The trace with that id, if there is one."""
        try:
            self._take_otlp(self._get(f"/api/v3/traces/{trace_id}", raw_traces="true"), found)
        except _Absent:
            try:
                self._take_jaeger(self._get(f"/api/traces/{trace_id}", raw="true"), found)
            except _Absent:
                return

    def add_latest(
        self, service: str, since_ns: int, until_ns: int, limit: int, found: FoundTraces
    ) -> None:
        """The latest traces of a service that began in the time range."""
        before = len(found.traces)
        try:
            answer = self._get("/api/v3/traces", **_v3_search(service, since_ns, until_ns, limit))
            self._take_otlp(answer, found)
        except _Absent as absent:
            if absent.args:  # it says so itself: nothing was found
                return
            try:
                answer = self._get("/api/traces", **_search(service, since_ns, until_ns, limit))
            except _Absent as neither:
                if neither.args:
                    return
                raise SourceError(
                    f"{self.url}: lists services, but neither /api/v3/traces nor /api/traces "
                    "answers as a Jaeger's does"
                ) from neither
            self._take_jaeger(answer, found)
        found.cut |= len(found.traces) - before >= limit

    def _named(self, wanted: str, service: str, since_ns: int, until_ns: int) -> list[str]:
        attributes = json.dumps({a.REQUEST_ID.key: wanted})
        older = _search(service, since_ns, until_ns, MAX_NAMED)
        try:
            body = self._get("/api/traces", **older, tags=attributes)
            listed = msgspec.json.decode(body, type=_Listed)
            return [trace.trace_id for trace in listed.data or ()]
        except (_Absent, msgspec.DecodeError, RecursionError):
            found = FoundTraces()
        newer = _v3_search(service, since_ns, until_ns, MAX_NAMED)
        try:
            answer = self._get("/api/v3/traces", **newer, **{"query.attributes": attributes})
        except _Absent:
            return []
        self._take_otlp(answer, found)
        return [
            trace_id
            for trace_id, spans in found.traces.items()
            if any(span.attributes.get(a.REQUEST_ID.key) == wanted for span in spans)
        ]

    def _take_otlp(self, answer: bytes, found: FoundTraces) -> None:
        """One object, or one in each line: so Jaegers of the first v3 sent a large answer."""
        try:
            results = [msgspec.json.decode(answer, type=_Result).result]
        except (msgspec.DecodeError, RecursionError):
            try:
                lines = filter(bytes.strip, answer.splitlines())
                results = [msgspec.json.decode(line, type=_Result).result for line in lines]
            except (msgspec.DecodeError, RecursionError) as error:
                raise _Absent from error
        spans: list[Span] = []
        for result in results:
            try:
                spans += json_lines.decode_line(bytes(result))
            except (ValueError, RecursionError):
                try:
                    foreign = decode_foreign(msgspec.json.decode(result))
                except (NotTraces, msgspec.DecodeError, RecursionError) as error:
                    raise SourceError(f"{self.url}: cannot read its traces: {error}") from error
                spans += foreign.spans
                found.bad_spans += foreign.bad_spans
        found.add(spans)

    def _take_jaeger(self, answer: bytes, found: FoundTraces) -> None:
        try:
            decoded = decode_jaeger(answer)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{self.url}: cannot read its traces: {error}") from error
        found.bad_spans += decoded.bad_spans
        found.add(decoded.spans)

    def _get(self, path: str, **parameters: str) -> bytes:
        """The body of a 200. Raises _Absent, with the server's words where it is the API that says
        so, and SourceError for everything else."""
        answer = self._web.get(path, parameters)
        if answer.status != HTTPStatus.OK:
            words = _words(answer.body)
            if answer.status in {404, 405, 410}:
                raise _Absent(*filter(None, [words]))
            refusal = words or answer.reason
            raise SourceError(f"{self.url}{path}: {answer.status} {refusal}")
        if not answer.body.lstrip().startswith((b"{", b"[")):
            raise _Absent  # a page where there should be an answer
        return answer.body


def _v3_search(service: str, since_ns: int, until_ns: int, limit: int) -> Mapping[str, str]:
    """In the words of all versions; each passes over those that it does not know."""
    since, until = instant_text(since_ns), instant_text(until_ns)
    return {
        "query.service_name": service,
        "query.serviceName": service,
        "query.start_time_min": since,
        "query.startTimeMin": since,
        "query.start_time_max": until,
        "query.startTimeMax": until,
        "query.num_traces": str(limit),
        "query.search_depth": str(limit),
        "query.searchDepth": str(limit),
        "query.raw_traces": "true",
        "query.rawTraces": "true",
    }


def _search(service: str, since_ns: int, until_ns: int, limit: int) -> Mapping[str, str]:
    """In microseconds."""
    return {
        "service": service,
        "start": str(since_ns // 1_000),
        "end": str(until_ns // 1_000),
        "limit": str(limit),
        "raw": "true",
    }


def _words(body: bytes) -> str:
    """What the API says of a failure; empty if it is not the API that answers."""
    try:
        failure = msgspec.json.decode(body, type=_Failure)
    except (msgspec.DecodeError, RecursionError):
        return ""
    if failure.error is not None:
        return failure.error.message[:_MAX_MESSAGE]
    return failure.errors[0].msg[:_MAX_MESSAGE] if failure.errors else ""
