"""Answers over HTTP, whole and in time; else an error that says why not.

Owns the address and what of it may be shown, credentials, proxies, the time that one answer may
take from its first packet to its last, and its size. What an answer means is its caller's, who also
says what errors advise (`Asked`).
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
from dataclasses import dataclass, replace
from http.client import HTTPMessage
from threading import Thread
from typing import IO, Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit
from urllib.request import Request

from pdtrace.errors import PdtraceError

MAX_ANSWER_BYTES = 256 * 1024 * 1024
_MAX_REFUSAL_BYTES = 64 * 1024
_CHUNK_BYTES = 256 * 1024

_MAX_WORDS = 200

_USERINFO = re.compile(r"(?<=://)[^/?#]*@")
_TO_LAST_AT = re.compile(r"(?<=://).*@", re.DOTALL)
_BEFORE_AT = re.compile(r"\S+@")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Of bytes that are no UTF-8."""


def without_credentials(url: str) -> str:
    """The address as it may be shown."""
    return _USERINFO.sub("", url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Who is asked, for the errors: their class, and what they say to do; empty: nothing.

    give     where the address is none
    late     where no answer came in time
    large    where it is too much
    refused  where nobody listens
    other    where it is another one that answers
    proxies  whether the proxies of the environment know the way to other hosts
    """

    error: type[PdtraceError]
    give: str
    late: str = ""
    large: str = ""
    refused: str = ""
    other: str = ""
    proxies: bool = True

    def plainly(self) -> Asked:
        """For a try at an address: why it failed, and no advice."""
        return replace(self, late="", large="", refused="", other="")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came. A refusal (status from 400) is as good as an answer here; its body may be cut."""

    status: int
    reason: str
    body: bytes


class Web:
    """A place that answers. `url`: as it may be shown, without a query.

    Raises `asked.error` for an address that cannot be one.
    """

    def __init__(self, url: str, asked: Asked, *, timeout_s: float) -> None:
        self._asked = asked
        parts, host = self._parted(url)
        self.url = without_credentials(url).partition("#")[0].partition("?")[0].rstrip("/")
        self.timeout_s = timeout_s
        self._authorization = _authorization(parts.username, parts.password)
        # No proxy knows this host's own addresses.
        direct = not asked.proxies or _is_loopback(host)
        self._opener = _opener({} if direct else None)
        proxied = not direct and urllib.request.getproxies().get(parts.scheme)
        self._by_proxy = proxied and not urllib.request.proxy_bypass(host)

    def _parted(self, url: str) -> tuple[SplitResult, str]:
        """The address in its parts, and its host. What is none may have a password anywhere."""
        shown, give = _TO_LAST_AT.sub("", url), self._asked.give
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
            host.encode("idna")
        except ValueError as error:
            raise self._asked.error(f"{shown}: has a host that is none; {give}") from error
        if parts.scheme not in {"http", "https"} or not host:
            raise self._asked.error(f"{shown}: {give}")
        if _UNPRINTABLE.search(url):
            blanks = "has blanks or control characters in it"
            raise self._asked.error(f"{shown}: {blanks}; {give}")
        # A password with a / in it ends the host, and would be shown.
        if "@" in (parts.path or f"{parts.query}{parts.fragment}"):
            raise self._asked.error(
                f"{shown}: has an @ behind its host; in a password write / as %2F, ? as %3F, "
                f"# as %23; {give}"
            )
        if not parts.path.isascii() or _SURROGATE.search(url):
            raise self._asked.error(
                f"{shown}: has characters in it that must be written %XX; {give}"
            )
        try:
            if parts.port == 0:
                raise ValueError
        except ValueError as error:
            port = "has a port that is no number from 1 to 65535"
            raise self._asked.error(f"{shown}: {port}; {give}") from error
        return parts, host

    def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Answer:
        """Raises `asked.error`: nobody answers, not in time, not whole, or too much."""
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
            raise self._error(address, "its answer is cut") from error
        except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        if len(answer.body) > MAX_ANSWER_BYTES:
            much = f"answers more than {MAX_ANSWER_BYTES >> 20} MiB"
            raise self._error(address, much, self._asked.large)
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
        request = Request(f"{self.url}{path}{query}")  # noqa: S310 - http(s) it is
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
            # Of a redirection that is not followed, the reason is several lines.
            words = str(refusal.reason).partition("\n")[0].rstrip(".")
            return Answer(refusal.code, _shown_words(words), body)

    def _silent(self, address: str) -> PdtraceError:
        return self._error(address, f"no answer within {self.timeout_s:g} s", self._asked.late)

    def _unreachable(self, error: object) -> PdtraceError:
        reason = (
            _shown_words(getattr(error, "strerror", None) or str(error)) or type(error).__name__
        )
        if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
            reason = f"does not answer in HTTP ({reason})"
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"{error.verify_message}; SSL_CERT_FILE names further authorities"
        where = f" (by the proxy of {urlsplit(self.url).scheme}_proxy)" if self._by_proxy else ""
        if isinstance(error, ConnectionRefusedError) and not where and self._asked.refused:
            where = f": {self._asked.refused}"
        return self._error(self.url, f"{reason}{where}")

    def _error(self, address: str, what: str, advice: str = "") -> PdtraceError:
        return self._asked.error(f"{address}: {what}{f'; {advice}' if advice else ''}")


class _Redirections(urllib.request.HTTPRedirectHandler):
    def http_error_302(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage
    ) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError as error:
            fp.close()
            raise urllib.error.URLError("redirects to what is no address") from error

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _opener(proxies: dict[str, str] | None) -> urllib.request.OpenerDirector:
    """One that speaks HTTP alone, wherever it is redirected to. None: proxies as the environment
    says."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(proxies),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        _Redirections(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _shown_words(words: str) -> str:
    """Of an error or of who answered: no credentials of an address in it, and no book."""
    return _BEFORE_AT.sub("", words)[:_MAX_WORDS]


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
