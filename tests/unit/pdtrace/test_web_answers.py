"""Answers over HTTP: whole, in time, with nothing shown that is secret."""

from __future__ import annotations

import base64
import time

import pytest
from typer.testing import CliRunner

from pdtrace.analysis.jaeger import Jaeger, is_jaeger, read_jaeger
from pdtrace.analysis.time_range import TraceQuery, instant_text, parse_instant
from pdtrace.cli import app
from pdtrace.errors import SourceError
from pdtrace.web_answers import MAX_ANSWER_BYTES, Asked, Web, without_credentials
from tests.support.jaeger_doubles import jaeger_double
from tests.support.web_doubles import OK, body, drips, endless, moved, place, says

ASKED = Asked(error=SourceError, give="give another")
GIVEN_S = 60.0
"""More than any of these tests takes where nothing hangs."""


@pytest.mark.parametrize(
    "head",
    [
        OK + b"Content-Type: application/json\r\n\r\n{",
        OK + b"X-Slow: ",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 1000000\r\n\r\n{",
    ],
)
def test_whole_answer_has_to_come_in_time(head: bytes) -> None:
    began = time.monotonic()
    with (
        place(drips(head)) as (url, _),
        pytest.raises(SourceError, match=r"/x: no answer within 0\.3 s"),
    ):
        Web(url, ASKED, timeout_s=0.3).get("/x")
    assert time.monotonic() - began < GIVEN_S


@pytest.mark.parametrize(
    "answer",
    [
        OK + b'Content-Length: 100\r\n\r\n{"services":["pd-gateway"]}',
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    ],
)
def test_answer_without_its_end_is_none(answer: bytes) -> None:
    with (
        place(says(answer)) as (url, _),
        pytest.raises(SourceError, match="/api/v3/services: its answer is cut"),
    ):
        Jaeger(url, timeout_s=GIVEN_S).services()


def test_endless_answer_is_left() -> None:
    with (
        place(endless) as (url, _),
        pytest.raises(SourceError, match=f"more than {MAX_ANSWER_BYTES >> 20} MiB"),
    ):
        Web(url, ASKED, timeout_s=GIVEN_S).get("/x")


def test_refusal_whose_words_are_cut_is_one() -> None:
    refusal = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n100\r\nabc"
    with place(says(refusal)) as (url, _):
        found = Web(url, ASKED, timeout_s=GIVEN_S).get("/x")
    assert (found.status, found.reason) == (503, "Busy")


@pytest.mark.parametrize("deep", [b'{"result":' + b"[" * 200_000, b"[" * 200_000])
def test_deep_answers_are_no_jaeger(deep: bytes) -> None:
    with jaeger_double(override={"/api/v3/services": (200, deep)}, older=False) as jaeger:
        assert not is_jaeger(jaeger.url)
    override = {"/api/v3/traces": (200, deep), "/api/traces": (200, b"<html>")}
    with (
        jaeger_double(override=override) as jaeger,
        pytest.raises(SourceError, match="lists services, but neither"),
    ):
        read_jaeger(jaeger.url, TraceQuery(since_ns=1, until_ns=2**62))


def test_credentials_go_to_the_place_alone_and_are_never_shown() -> None:
    with (
        place(body(b"{}")) as (other, elsewhere),
        place(moved(f"{other}/y".encode())) as (url, asked),
    ):
        web = Web(url.replace("://", "://me:s%40cret@"), ASKED, timeout_s=GIVEN_S)
        assert web.get("/x").body == b"{}"
    assert web.url == url
    told = base64.b64encode(b"me:s@cret")
    assert b"Authorization: Basic " + told in asked[0]
    assert b"Authorization" not in elsewhere[0]


def test_commands_do_not_show_credentials() -> None:
    runner = CliRunner()
    with jaeger_double() as jaeger:
        url = jaeger.url.replace("://", "://me:hush@")
        found = runner.invoke(app, ["slo", "--from", url, "--since", "3000d", "--json"])
        none = runner.invoke(app, ["slo", "--from", url, "--until", "2001-01-01"])
    gone = runner.invoke(app, ["slo", "--from", url])
    assert (found.exit_code, none.exit_code, gone.exit_code) == (0, 2, 2)
    assert jaeger.url in found.stdout
    assert "no trace between" in none.stderr
    assert "refused" in gone.stderr
    for one in found, none, gone:
        assert "hush" not in one.output
    assert without_credentials("http://a:b@c@[::1") == "http://[::1"


@pytest.mark.parametrize("page", ["/search?service=pd-gateway&limit=20", "/trace/332f81", "/#x"])
def test_address_of_a_page_is_that_of_its_jaeger(page: str) -> None:
    with jaeger_double() as jaeger:
        assert is_jaeger(f"{jaeger.url}{page}")


def test_proxy_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://me:hush@127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(SourceError, match=r"refused \(by the proxy of http_proxy\)"):
        Web("http://192.0.2.1", ASKED, timeout_s=GIVEN_S).get("/x")
    with jaeger_double() as jaeger:
        assert is_jaeger(jaeger.url)  # of this host: no proxy is asked


def test_times_beyond_all_clocks_are_the_last_ones() -> None:
    now_ns = time.time_ns()
    for early in ("9999999d", f"{'9' * 400}d", "0001-01-01T00:00:00+23:59"):
        assert parse_instant(early, now_ns) == 0
    late = parse_instant("9999-12-31T23:59:59-23:59", now_ns)
    assert instant_text(late).startswith("2262-04-11T")
