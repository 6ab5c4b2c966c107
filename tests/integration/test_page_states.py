"""The pages that a running server tells of add up to its pools while requests share a prefix, and
lack just those that belong to nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdtrace.stages import Gauge
from server.injection.fault import Freeze, Shrink
from tests.integration.conftest import FAST_FAKE
from tests.support.aftermath import gauges_of, wait_idle
from tests.support.completions import Answer, Ask, ask
from tests.support.injection import clear, inject
from tests.support.page_truth import unaccounted
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.server

WAIT_S = 60.0
PAGE = 16
PREFIX_PAGES = 20
PREFIX = [33 + (11 * i + i // 7) % 90 for i in range(PREFIX_PAGES * PAGE)]
ASKING = 6
OUT_OF_USE = 9
NAME = "sharing"


@dataclass(frozen=True, slots=True)
class Served:
    """A server, who computes its prompts, and all who have a pool."""

    server: RunningServer
    prompts_at: str
    pools: tuple[str, ...]

    def gauges(self, instance: str) -> Mapping[Gauge, int]:
        return gauges_of(self.server)[instance]


@pytest.fixture(scope="module")
def pd(fake_pd_server: RunningServer) -> Served:
    return Served(fake_pd_server, "prefill-0", ("prefill-0", "decode-0"))


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    run_dir = tmp_path_factory.mktemp("page-states") / "run"
    options = ("--mode", "colocated", "--allow-faults")
    with running_server(run_dir, *options, model=FAST_FAKE) as server:
        yield Served(server, "worker-0", ("worker-0",))


def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Wait for it. Gauges are written one after the other: a look may fall in between, so what is
    to hold of several of them is looked at again before it counts as broken."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.002)


def check_sums(served: Served, *, lacking: int = 0) -> None:
    """Each pool's states and `lacking` pages where prompts are computed are the whole pool."""
    for instance in served.pools:
        expected = lacking if instance == served.prompts_at else 0
        until(
            lambda at=instance, lack=expected: unaccounted(served.gauges(at)) == lack,
            lambda at=instance: f"{at}: {served.gauges(at)}",
        )


def exposed(served: Served) -> dict[str, tuple[float, float]]:
    """By instance, what a scrape of the agent tells: all states together, and the whole pool."""
    url = served.server.agent_url()
    text = httpx.get(f"{url}/metrics", timeout=WAIT_S, trust_env=False).text
    states = dict.fromkeys(served.pools, 0.0)
    pools = dict.fromkeys(served.pools, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in {"pd_kv_pages", "pd_kv_pages_held"}:
                states[sample.labels["instance"]] += sample.value
            elif sample.name == "pd_kv_pages_capacity":
                pools[sample.labels["instance"]] = sample.value
    return {instance: (states[instance], pools[instance]) for instance in served.pools}


def sharing(number: int) -> Ask:
    own = [40 + number, *range(50, 57)]  # half a page, of which the first token is like no other's
    return Ask(prompt=[*PREFIX, *own], max_tokens=4, request_id=f"{NAME}-{number}")


@pytest.mark.parametrize("name", ["pd", "colocated"])
def test_states_add_up_to_the_pool_while_requests_share_a_prefix(
    name: str, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(name)
    server, at = served.server, served.prompts_at
    assert ask(server, Ask(prompt=PREFIX, max_tokens=1)).status == 200
    wait_idle(server)
    check_sums(served)
    inject(server, Freeze(at=at, stage="prefill.compute", ms=600_000, count=None, request=NAME))
    with ThreadPoolExecutor(ASKING) as pool:
        try:
            asked = [pool.submit(ask, server, sharing(number)) for number in range(ASKING)]
            # The prefix once, and a page for each request: nothing is cached besides.
            until(
                lambda: served.gauges(at)[Gauge.KV_PAGES_USED] == PREFIX_PAGES + ASKING,
                lambda: served.gauges(at),
            )
            check_sums(served)
            until(
                lambda: all(told == whole > 0 for told, whole in exposed(served).values()),
                lambda: exposed(served),
            )
            inject(server, Shrink(at=at, pages=OUT_OF_USE))
            check_sums(served, lacking=OUT_OF_USE)
        finally:
            clear(server)
        while not all(answer.done() for answer in asked):
            check_sums(served)
    answers: list[Answer] = [answer.result() for answer in asked]
    assert [answer.status for answer in answers] == [200] * ASKING
    usages = [answer.usage or {} for answer in answers]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [len(PREFIX)] * ASKING
    wait_idle(server)
    check_sums(served)
