"""The project's own alerts on a real server, Prometheus, Alertmanager and webhook: what holds up a
stage, kills, freezes or blinds makes the alert that is meant for it go pending, fire, reach its
receiver, and resolve.

The rules are those that are shipped, out of the same objects, with windows of seconds in place of
minutes and hours. One run is watched from its beginning to its end; each test looks at one alert.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from dashboards.build import boards
from dashboards.names import AGENT_JOB
from dashboards.rules.alerts import LEAST_BEFORE, alerts
from dashboards.rules.prometheus import rule_file
from dashboards.rules.recordings import PAIR_STAGES, STEADY_STAGES, recordings
from dashboards.rules.timing import Timing
from pdtrace import Recorder, RequestContext, RequestTrace, Role
from pdtrace.slo import Slo
from pdtrace.stages import CHAINS, STAGE_BY_NAME, Mark, Mode, Outcome, StepKind
from pdtrace.testing import SMALL_RING
from server.injection.fault import Corrupt, Damage, Fault, Freeze, Shrink
from tests.integration.conftest import FAST_FAKE
from tests.support.alert_watch import INACTIVE, AlertWatch, watched_alerts
from tests.support.injection import clear, inject
from tests.support.real_stack import (
    RealStack,
    complete,
    need_programs,
    real_stack,
    wait_for,
    webhook_receiver,
)
from tests.support.server import ROOT, RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

SLO = Slo(oldest_s=10.0)
SCRAPE_S = 5
MINUTES_AS_SECONDS = Timing(scale=1 / 60, least_s=4 * SCRAPE_S, least_hold_s=3, interval="1m")
"""Six hours are six minutes."""
DAYS_AS_MINUTES = Timing(scale=1 / 240, least_s=4 * SCRAPE_S, least_hold_s=3, interval="4m")
"""For budgets: three days are 18 minutes, so that a ticket ends 90 s after what it is about."""

CHAIN = [stage.name for stage in CHAINS[Mode.PD]]
HELD = {
    Role.GATEWAY: "gateway-0",
    Role.PREFILL: "prefill-1",
    Role.TRANSFER: "transfer-0",
    Role.DECODE: "decode-1",
}
"""Who holds up requests."""
TWINS = {"prefill-1": "prefill-0", "decode-1": "decode-0"}
HOLD_MS = 6_000
"""So long that a few of them are many times the mean of a busy machine."""
PAUSE_S = 0.2
"""Between two requests of a client: what is measured here is no throughput."""
WAVES = [CHAIN[first::3] for first in (1, 0, 2)]
"""Stages that are held up at the same time: few, so that each is a good part of the requests."""
IN_FIRST_WAVE = {
    "PDKvLeaking",
    "PDSpanMetricsMissing",
    "PDTokenGapBudgetBurnFast",
    "PDTtftBudgetBurnFast",
}
Client = tuple[str, dict[str, Any]]
"""How its requests' ids begin, and what `complete` takes beside an id."""
LEAK = Shrink(at="decode-0", pages=5)
"""Pages that belong to nobody."""
GAPS: list[Client] = [
    ("gap", {"stream": True, "max_tokens": 3, "stalls": "decode.gap=300"}) for _ in range(4)
]
BY = ("worker", "source", "destination")
"""Labels that say who is concerned."""
RECORDED, OVERFLOWING = 40, 20_000
"""Requests, and forward passes after them: more than the small ring holds."""
WAIT_S = 120.0
"""Until an alert fires. Windows are so much shorter that nothing waits for this but a failure."""


class Expected(NamedTuple):
    """An alert, and labels that it has to have."""

    name: str
    labels: dict[str, str]


def holder(stage: str) -> str:
    """Who holds requests in a stage."""
    return HELD[next(role for role in STAGE_BY_NAME[stage].roles if role in HELD)]


def alerts_of(stage: str) -> list[Expected]:
    """What a held-up stage has to raise: against its own mean where that is steady."""
    if stage not in STEADY_STAGES:
        return [Expected("PDRequestsStalling", {"stage": stage})]
    found = [Expected("PDStageStalledOnWorker", {"stage": stage, "worker": holder(stage)})]
    if stage in PAIR_STAGES:
        pair = {"stage": stage}
        if holder(stage) in {HELD[Role.PREFILL], HELD[Role.DECODE]}:
            end = "source" if holder(stage) == HELD[Role.PREFILL] else "destination"
            pair[end] = holder(stage)
        found.append(Expected("PDStageStalledOnPair", pair))
    return found


WAITS = {alert.name: alert.hold != "0s" for alert in alerts(SLO)}
STALLS = {stage: alerts_of(stage) for stage in CHAIN}
OTHERS = [
    Expected("PDTtftBudgetBurnFast", {"slo": "ttft"}),
    Expected("PDTtftBudgetBurnSlow", {"slo": "ttft"}),
    Expected("PDTokenGapBudgetBurnFast", {"slo": "token_gap"}),
    Expected("PDTokenGapBudgetBurnSlow", {"slo": "token_gap"}),
    Expected("PDErrorBudgetBurnFast", {"slo": "errors"}),
    Expected("PDErrorBudgetBurnSlow", {"slo": "errors"}),
    Expected("PDTransferFailing", {"stage": "transfer"}),
    Expected("PDOldestRequestTooOld", {"stage": "prefill.queue", "worker": "prefill-1"}),
    Expected("PDPoolsOutOfBalance", {"stage": "prefill.queue"}),
    Expected("PDProcessDown", {"worker": "decode-1"}),
    Expected("PDKvLeaking", {"worker": "decode-0"}),
    Expected("PDSpanMetricsMissing", {}),
    # Before the server was started.
    Expected("PDTelemetryAbsent", {"job": AGENT_JOB}),
    Expected("PDSpansLost", {"what": "missed"}),
    Expected("PDRequestsIncomplete", {}),
]
IN_DAMAGE = {
    "PDSpansLost",
    "PDRequestsIncomplete",
    "PDTransferFailing",
    "PDErrorBudgetBurnFast",
}
BEFORE_THE_SERVER = {"PDTelemetryAbsent"}
AGAIN_S = 30.0
"""As long as it takes an alert to fire, if something is wrong."""
MUTED = Expected("PDWorkerNotProgressing", {"worker": "decode-1"})
"""Of a worker that PDProcessDown names already."""
IN_TROUBLE = {
    "PDOldestRequestTooOld",
    "PDPoolsOutOfBalance",
    "PDProcessDown",
}


@dataclass(slots=True)
class Day:
    """A stack, a server that joined it, and what was seen of alerts.

    fired_before  alerts that fired while nothing was wrong, when it was looked for last
    stalled       stage and worker, against its own mean, in the waves
    was_muted     whether Alertmanager held MUTED back
    """

    stack: RealStack
    server: RunningServer
    watch: AlertWatch
    fired_before: set[str] = field(default_factory=set[str])
    stalled: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    was_muted: bool = False

    @property
    def agent(self) -> dict[str, str]:
        """How Prometheus names the agent."""
        url = self.server.agent_url()
        assert url is not None
        return {"job": AGENT_JOB, "instance": urlsplit(url).netloc}

    def lacks(self, wanted: Expected) -> list[str]:
        """Which steps of its life are missing."""
        return self.watch.lacks(wanted.name, wanted.labels, waits=WAITS[wanted.name])

    def is_muted(self, wanted: Expected) -> bool:
        """Whether Alertmanager has it and tells nobody, because another alert says enough."""
        return any(
            alert["status"]["inhibitedBy"]
            for alert in self.stack.get("alertmanager", "/api/v2/alerts")
            if alert["labels"]["alertname"] == wanted.name
            and wanted.labels.items() <= alert["labels"].items()
        )

    def wait_until_told(
        self, alerts: Sequence[Expected] = (), *, others: Collection[str] = ()
    ) -> None:
        """Until the webhook knows that these fire, and of OTHERS those of these names."""
        wanted = [*alerts, *(one for one in OTHERS if one.name in others)]
        until(
            lambda: all(self.watch.delivered("firing", name, **labels) for name, labels in wanted)
        )


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """Healthy traffic, a stall in every stage, and what else can go wrong; then all is well again.

    Nothing is asserted here but that there is a day: tests do."""
    need_programs()
    folder = tmp_path_factory.mktemp("alerts")
    (folder / "pdtrace.rules.yml").write_text(own_rules())
    with webhook_receiver() as webhook:
        options = ("--rules", str(folder / "pdtrace.rules.yml"), "--webhook", webhook.url)
        with (
            real_stack(folder / "stack", *options) as stack,
            running_server(
                folder / "run", *("--stack", str(stack.folder), "--allow-faults"),
                *("--prefill", "2", "--decode", "2", "--policy", "round_robin"),
                model=FAST_FAKE,
            ) as server,
            watched_alerts(stack, webhook) as watch,
        ):  # fmt: skip
            today = Day(stack, server, watch)
            healthy(today)
            blindness(today)
            damage(today)
            before = watch.begun()
            with stopped(stack.pids["jaeger"]):
                stalls(
                    today, WAVES[0], stream=True, faults=[LEAK], clients=GAPS, others=IN_FIRST_WAVE
                )
            for wave in WAVES[1:]:
                stalls(today, wave)
            today.stalled |= {
                (labels["stage"], labels["worker"])
                for labels in map(dict[str, str], watch.begun() - before)
                if labels["alertname"] == "PDStageStalledOnWorker"
            }
            trouble(today)
            everything = [one for wanted in (*STALLS.values(), OTHERS) for one in wanted]
            everything.append(Expected("PDTelemetryAbsent", today.agent))
            until(lambda: not any(map(today.lacks, everything)))
            yield today


def own_rules() -> str:
    """All of the project's rules; budgets in a shorter time than the rest."""
    shared = MINUTES_AS_SECONDS
    groups = {
        **recordings(SLO, shared),
        "pdtrace-slo": recordings(SLO, DAYS_AS_MINUTES)["pdtrace-slo"],
    }
    own = [
        burn if "BudgetBurn" in burn.name else other
        for burn, other in zip(alerts(SLO, DAYS_AS_MINUTES), alerts(SLO, shared), strict=True)
    ]
    return rule_file(groups, own, shared)


# -- what happens on that day ----------------------------------------------------------------------


def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Wait for it; if it does not come, the test of it fails later and says what was seen."""
    deadline = time.monotonic() + wait_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.25)


@contextmanager
def traffic(server: RunningServer, clients: Sequence[Client]) -> Generator[None]:
    """Clients that ask one request after the other, until leaving. What the server answers is not
    theirs to judge."""
    over = threading.Event()
    number = itertools.count()

    def ask(name: str, options: dict[str, Any]) -> None:
        while not over.wait(PAUSE_S):
            with suppress(httpx.HTTPError):
                complete(server, f"{name}-{next(number)}", **options)

    with ThreadPoolExecutor(len(clients)) as pool:
        asking = [pool.submit(ask, name, options) for name, options in clients]
        try:
            yield
        finally:
            over.set()
        for one in asking:
            one.result()


def healthy(day: Day) -> None:
    """Until each stage of each worker has a baseline, as the rule wants it."""
    window = MINUTES_AS_SECONDS.window
    counted = f'pd_stage_duration_seconds_count{{stage=~"{"|".join(CHAIN)}"}}'
    before = f"min(increase({counted}[{window('6h')}] offset {window('10m')}))"
    with traffic(day.server, [("healthy", {"stream": True})] * 4):
        wait_for(
            lambda: (day.stack.value(before) or 0) > 2 * LEAST_BEFORE, "baselines", timeout_s=WAIT_S
        )
        day.fired_before = {dict(labels)["alertname"] for labels in day.watch.begun()}
        # Where a machine has other things to do for a while, stages take longer in truth.
        for _ in range(2):
            if not day.fired_before <= BEFORE_THE_SERVER:
                day.fired_before = fires_within(day, AGAIN_S)


def fires_within(day: Day, seconds: float) -> set[str]:
    """Names of alerts that begin to fire in this time, which begins when none does."""
    until(lambda: all(life.states[-1] != "firing" for life in list(day.watch.lives.values())))
    before = day.watch.begun()
    time.sleep(seconds)
    return {dict(labels)["alertname"] for labels in day.watch.begun() - before}


def stalls(
    day: Day,
    stages: Sequence[str],
    *,
    stream: bool = False,
    faults: Sequence[Fault] = (),
    clients: Sequence[Client] = (),
    others: Collection[str] = (),
) -> None:
    """Requests are held up in each of several stages, and other things go wrong beside, until all
    that is to fire does.

    stream  answers come as streams, so that a first token can be late
    """
    armed, asking = list(faults), list(clients)
    for stage in stages:
        name, steady = f"in-{stage}", stage in STEADY_STAGES
        # A stage without a baseline is judged by how many requests it holds up: on both workers.
        at = holder(stage) if steady else holder(stage).partition("-")[0]
        armed.append(Freeze(at=at, stage=stage, ms=HOLD_MS, count=None, request=name))
        # With a twin, every other request of a client passes, and it asks twice as many.
        asking += [(name, {"stream": stream})] * (2 if at in TWINS else 4)
    inject(day.server, *armed)
    with traffic(day.server, asking):
        day.wait_until_told([one for stage in stages for one in STALLS[stage]], others=others)
        clear(day.server)


@contextmanager
def stopped(pid: int) -> Generator[None]:
    """A process that is there and does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def blindness(day: Day) -> None:
    """The agent is stopped; then once more, for so short that nobody would notice, but for a ring
    that is too small even for that. Marks of requests go with it."""
    with stopped(day.server.pid("agent")):
        day.wait_until_told([Expected("PDTelemetryAbsent", day.agent)])
    rings = day.server.run_dir / "rings"
    with (
        Recorder.open(rings, role=Role.GATEWAY, instance="http-1") as http,
        Recorder.open(
            rings, role=Role.WORKER, instance="small-0", capacity=SMALL_RING, budget=None
        ) as small,
    ):
        scraped = f'min_over_time(up{{job="{AGENT_JOB}"}}[{2 * SCRAPE_S + 1}s]) == 1'
        known = 'count(pd_process_state{instance=~"http-1|small-0",state="alive"} == 1) == 2'
        for look in (scraped, known):
            wait_for(partial(day.stack.query, look), look)
        begun = [begin(http, small, f"small-{number}") for number in range(RECORDED)]
        seen = f"sum(pd_open_requests) >= {RECORDED}"
        wait_for(partial(day.stack.query, seen), seen)
        with stopped(day.server.pid("agent")):
            for _, leg in begun:
                generate(leg)
            for _ in range(OVERFLOWING):
                small.step(StepKind.DECODE, [], tokens=1, begin_ns=1, end_ns=2)
            for request, leg in begun:
                end(request, leg)


def damage(day: Day) -> None:
    """Copies end early, so that requests fail; meanwhile the agent finds what it has missed."""
    inject(day.server, Corrupt(copy=Damage.SHORT, count=None))
    with traffic(day.server, [("damaged", {})] * 4):
        day.wait_until_told(others=IN_DAMAGE)
    clear(day.server)


def begin(http: Recorder, engine: Recorder, request_id: str) -> tuple[RequestTrace, RequestTrace]:
    """A request of an engine of one's own, as docs/recording.md shows it, until it is under way."""
    context = RequestContext.create(request_id=request_id, mode=Mode.COLOCATED)
    request, leg = http.begin(context), engine.begin(context)
    request.mark(Mark.RECEIVED, "POST", "/v1/completions", "text_completion")
    request.mark(Mark.TOKENIZED, "small", 12, 16, True, Mode.COLOCATED)
    request.mark(Mark.ADMITTED)
    request.mark(Mark.ROUTED, "small-0", "small-0")
    request.mark(Mark.DISPATCHED)
    leg.mark(Mark.RESERVE_RECEIVED)
    return request, leg


def generate(leg: RequestTrace) -> None:
    for mark in (Mark.PREFILL_STARTED, Mark.PREFILL_FINISHED, Mark.FIRST_TOKEN_COMMITTED):
        leg.mark(mark)


def end(request: RequestTrace, leg: RequestTrace) -> None:
    leg.mark(Mark.DECODE_FINISHED, 16)
    leg.end()
    request.mark(Mark.FIRST_TOKEN_SENT)
    request.mark(Mark.COMPLETED, Outcome.COMPLETED, None, None, 200, 16)
    request.end()


def trouble(day: Day) -> None:
    """A worker is stopped, and requests queue for prefill alone."""
    held = Freeze(at="prefill-1", stage="prefill.queue", ms=60_000, count=None, request="queued")
    inject(day.server, held)
    with traffic(day.server, [("queued", {})] * 30):
        with stopped(day.server.pid("decode-1")):
            day.wait_until_told(others=IN_TROUBLE)
            until(lambda: day.is_muted(MUTED))
            day.was_muted = day.is_muted(MUTED)
        clear(day.server)


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", CHAIN)
def test_stall_in_each_stage_reaches_whoever_is_told(day: Day, stage: str) -> None:
    assert {str(alert): lacks for alert in STALLS[stage] if (lacks := day.lacks(alert))} == {}


@pytest.mark.parametrize("alert", OTHERS, ids=lambda alert: alert.name)
def test_other_trouble_reaches_whoever_is_told(day: Day, alert: Expected) -> None:
    assert day.lacks(alert) == []


def test_stopped_agent_reaches_whoever_is_told(day: Day) -> None:
    assert day.lacks(Expected("PDTelemetryAbsent", day.agent)) == []


def test_worker_that_stands_still_is_one_page(day: Day) -> None:
    """PDProcessDown is told (above); that its loop stands still as well is muted, and ends."""
    assert day.was_muted
    wait_for(
        lambda: any(
            life.states[-1] == INACTIVE for life in day.watch.of(MUTED.name, **MUTED.labels)
        ),
        "it ends",
    )


@pytest.mark.parametrize("stage", [stage for stage in CHAIN if holder(stage) in TWINS])
def test_healthy_twin_of_a_worker_that_stalls_is_spared(day: Day, stage: str) -> None:
    assert (stage, TWINS[holder(stage)]) not in day.stalled


def test_nothing_fires_while_all_is_well(day: Day) -> None:
    """Before the server was there, nobody was scraped."""
    assert day.fired_before <= BEFORE_THE_SERVER


def test_whoever_is_told_can_read_it_and_gets_somewhere(day: Day) -> None:
    """Templates are filled in, and links lead to what is there, in all that was delivered."""
    messages = list(day.watch.webhook.messages)
    told = [alert for message in messages for alert in message["alerts"]]
    assert {alert["labels"]["alertname"] for alert in told} >= {alert.name for alert in OTHERS}
    drawn = boards(SLO)
    for alert in told:
        labels, annotations = alert["labels"], alert["annotations"]
        assert set(annotations) == {"summary", "description", "dashboard", "runbook_url"}
        assert labels["component"] == "pdtrace"
        for text in (*labels.values(), *annotations.values()):
            assert text.strip() == text != ""
            assert not re.search(r"\{\{|\}\}|<no value>|NaN|<nil>|%!", text), text
        about = ("job", "instance") if "TelemetryAbsent" in labels["alertname"] else BY
        for named in about:
            assert labels.get(named, "") in annotations["summary"]
        url = urlsplit(annotations["dashboard"])
        asked = {name: value for name, [value] in parse_qs(url.query, strict_parsing=True).items()}
        board = drawn[url.path.removeprefix("/d/")]
        assert int(asked.pop("viewPanel")) in {panel["id"] for panel in board["panels"]}
        assert set(asked.values()) <= set(labels.values())
        page = (ROOT / "docs" / "alerts" / Path(annotations["runbook_url"]).name).read_text()
        assert page.startswith(f"# {labels['alertname']}\n")
