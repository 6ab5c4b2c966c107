"""Answers over HTTP, whole and in time; else a SourceError that says why not.

Owns the address and what of it may be shown, credentials, proxies, the time that one answer may
take from its first packet to its last, and its size. What an answer means is its caller's.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from urllib.parse import unquote, urlencode, urlsplit

from pdtrace.errors import SourceError

MAX_ANSWER_BYTES = 256 * 1024 * 1024
_MAX_REFUSAL_BYTES = 64 * 1024
_CHUNK_BYTES = 256 * 1024

_USERINFO = re.compile(r"(?<=://)[^/?#]*@")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f]")
_GIVE = "give http://HOST:PORT of a Jaeger"


def without_credentials(url: str) -> str:
    """The address as it may be shown."""
    return _USERINFO.sub("", url)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came. A refusal (status from 400) is as good as an answer here; its body may be cut."""

    status: int
    reason: str
    body: bytes


class Web:
    """A place that answers. `url`: as it may be shown, without a query.

    Raises SourceError for an address that cannot be one.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        shown = without_credentials(url)
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise SourceError(f"{shown}: {error}; {_GIVE}") from error
        if parts.scheme not in {"http", "https"} or not host or port == 0:
            raise SourceError(f"{shown}: {_GIVE}")
        if _UNPRINTABLE.search(url):
            raise SourceError(f"{shown}: has blanks or control characters in it; {_GIVE}")
        self.url = shown.partition("#")[0].partition("?")[0].rstrip("/")
        self.timeout_s = timeout_s
        self._authorization = _authorization(parts.username, parts.password)
        # No proxy knows this host's own addresses.
        proxies: dict[str, str] | None = {} if _is_loopback(host) else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        proxied = urllib.request.getproxies().get(parts.scheme)
        self._by_proxy = proxies is None and proxied and not urllib.request.proxy_bypass(host)

    def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Answer:
        """Raises SourceError: nobody answers, not in time, not whole, or too much."""
        future: Future[Answer] = Future()
        deadline = time.monotonic() + self.timeout_s
        # A socket's own timeout starts anew with each byte, and none bounds the look-up of a name.
        worker = Thread(
            target=self._fulfil, args=(future, path, parameters or {}, deadline), daemon=True
        )
        worker.start()
        address = f"{self.url}{path}"
        try:
            answer = future.result(self.timeout_s)
        except TimeoutError as error:
            raise self._silent(address) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._silent(address) from error
            raise self._unreachable(error.reason) from error
        except http.client.IncompleteRead as error:
            raise SourceError(f"{address}: its answer is cut") from error
        except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        if len(answer.body) > MAX_ANSWER_BYTES:
            raise SourceError(
                f"{address}: answers more than {MAX_ANSWER_BYTES >> 20} MiB; ask for less with "
                "--limit or a shorter time range"
            )
        return answer

    def _fulfil(
        self, future: Future[Answer], path: str, parameters: Mapping[str, str], deadline: float
    ) -> None:
        try:
            future.set_result(self._ask(path, parameters, deadline))
        except BaseException as error:
            future.set_exception(error)

    def _ask(self, path: str, parameters: Mapping[str, str], deadline: float) -> Answer:
        query = f"?{urlencode(parameters)}" if parameters else ""
        request = urllib.request.Request(f"{self.url}{path}{query}")  # noqa: S310 - http(s) it is
        if self._authorization is not None:
            # It is for this place alone, not for one that it redirects to.
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                return Answer(answer.status, answer.reason, _body(answer, deadline))
        except urllib.error.HTTPError as refusal:
            with refusal:
                try:
                    body = refusal.read(_MAX_REFUSAL_BYTES)
                except (OSError, http.client.HTTPException):
                    body = b""  # the status says enough
            return Answer(refusal.code, str(refusal.reason), body)

    def _silent(self, address: str) -> SourceError:
        return SourceError(
            f"{address}: no answer within {self.timeout_s:g} s; ask for less with --limit, or "
            "wait longer with --timeout"
        )

    def _unreachable(self, error: object) -> SourceError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"{error.verify_message}; SSL_CERT_FILE names further authorities"
        where = f" (by the proxy of {urlsplit(self.url).scheme}_proxy)" if self._by_proxy else ""
        return SourceError(f"{self.url}: {reason}{where}")


def _body(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """To the end, or to a byte more than may be. Raises IncompleteRead where the end is missing."""
    parts: list[bytes] = []
    size = 0
    while size <= MAX_ANSWER_BYTES and (part := answer.read1(_CHUNK_BYTES)):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError
    if size <= MAX_ANSWER_BYTES and answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(parts)


def _authorization(user: str | None, password: str | None) -> str | None:
    if user is None and password is None:
        return None
    pair = f"{unquote(user or '')}:{unquote(password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
