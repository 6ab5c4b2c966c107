"""What must hold of a running server after anything that a test did to it.

Owns the list of what "recovered" means: nobody's pools are damaged, nothing is held, the next
request is served, and the recording is complete or says what it lacks. Knows nothing of what
happened before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from pdtrace.analysis.sources import read_source
from pdtrace.check import check_recording
from pdtrace.errors import PdtraceError, SourceError
from pdtrace.live.health import read_health
from pdtrace.ring.reader import RingReader
from pdtrace.spans import Trace
from pdtrace.stages import Gauge, Role
from server.engine.fake import expected_tokens
from server.fake_tokenizer import FakeTokenizer
from tests.support.completions import Ask, Served, ask
from tests.support.present import Process

WAIT_S = 60.0
EXPLAINED = frozenset({"lost", "processes"})
"""Rules of `pdtrace check` that a recording breaks by telling of a process that died."""
NAMED = "complete"
"""The rule that it breaks by telling what it lacks, such as the end of who stood still."""
PROBE = Ask(prompt="Is everybody well?", max_tokens=12, request_id="probe")
_IDLE_AT_ZERO = (Gauge.RUNNING, Gauge.WAITING, Gauge.RESERVING, Gauge.TRANSFERRING, Gauge.IN_FLIGHT)
_HELD = (Gauge.KV_PAGES_USED, Gauge.KV_PAGES_RESERVED, Gauge.HELD_PAGES, Gauge.COPY_JOBS_WAITING)
_WORKERS = frozenset({Role.PREFILL, Role.DECODE, Role.WORKER})


class Recording(Served, Protocol):
    """A server that can be asked and looked into; `RunningServer`, `OwnServer`."""

    @property
    def run_dir(self) -> Path: ...

    def present(self) -> Sequence[Process]:
        """The present process of each instance."""
        ...

    def agent_url(self) -> str | None:
        """Where the agent answers; None without one."""
        ...


def gauges_of(server: Recording) -> dict[str, Mapping[Gauge, int]]:
    """Gauges in the rings of the present processes, by instance."""
    pids = {process.instance: process.pid for process in server.present()}
    found: dict[str, Mapping[Gauge, int]] = {}
    for path in (server.run_dir / "rings").glob("*.ring"):
        try:
            with RingReader(path) as reader:
                if pids.get(reader.identity.instance) == reader.identity.pid:
                    found[reader.identity.instance] = reader.gauges()
        except (OSError, PdtraceError):  # removed, or not written yet
            continue
    return found


def expected_text(ask: Ask) -> str:
    """What an intact server with the fake model answers."""
    tokenizer = FakeTokenizer()
    prompt = tokenizer.encode(ask.prompt) if isinstance(ask.prompt, str) else list(ask.prompt)
    return tokenizer.decode(expected_tokens(prompt, ask.max_tokens))


def pages_leaked(server: Recording) -> dict[str, int]:
    """Pages that are neither free nor cached, by instance. Means a leak once nothing is in
    flight."""
    leaked: dict[str, int] = {}
    for instance, gauges in gauges_of(server).items():
        total = gauges.get(Gauge.KV_PAGES_TOTAL, 0)
        rest = total - gauges.get(Gauge.KV_PAGES_FREE, 0) - gauges.get(Gauge.KV_PAGES_CACHED, 0)
        if rest:
            leaked[instance] = rest
    return leaked


def what_is_not_idle(server: Recording) -> list[str]:
    """Every sign that something is still in flight or held; empty for a server at rest."""
    found: list[str] = []
    processes = server.present()
    found += [f"{p.instance} is {p.state}" for p in processes if p.state != "ready"]
    gauges = gauges_of(server)
    for process in processes:
        if process.role == "agent":
            continue
        values = gauges.get(process.instance)
        if values is None:
            found.append(f"{process.instance} has no ring")
            continue
        found += [
            f"{process.instance}: {gauge.name} is {values[gauge]}"
            for gauge in (*_IDLE_AT_ZERO, *_HELD)
            if values.get(gauge, 0)
        ]
        if process.role in _WORKERS and not values.get(Gauge.KV_PAGES_TOTAL, 0):
            found.append(f"{process.instance} has not told of its pool yet")
    leaked = pages_leaked(server)
    found += [f"{name}: {pages} pages neither free nor cached" for name, pages in leaked.items()]
    for name in ("pd_requests_in_flight", "pd_gateway_queue_depth"):
        if value := sum(_series(server, name).values()):
            found.append(f"gateway: {name} is {value:g}")
    return found + [f"in flight: {request_id}" for request_id in ids_in_flight(server)]


def ids_in_flight(server: Recording) -> list[str]:
    """Requests that the agent knows and that have not ended."""
    url = server.agent_url()
    if url is None:
        return []
    try:
        answer = httpx.get(f"{url}/inflight", timeout=10.0, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        return [f"(unknown: the agent does not answer: {type(error).__name__})"]
    return [str(request["request_id"]) for request in answer.json()["requests"]]


def damage(server: Recording) -> list[str]:
    """What the processes, past ones included, said of pools that are not whole."""
    found = [
        f"{path.name}: {line}"
        for path in sorted(server.run_dir.rglob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if re.search(r"not whole|not closed properly|IntegrityError", line)
    ]
    return found + [series for series in ignored(server) if "integrity" in series]


def ignored(server: Recording) -> dict[str, float]:
    """Messages that were without effect, by series: who ignored which of them, and why."""
    everybody = {
        **_series(server, "pd_messages_ignored_total"),
        **_series(server, "pd_gateway_ignored_messages_total"),
    }
    return {series: value for series, value in everybody.items() if value}


def _series(server: Recording, name: str) -> dict[str, float]:
    """Values of the gateway's series of this name; none where nobody answers."""
    try:
        with server.client(timeout_s=10.0) as client:
            lines = client.get("/metrics").text.split("\n")
    except httpx.HTTPError:
        return {f"{name} (no answer)": 1.0}
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if re.match(rf"{name}[{{ ]", line)
    }


def check_report(
    run_dir: Path, of: Callable[[Trace], bool] = lambda _: True, *, since_ns: int = 0
) -> dict[str, Any]:
    """What `pdtrace check` says of the recording so far, as far as it is of some traces.

    of         which
    since_ns   of those that began at this wall time or later
    """
    recording = read_source(run_dir)
    traces = tuple(
        trace
        for trace in recording.traces
        if min(span.start_ns for span in trace.spans) >= since_ns and of(trace)
    )
    return check_recording(replace(recording, traces=traces), [read_health(run_dir)]).document()


def unexplained(report: Mapping[str, Any], *, allowed: Collection[str] = EXPLAINED) -> list[str]:
    """What is wrong with a recording and has no cause named in it."""
    return [
        f"{rule['name']} ({rule['broken']} of {rule['checked']}): {'; '.join(rule['examples'])}"
        for rule in report["rules"]
        if rule["broken"] and rule["name"] not in allowed
    ]


def wait_idle(server: Recording, *, timeout_s: float = WAIT_S) -> None:
    """Raises AssertionError, with what is held, when the server does not come to rest."""
    deadline = time.monotonic() + timeout_s
    while rest := what_is_not_idle(server):
        assert time.monotonic() < deadline, f"not idle after {timeout_s:.0f} s: {rest}"
        time.sleep(0.1)


def assert_recovered(
    server: Recording,
    *,
    probe: Ask = PROBE,
    expected: str | None = None,
    recording: bool = True,
    since_ns: int = 0,
    timeout_s: float = WAIT_S,
) -> None:
    """The server is as if nothing had happened. Raises AssertionError with what is not so.

    probe       a request that must be served
    expected    its text; None asks the fake model
    recording   whether `assert_recorded` looks at what was recorded `since_ns`
    """
    wait_idle(server, timeout_s=timeout_s)
    answer = ask(server, probe)
    assert answer.status == 200, f"the probe was answered with {answer.status}: {answer.body}"
    assert answer.text == (expected_text(probe) if expected is None else expected)
    wait_idle(server, timeout_s=timeout_s)
    assert damage(server) == []
    if recording:
        assert_recorded(server.run_dir, since_ns=since_ns, timeout_s=timeout_s)


def assert_recorded(
    run_dir: Path,
    *,
    since_ns: int = 0,
    allowed: Collection[str] = EXPLAINED,
    timeout_s: float = WAIT_S,
) -> None:
    """What was recorded since then keeps the rules of `pdtrace check`: nothing is lacking without
    a cause, nothing was invented. The agent is given time to write it.

    allowed   rules that it may break
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            problems = unexplained(check_report(run_dir, since_ns=since_ns), allowed=allowed)
        except SourceError as error:  # nothing is there yet
            problems = [str(error)]
        if not problems:
            return
        assert time.monotonic() < deadline, problems
        time.sleep(0.5)
