"""Addresses and answers that are none, of agents and of Jaegers: one clear line, in time."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import pytest
from typer.testing import CliRunner, Result

from pdtrace import web_answers
from pdtrace.cli import app
from pdtrace.errors import SourceError
from pdtrace.web_answers import Asked, Web
from tests.support.jaeger_doubles import jaeger_double
from tests.support.web_doubles import HOSTILE, OTHER, body, place

GIVEN_S = 60.0
"""More than any of these takes where nothing hangs."""
AGENT = ("top", "--once")
EITHER = (("why", "x"), ("check",), ("slo",))
BOTH = [AGENT, *EITHER]
NO_ADDRESS = {
    "http://": "give http://HOST:PORT",
    "https:///x": "give http://HOST:PORT",
    "://": "give http://HOST:PORT",
    "http://me:hush@": "give http://HOST:PORT",
    "ftp://me:hush@127.0.0.1/": "give http://HOST:PORT",
    "file:///etc/passwd": "give http://HOST:PORT",
    "http://me:hush@127.0.0.1:99999": "has a port that is no number from 1 to 65535",
    "http://me:hush@127.0.0.1:0": "has a port that is no number from 1 to 65535",
    "http://me:hush@127.0.0.1:-1": "has a port that is no number from 1 to 65535",
    "http://me:hush@127.0.0.1:abc": "has a port that is no number from 1 to 65535",
    "http://me:hush@[::1": "has a host that is none",
    "http://me:hush@a..b:1": "has a host that is none",
    f"http://me:hush@{'a' * 70}:1": "has a host that is none",
    "http://me:hush@℀.example:1": "has a host that is none",
    "http://me:hush@ex ample:80": "has blanks or control characters in it",
    "http://me:hu sh@127.0.0.1:1": "has blanks or control characters in it",
    "http://me:hush@127.0.0.1:1/\x01": "has blanks or control characters in it",
    "http://me:hush@127.0.0.1:1/\u00fc": "has characters in it that must be written %XX",
    "http://me:hush\udcff@127.0.0.1:1": "has characters in it that must be written %XX",
    "http://\udcff:1": "has a host that is none",
    # Passwords that are not written as an address has them.
    "http://me:hush/1@127.0.0.1:1": "in a password write / as %2F",
    "http://me:12/hush@127.0.0.1:1": "in a password write / as %2F",
    "http://me:hush?1@127.0.0.1:1": "? as %3F",
    "http://me:hush#1@127.0.0.1:1": "# as %23",
}


def invoke(arguments: Sequence[str], url: str, timeout: str = "0.3") -> Result:
    """What a command says of an address, which has to be one line, in time, and exit code 2."""
    begun = time.monotonic()
    result = CliRunner().invoke(app, [*arguments, "--timeout", timeout, "--from", url])
    assert time.monotonic() - begun < GIVEN_S
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert re.fullmatch(r"pdtrace: \S[^\n]*\n", result.stderr), result.stderr
    assert "hush" not in result.output
    assert "Traceback" not in result.output
    assert len(result.stderr) < 1_100
    return result


@pytest.mark.parametrize("arguments", BOTH, ids=" ".join)
@pytest.mark.parametrize("url", NO_ADDRESS)
def test_what_is_no_address_is_told_without_its_password(
    arguments: Sequence[str], url: str
) -> None:
    assert NO_ADDRESS[url] in invoke(arguments, url).stderr


@pytest.mark.parametrize("arguments", [AGENT, EITHER[0]], ids=["agent", "either"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_answer_is_told_in_one_line_and_in_time(
    arguments: Sequence[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_answers, "MAX_ANSWER_BYTES", 1 << 20)
    handler, said = HOSTILE[kind]
    # What ends by itself is not cut off by a machine that is slow.
    timeout = "0.3" if said == "no answer within" else "30"
    with place(handler) as (url, asked):
        result = invoke(arguments, url.replace("://", "://me:hush@"), timeout)
    assert asked
    assert re.search(said, result.stderr), result.stderr
    assert url in result.stderr
    if arguments == AGENT:
        assert said != OTHER or "answers, but not as an agent does" in result.stderr
    else:
        assert re.search("no(?: |r an |t as an )agent", result.stderr), result.stderr
        assert "Jaeger" in result.stderr


@pytest.mark.parametrize("arguments", EITHER, ids=" ".join)
def test_who_is_asked_for_is_named_where_nobody_listens(arguments: Sequence[str]) -> None:
    said = invoke(arguments, "http://me:hush@127.0.0.1:1").stderr
    assert said.startswith(
        "pdtrace: http://127.0.0.1:1: neither a Jaeger nor an agent answers there "
        "(Connection refused); see that it runs, or give another"
    )
    said = invoke(arguments, "https://me:hush@127.0.0.1:1").stderr
    assert said.startswith(
        "pdtrace: https://127.0.0.1:1: no Jaeger answers there (Connection refused); "
    )
    assert "agent" not in said


def test_what_each_was_tried_for_is_told_where_that_differs() -> None:
    with place(body(b"{}", b"HTTP/1.1 503 Busy\r\n")) as (url, _):
        said = invoke(EITHER[0], url).stderr
    assert f"{url}: no Jaeger (/api/v3/services: 503 Busy) and no agent (answers 503 Busy)" in said


def test_agent_without_a_run_directory_is_named_as_one() -> None:
    """No word of a Jaeger: it is known what answers."""
    other = {"older": False, "v3": False}
    with jaeger_double(**other, override={"/inflight": (200, b'{"at_ns": 1}')}) as agent:
        url = agent.url
        said = invoke(EITHER[0], f"{url}/inflight", "30").stderr
        assert said == (
            f"pdtrace: {url}: writes no run directory; `pdtrace top --from {url}` asks it\n"
        )
    look = b'{"at_ns": 1, "run_dir": "/nowhere/run"}'
    with jaeger_double(**other, override={"/inflight": (200, look)}) as agent:
        said = invoke(EITHER[0], agent.url.replace("http", "HTTP"), "30").stderr
        assert "writes to /nowhere/run, which is not on this host: run this there" in said


def test_agent_is_shown_without_credentials_and_gets_them() -> None:
    with place(body(b'{"at_ns": 1}')) as (url, asked):
        address = url.replace("://", "://me:hush@")
        result = CliRunner().invoke(app, ["top", "--once", "--json", "--from", address])
    assert result.exit_code == 0, result.output
    assert f'"source": "{url}"' in result.stdout
    assert "hush" not in result.output
    assert b"Authorization: Basic " in asked[0]


def test_words_of_who_answers_are_no_instructions_to_a_terminal() -> None:
    stages = ["\x1b[31mred", *"abcde"]
    requests = ",".join(
        '{"request_id":"\\u001b[2Jr","trace_id":"t","root_span_id":"s","attempt":1,"mode":"pd",'
        f'"age_s":1,"stage":"{stage.encode("unicode_escape").decode().replace("x", "u00")}"}}'
        for stage in stages
    )
    with place(body(f'{{"at_ns":1,"requests":[{requests}]}}'.encode())) as (url, _):
        result = CliRunner().invoke(app, ["top", "--once", "--from", url])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\\x1b[31mred" in result.stdout


def test_advice_is_left_out_of_a_try() -> None:
    asked = Asked(error=SourceError, give="G", late="L", refused="R")
    for advised, advice in ((asked, ": R"), (asked.plainly(), "")):
        with pytest.raises(SourceError, match=f"Connection refused{advice}$"):
            Web("http://127.0.0.1:1", advised, timeout_s=GIVEN_S).get("/x")
