"""Servers that several tests share, one per kind, each started once and stopped at the end; and a
look at what a test of a case has left of its server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.aftermath import assert_recovered
from tests.support.cases import OF_SERVING
from tests.support.otlp_receivers import Received, http_receiver
from tests.support.server import RunningServer, running_server

FAST_FAKE = "fake:step_ms=2,token_us=20"
EDGE_KEY = "s3cret-4711-%s-key"


@pytest.fixture(scope="session")
def fake_pd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Prefill/decode server without a model; its tokens are a hash of its KV pages."""
    run_dir = tmp_path_factory.mktemp("fake-pd") / "run"
    with running_server(run_dir, "--allow-faults", model=FAST_FAKE) as server:
        yield server


@pytest.fixture(scope="session")
def edge_collector() -> Iterator[Received]:
    """What `edge_server` exports."""
    with http_receiver() as received:
        yield received


@pytest.fixture(scope="session")
def edge_server(
    tmp_path_factory: pytest.TempPathFactory, edge_collector: Received
) -> Iterator[RunningServer]:
    """A server with an API key, for callers that mean it ill and for clients of others."""
    run_dir = tmp_path_factory.mktemp("edge") / "run"
    with ExitStack() as stack:
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # for this server's start, not for those to come
            patch.setenv("NO_PROXY", "127.0.0.1,localhost")
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", edge_collector.endpoint)
            server = stack.enter_context(
                running_server(run_dir, "--api-key", EDGE_KEY, model="fake")
            )
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """A test of a case ends with a look at the servers that it was given: are they as before?"""
    begun_ns = time.time_ns()
    yield
    if OF_SERVING.isdisjoint(case for mark in item.iter_markers("case") for case in mark.args):
        return
    for value in item.funcargs.values():
        if isinstance(value, RunningServer):
            assert_recovered(value, since_ns=begun_ns)
