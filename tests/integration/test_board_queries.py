"""Every query of every committed board, asked of the real Prometheus and Jaeger after traffic in
which requests stalled in each stage, failed, were cancelled, tried again and lost.

A query returns data at every value of its variables; it may return none only at a value at which
nothing was observed that its selectors match, as a gateway's copies of KV, and then another value
has some.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards import names, promql, queries, targets
from dashboards.boards import against_baseline
from dashboards.build import GENERATED
from dashboards.sdk import EMPTY_WHERE, EMPTY_WHILE, Json
from dashboards.targets import Target
from pdtrace.stages import CHAINS, STAGE_BY_NAME, Mode
from server.injection.fault import Corrupt, Damage
from server.stack.programs import PROMETHEUS
from server.stack.state import read_state
from tests.integration.conftest import FAST_FAKE
from tests.support.injection import clear, inject
from tests.support.real_stack import RealStack, complete, need_programs, real_stack, wait_for
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

BOARDS: dict[str, Json] = {
    path.stem: json.loads(path.read_text())
    for path in sorted((GENERATED / "boards").glob("*.json"))
}
TARGETS = {uid: list(targets.targets({uid: board})) for uid, board in BOARDS.items()}
CHAIN = [stage.name for stage in CHAINS[Mode.PD]]
ALL = "$__all"

SCRAPE_S = 1
"""Shorter than the 5 s of `collector/prometheus.yml`, so that less has to be waited for."""
BASELINE = 24
"""Requests before a verdict on one that stalls."""
HELD = 3
STALL_MS = 800
LONG_MS = 5500
"""Longer than the longest choice of "at least"."""
KEPT_MS = 20_000
IN_FLIGHT = ("gateway.queue", "prefill.queue", "transfer", "decode.generate")
"""A stage of each role, in which requests are held at the end of the time looked at."""

ROOT = queries.series(names.SPAN_CALLS, *names.ROOT)
DOMINANT = {
    names.STALLS: names.FINISHED,
    names.SPAN_CALLS: ROOT,
}
"""What counts requests by the stage that held them up → what counts all of them."""

Series = dict[str, Any]
Chosen = Mapping[str, Sequence[str]]


@dataclass(slots=True)
class Run:
    """A stack, a server, and when what was asked of it.

    windows   (metric, stage) → from the last scrape before requests stalled in that stage alone,
              to when all of them were counted
    """

    stack: RealStack
    server: RunningServer
    start_s: float
    end_s: float = 0.0
    windows: dict[tuple[str, str], tuple[float, float]] = field(
        default_factory=dict[tuple[str, str], tuple[float, float]]
    )
    answers: dict[tuple[str, bool], list[Series]] = field(
        default_factory=dict[tuple[str, bool], list[Series]]
    )
    known: dict[str, bool] = field(default_factory=dict[str, bool])

    def texts(self, uid: str, chosen: Chosen, kind: str = "prometheus") -> dict[str, str]:
        range_s = self.end_s - self.start_s
        own = targets.windows(range_s=range_s, step_s=SCRAPE_S, scrape_s=SCRAPE_S)
        return {**targets.texts(BOARDS[uid], chosen, kind=kind), **own}

    def expr(self, target: Target, chosen: Chosen) -> str:
        return target.filled(self.texts(target.board, chosen))["expr"]

    def ask(self, expr: str, *, instant: bool) -> list[Series]:
        """Series with at least one number, over the time looked at."""
        if (expr, instant) not in self.answers:
            path, when = (
                ("query", {"time": self.end_s})
                if instant
                else ("query_range", {"start": self.start_s, "end": self.end_s, "step": SCRAPE_S})
            )
            answer = self.stack.get("prometheus", f"/api/v1/{path}", query=expr, **when)
            assert not answer.get("warnings"), (expr, answer["warnings"])
            self.answers[expr, instant] = [s for s in answer["data"]["result"] if numbers(s)]
        return self.answers[expr, instant]

    def at(self, when_s: float, expr: str) -> list[Series]:
        answer = self.stack.get("prometheus", "/api/v1/query", query=expr, time=when_s)
        return answer["data"]["result"]

    def data(self, target: Target, chosen: Chosen) -> list[Series]:
        return self.ask(self.expr(target, chosen), instant=target.instant)

    def observed(self, selector: promql.Selector) -> bool:
        """Whether there ever was anything but 0."""
        matchers = (f"{label}{op}{json.dumps(text)}" for label, op, text in selector.matchers)
        text = queries.series(selector.name, *matchers)
        if text not in self.known:
            range_s = math.ceil(self.end_s - self.start_s)
            self.known[text] = bool(self.at(self.end_s, f"max_over_time({text}[{range_s}s]) > 0"))
        return self.known[text]

    def may_be_empty(self, target: Target, chosen: Chosen) -> bool:
        """Whether nothing was observed that a selector with a chosen value matches."""
        there, at_all = (
            list(promql.selectors(promql.parse(self.expr(target, one)))) for one in (chosen, {})
        )
        changed = [one for one, other in zip(there, at_all, strict=True) if one != other]
        return bool(changed) and not any(self.observed(one) for one in changed)

    def offered(self, uid: str, chosen: Chosen | None = None) -> dict[str, list[str]]:
        """Values of each variable from its own query, where something else is chosen."""
        found = dict[str, list[str]]()
        texts = self.texts(uid, chosen or {})
        for query in targets.values_queries({uid: BOARDS[uid]}):
            selector = targets.fill(query.selector, texts)
            found[query.variable] = self.stack.get(
                "prometheus", f"/api/v1/label/{query.label}/values",
                **{"match[]": selector}, start=self.start_s, end=self.end_s,
            )["data"]  # fmt: skip
        return found

    def jaeger(self, target: Target, chosen: Chosen) -> list[dict[str, Any]]:
        filled = target.filled(self.texts(target.board, chosen, "jaeger"))
        path, asked = targets.jaeger_request(filled, start_s=self.start_s, end_s=self.end_s)
        return self.stack.get("jaeger", path, **asked)["data"]


def numbers(series: Series) -> list[float]:
    points = series.get("values") or [series["value"]]
    return [number for _, text in points if math.isfinite(number := float(text))]


def uses(target: Target, variable: str) -> bool:
    return re.search(rf"\$\{{?{variable}\b", json.dumps(target.fields)) is not None


def choices(uid: str, name: str) -> list[str]:
    """Of a variable whose values stand in the board; none where it has no such variable."""
    declared = (v for v in BOARDS[uid]["templating"]["list"] if v["name"] == name)
    return [text for variable in declared for text in variable["query"].split(",")]


def says_so(target: Target) -> bool:
    """Whether the panel's description tells a reader that it may be empty."""
    panels = BOARDS[target.board]["panels"]
    [says] = [panel["description"] for panel in panels if panel["title"] == target.panel]
    return EMPTY_WHERE in says or EMPTY_WHILE in says


NOT_YET = frozenset({against_baseline.BY_WORKER, against_baseline.BY_PAIR})
"""Panels of what takes longer than in the six hours up to ten minutes ago: this run is younger.
`tests/unit/dashboards/test_board_answers.py` has their data."""


def of_prometheus(uid: str) -> list[Target]:
    asked = [target for target in TARGETS[uid] if target.kind == "prometheus"]
    return [target for target in asked if target.panel not in NOT_YET]


# -- traffic ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    need_programs()
    folder = tmp_path_factory.mktemp("boards")
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            # Less to wait for, stage after stage.
            patch.setenv("PD_SPAN_METRICS_INTERVAL", "1s")
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
            programs = stack.enter_context(real_stack(folder / "stack"))
            scrape_often(programs)
            joined = ("--stack", str(programs.folder), "--allow-faults")
            server = stack.enter_context(running_server(folder / "run", *joined, model=FAST_FAKE))
        one = Run(programs, server, time.time())
        for number in range(BASELINE):
            assert complete(server, f"usual-{number}", stream=True).status_code == 200
        go_wrong(one)
        wait_until_counted(one, served(server))
        stall_once(one)
        for stage in CHAIN:
            stall(one, stage)
        # For so long that its beginning lies between two steps of what is looked at.
        fired = f'ALERTS{{alertstate="firing"}} offset {2 * SCRAPE_S}s'
        wait_for(lambda: programs.query(fired), "an alert that fires")
        budget = '{__name__=~"pdtrace:slo_error:ratio_rate(1|6)h"}'
        wait_for(
            lambda: len(programs.query(f"count by (__name__, slo) ({budget})")) == 6 or None,
            "burnt budgets of each objective",
        )
        stack.enter_context(held(one))
        yield one


def scrape_often(stack: RealStack) -> None:
    """Tell Prometheus to look every `SCRAPE_S` seconds, in the stack's own copy of its file."""
    path = stack.folder / "prometheus.yml"
    shipped = path.read_text()
    assert "scrape_interval: 5s" in shipped
    path.write_text(shipped.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPE_S}s"))
    state = read_state(stack.folder)
    assert state is not None
    [prometheus] = [one for one in state.programs if one.name == PROMETHEUS]
    os.kill(prometheus.process.pid, signal.SIGHUP)

    def is_told() -> bool:
        config = stack.get("prometheus", "/api/v1/status/config")["data"]["yaml"]
        return f"scrape_interval: {SCRAPE_S}s" in config

    wait_for(is_told, "Prometheus reads its file anew")


def count(stack: RealStack, metric: str) -> float:
    return stack.value(f"sum({metric})") or 0.0


def served(server: RunningServer) -> float:
    """Requests that ended so far, as the gateway says itself."""
    with server.client() as client:
        text = client.get("/metrics").text
    samples = (one for family in text_string_to_metric_families(text) for one in family.samples)
    return sum(one.value for one in samples if one.name == names.GATEWAY_REQUESTS)


def wait_until_counted(run: Run, least: float) -> None:
    """The agent's metrics and span metrics have both counted so many requests."""
    for metric in DOMINANT.values():
        wait_for(
            lambda metric=metric: count(run.stack, metric) >= least, f"{metric} of {least} requests"
        )


def go_wrong(run: Run) -> None:
    """Requests that are late, tried again, left, refused, failed, and lost with their worker."""
    server = run.server
    failed = f'{names.GATEWAY_REQUESTS}{{outcome="failed"}}'
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(complete, server, "late", stalls=f"prefill.queue={LONG_MS}", stream=True)
        inject(server, Corrupt(copy=Damage.SHORT))
        assert complete(server, "retried").status_code == 200
        clear(server)
        for number in range(2):  # growth is seen from a series' second value on
            with pytest.raises(httpx.ReadTimeout):
                complete(server, f"left-{number}", stalls="decode.queue=30000", timeout_s=1.0)
            with server.client() as client:
                assert client.post("/v1/completions", json={}).status_code == 400
            inject(server, Corrupt(copy=Damage.SHORT, count=None))
            assert complete(server, f"failed-{number}").status_code >= 500
            clear(server)
            wait_for(lambda least=number + 1: count(run.stack, failed) >= least, "a failure")
        assert late.result().status_code == 200
    was_lost = f'max_over_time({names.PROCESS_STATE}{{state="lost"}}[10m]) == 1'
    for _ in range(5):
        lose_a_worker(server)
        if run.stack.query(was_lost):  # a scrape fell into the time until it was replaced
            return
    pytest.fail("no scrape saw a lost process")


def lose_a_worker(server: RunningServer) -> None:
    body = {"model": server.model, "prompt": "one two", "max_tokens": 400, "stream": True}
    headers = {"X-PD-Faults": "decode.gap=2000"}
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        pid = server.send_signal("decode-0", signal.SIGKILL)
        with contextlib.suppress(httpx.HTTPError):
            list(lines)
    server.wait_for_successor("decode-0", pid, timeout_s=120.0)
    wait_for(lambda: complete(server, "again").status_code == 200 or None, "a server that serves")


def stall_once(run: Run) -> None:
    """A request that stalls in each stage, so that its series are there before they grow."""
    missing = CHAIN
    for _ in range(5):
        least = served(run.server) + len(missing)
        with ThreadPoolExecutor(len(missing)) as pool:
            # It holds up the others, too.
            alone = [stage for stage in missing if stage == "decode.reserve"]
            for stages in (alone, [stage for stage in missing if stage not in alone]):
                asked = [
                    pool.submit(
                        complete, run.server, f"once-{stage}",
                        stalls=f"{stage}={STALL_MS}", stream=True,
                    )
                    for stage in stages
                ]  # fmt: skip
                assert all(one.result().status_code == 200 for one in asked)
        wait_until_counted(run, least)
        found = run.stack.query(f"count by ({names.SPAN_STALL_STAGE}) ({ROOT})")
        named = {one["metric"].get(names.SPAN_STALL_STAGE) for one in found}
        named |= {STAGE_BY_NAME[name].within for name in named if name}
        missing = [stage for stage in CHAIN if stage not in named]
        if not missing:
            return
    pytest.fail(f"no request stalled in {', '.join(missing)}")


def stall(run: Run, stage: str) -> None:
    """Requests that stall in this stage, and none besides. What came before has been counted."""
    stack = run.stack
    before = served(run.server)
    seen = {
        metric: float(stack.query(f"max(timestamp({metric}))")[0]["value"][1])
        for metric in DOMINANT
    }
    asked = [f"in-{stage}-{number}" for number in range(HELD)]
    with ThreadPoolExecutor(HELD) as pool:
        stalls = f"{stage}={STALL_MS}"
        waiting = [
            pool.submit(complete, run.server, one, stalls=stalls, stream=True) for one in asked
        ]
        assert [one.result().status_code for one in waiting] == [200] * HELD
    wait_until_counted(run, before + HELD)
    for metric in DOMINANT:
        run.windows[metric, stage] = (seen[metric], time.time())


@contextlib.contextmanager
def held(run: Run) -> Generator[None]:
    """Requests in flight, one for each worker, seen by Prometheus at `end_s`."""
    workers = run.stack.query(f"count by (instance) ({names.PROCESS_STATE})")
    address = httpx.URL(run.server.url)
    body = json.dumps({"model": run.server.model, "prompt": "one", "max_tokens": 4})

    def is_seen() -> bool:
        run.end_s = time.time()
        busy = run.at(run.end_s, f"count by (instance) ({names.OPEN_OLDEST_BY_WORKER})")
        return len(busy) == len(workers)

    with contextlib.ExitStack() as stack:
        for _ in range(5):
            for stage in IN_FLIGHT:
                connection = socket.create_connection((address.host, address.port), timeout=30.0)
                stack.enter_context(contextlib.closing(connection))
                fault = f"X-PD-Faults: {stage}={KEPT_MS}"
                head = ("POST /v1/completions HTTP/1.1", "Host: a", fault)
                lines = (*head, f"Content-Length: {len(body)}", "", body)
                connection.sendall("\r\n".join(lines).encode())
            kept_until_s = time.monotonic() + KEPT_MS / 1000
            while time.monotonic() < kept_until_s:
                if is_seen():
                    yield
                    return
                time.sleep(0.25)
    pytest.fail("no scrape saw a request in flight at each worker")


# -- queries of Prometheus -------------------------------------------------------------------------


@pytest.mark.parametrize("uid", BOARDS)
def test_every_query_has_data_where_all_is_chosen(run: Run, uid: str) -> None:
    every = {name: [ALL] for name in run.offered(uid)}
    empty = [t.panel for t in of_prometheus(uid) if not run.data(t, every)]
    assert empty == []


@pytest.mark.parametrize("uid", BOARDS)
def test_variables_offer_every_value(run: Run, uid: str) -> None:
    processes = run.stack.query(f"count by (role, instance) ({names.PROCESS_STATE})")
    offered = run.offered(uid)
    assert offered["model"] == [run.server.model]
    assert offered["role"] == sorted({one["metric"]["role"] for one in processes})
    assert offered["worker"] == sorted({one["metric"]["instance"] for one in processes})
    for one in processes:
        of_role = run.offered(uid, {"role": [one["metric"]["role"]]})["worker"]
        assert of_role == [one["metric"]["instance"]]


@pytest.mark.parametrize("uid", BOARDS)
def test_every_query_has_data_at_one_value_of_each_variable(run: Run, uid: str) -> None:
    values = {**run.offered(uid), "stage": choices(uid, "stage")}
    for target in of_prometheus(uid):
        for name in (name for name in values if uses(target, name)):
            assert_data(run, target, [{name: [value]} for value in values[name]])
            if name != "stage":
                assert run.data(target, {name: values[name]}), (target.panel, "all, one by one")


@pytest.mark.parametrize("uid", BOARDS)
def test_every_query_has_data_at_one_value_of_all_variables(run: Run, uid: str) -> None:
    model = run.offered(uid)["model"]
    together: list[Chosen] = [
        {"model": [a_model], "role": [role], "worker": [worker], **stage}
        for a_model, role in product(model, run.offered(uid)["role"])
        for worker in run.offered(uid, {"role": [role]})["worker"]
        for stage in ([{"stage": [one]} for one in choices(uid, "stage")] or [{}])
    ]
    for target in of_prometheus(uid):
        assert_data(run, target, together)


def assert_data(run: Run, target: Target, each: Sequence[Chosen]) -> None:
    """Data at each choice, or nothing that they could be of; and at one there are."""
    found = [bool(run.data(target, chosen)) for chosen in each]
    where = f"{target.board}: {target.panel} {target.ref}"
    assert any(found), f"{where}: no data at any of {each}"
    for chosen, has_data in zip(each, found, strict=True):
        if not has_data:
            assert run.may_be_empty(target, chosen), f"{where}: no data at {dict(chosen)}"
            assert says_so(target) or "stage" in chosen, f"{where} is empty at {dict(chosen)}"


@pytest.mark.parametrize("uid", BOARDS)
def test_queries_stand_empty_parts(run: Run, uid: str) -> None:
    """A cleared text box or choice: what does not use it has its data, the rest is no error."""
    optional = [v["name"] for v in BOARDS[uid]["templating"]["list"] if v["type"] != "datasource"]
    chosen = {name: list[str]() for name in optional}
    for target in of_prometheus(uid):
        found = run.data(target, chosen)
        assert found or any(uses(target, name) for name in optional), target.panel
    for query in targets.values_queries({uid: BOARDS[uid]}):
        assert query.variable in run.offered(uid, chosen)


@pytest.mark.parametrize("uid", BOARDS)
def test_annotations_mark_what_happened(run: Run, uid: str) -> None:
    asked = [found for found in targets.annotation_queries(BOARDS) if found[0] == uid]
    marked = {"Alerts", "Lost processes", "Starts"}
    assert {name for _, name, _ in asked} == {*marked, "Drains", "Ended processes"}
    values = run.offered(uid)
    for _, name, expr in asked:
        found = run.ask(targets.fill(expr, run.texts(uid, {})), instant=False)
        assert found or name not in marked, name
        used = [v for v in values if f"${v}" in expr]
        at_one = [
            bool(run.ask(targets.fill(expr, run.texts(uid, {v: [value]})), instant=False))
            for v in used
            for value in values[v]
        ]
        if name == "Lost processes":  # of the processes one was lost
            assert sum(at_one) == len(used)
        if name == "Starts":
            assert all(at_one)


def test_what_is_not_usual_yet_is_no_error(run: Run) -> None:
    asked = [one for found in TARGETS.values() for one in found if one.panel in NOT_YET]
    assert {one.panel for one in asked} == NOT_YET
    for target in asked:
        assert run.ask(run.expr(target, {}), instant=False) == []


def test_what_went_wrong_is_shown(run: Run) -> None:
    """Not only a line at 0."""

    def most(uid: str, panel: str, label: str) -> dict[str, float]:
        [target] = [t for t in of_prometheus(uid) if t.panel == panel]
        return {s["metric"].get(label, ""): max(numbers(s)) for s in run.data(target, {})}

    ended = most("pd-overview", "Requests by outcome", "outcome")
    assert {name for name, rate in ended.items() if rate > 0} >= {
        *("completed", "failed", "cancelled", "rejected")
    }
    assert most("pd-overview", "Errors", "")[""] > 0
    assert most("pd-overview", "Alerts firing", "")[""] >= 1
    # It was dead, and not ready while its successor was on its way.
    assert most("pd-overview", "Processes", "instance")["decode-0"] >= 4
    assert most("pd-workers", "Failed hand-overs by pair", "source")["prefill-0"] > 0
    oldest = most("pd-stages", "Oldest open request by stage and worker", "stage")
    assert set(oldest) == set(IN_FLIGHT)


@pytest.mark.parametrize("uid", BOARDS)
def test_exemplars_lead_to_traces(run: Run, uid: str) -> None:
    values = {**run.offered(uid), "stage": choices(uid, "stage")}
    for target in (t for t in of_prometheus(uid) if t.exemplar):
        led = exemplars(run, target, {})
        assert led, target.panel
        assert run.stack.client.get(f"{run.stack.urls['jaeger']}/api/traces/{led[0]}").is_success, (
            target.panel
        )
        for name in (name for name in values if uses(target, name)):
            each = [{name: [value]} for value in values[name]]
            with_data = [chosen for chosen in each if run.data(target, chosen)]
            assert [c for c in with_data if not exemplars(run, target, c)] == [], target.panel


def exemplars(run: Run, target: Target, chosen: Chosen) -> list[str]:
    """Trace ids, in the order of their time."""
    found = run.stack.get(
        "prometheus", "/api/v1/query_exemplars",
        query=run.expr(target, chosen), start=run.start_s, end=run.end_s,
    )["data"]  # fmt: skip
    each = [one for series in found for one in series["exemplars"]]
    return [e["labels"]["trace_id"] for e in sorted(each, key=lambda e: float(e["timestamp"]))]


# -- the stage that held requests up ---------------------------------------------------------------


@pytest.mark.parametrize("stage", CHAIN)
def test_dominant_stage_is_the_one_that_alone_was_stalled(run: Run, stage: str) -> None:
    """Asked once for the time of these requests, as where a point of the panel is that wide."""
    panels = [t for uid in BOARDS for t in of_prometheus(uid) if "dominant stage" in t.panel]
    seen = set[tuple[str, str]]()
    for target in panels:
        [metric] = [metric for metric in DOMINANT if metric in target.expr]
        seen.add((target.board, metric))
        from_s, to_s = run.windows[metric, stage]
        width = {"__rate_interval": f"{math.ceil((to_s - from_s) * 1000)}ms"}
        expr = target.filled({**run.texts(target.board, {}), **width})["expr"]
        answer = run.at(to_s, expr)
        [label] = re.findall(r"\{\{(\w+)\}\}", target.fields["legendFormat"])
        held = Counter({s["metric"][label]: float(s["value"][1]) for s in answer})
        (first, most), (_, next_most) = held.most_common(2)
        # A pause within a stage has its own name.
        assert stage in {first, STAGE_BY_NAME[first].within}, (target.panel, held)
        assert most > next_most, (target.panel, held)
    assert seen == {(uid, metric) for uid in ("pd-overview", "pd-stages") for metric in DOMINANT}


# -- queries of Jaeger -----------------------------------------------------------------------------


def of_jaeger(kind: str | None) -> list[Target]:
    found = [
        t
        for uid in BOARDS
        for t in TARGETS[uid]
        if t.kind == "jaeger" and t.fields.get("queryType") == kind
    ]
    assert found
    return found


def test_searches_find_what_stalled_in_each_stage(run: Run) -> None:
    stalled = run.at(run.end_s, f"sum by (stage) ({names.STALLS}) > 0")
    stages = {one["metric"]["stage"] for one in stalled}
    assert len(stages) > len(CHAIN) / 2
    for target in of_jaeger("search"):
        assert run.jaeger(target, {}), target.panel
        for stage in stages:
            found = wait_for(
                lambda target=target, stage=stage: run.jaeger(target, {"stage": [stage]}),
                f"{target.panel}: {stage}",
            )
            if uses(target, "stage"):
                tags = [tag for span in found[0]["spans"] for tag in span["tags"]]
                assert {"key": "pd.stall.stage", "type": "string", "value": stage} in tags
        for least in ["", *choices(target.board, "min_duration")]:
            chosen = {"min_duration": [least] if least else [], "stage": ["prefill.queue"]}
            assert run.jaeger(target, chosen), (target.panel, least)


def test_a_trace_is_found_by_its_id(run: Run) -> None:
    trace_id = run.stack.wait_for_trace("in-transfer-0")["traceID"]
    for target in of_jaeger(None):
        [trace] = run.jaeger(target, {"trace": [trace_id]})
        assert trace["traceID"] == trace_id
        with pytest.raises(ValueError, match="no trace id"):
            run.jaeger(target, {"trace": []})
