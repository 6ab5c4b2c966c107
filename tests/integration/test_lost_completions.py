"""A copy whose end is not heard of, or that does not begin: a request ends in its time, and the
trace says where it stood."""

from __future__ import annotations

import pytest

from pdtrace import semconv as a
from server.injection.fault import Drop, Place, Raise
from tests.support.completions import Ask, ask
from tests.support.injection import inject, injected, wait_injected
from tests.support.recorded import spans_of
from tests.support.server import RunningServer

pytestmark = pytest.mark.server

ENDED = (a.OUTCOME, a.OUTCOME_REASON, a.OUTCOME_BY, a.OUTCOME_STAGE)


@pytest.mark.case("XFER-01")
def test_done_that_neither_side_hears_of_ends_at_the_deadline(
    fake_pd_server: RunningServer,
) -> None:
    """One lost on the way to either side alone is made good: `test_server_transfer`."""
    faults = [Drop(at=at, message="CopyDone") for at in ("prefill-0", "decode-0")]
    inject(fake_pd_server, *faults)
    answer = ask(fake_pd_server, Ask(prompt="a done is lost", request_id="lost-done"))
    for fault in faults:
        wait_injected(fake_pd_server, fault, at=fault.at)
    assert answer.status == 504
    assert answer.body["error"]["code"] == "deadline_exceeded"
    assert "transfer took longer than allowed" in answer.body["error"]["message"]
    root, *spans = spans_of(fake_pd_server, "lost-done")
    # The bytes had landed; nobody noticed. The transfer itself was as short as ever.
    assert [root.attributes[attr.key] for attr in ENDED] == [
        *("timed_out", "deadline_exceeded", "prefill-0", "hop.notice"),
    ]
    took_ns = {span.name: span.end_ns - span.start_ns for span in spans}
    assert took_ns["hop.notice"] > 0.9 * (root.end_ns - root.start_ns)
    lost = {span.name for span in spans if span.attributes.get(a.OUTCOME.key) == "lost"}
    assert lost == set()


@pytest.mark.case("XFER-01")
def test_part_that_cannot_be_started_fails_its_request_at_once(
    fake_pd_server: RunningServer,
) -> None:
    """Part 3 of 8: those behind it do not wait for it."""
    fault = Raise(at="transfer-0", place=Place.COPY, nth=3)
    before = injected(fake_pd_server)["raise.copy"]
    inject(fake_pd_server, fault)
    prompt = "a part does not start; " + "x" * 2000
    answer = ask(fake_pd_server, Ask(prompt=prompt, request_id="part-3"))
    wait_injected(fake_pd_server, fault, before + 1)
    assert answer.status == 502
    assert answer.body["error"]["code"] == "internal"
    root, *spans = spans_of(fake_pd_server, "part-3")
    assert root.attributes[a.OUTCOME.key] == "failed"
    assert root.attributes[a.OUTCOME_REASON.key] == "internal"
    copies = [span for span in spans if span.name == "transfer.copy"]
    failed = [span for span in copies if span.attributes.get(a.OUTCOME.key) == "failed"]
    assert [span.attributes[a.OUTCOME_REASON.key] for span in failed] == ["InjectedError"]
    assert len(copies) >= 3
    assert root.end_ns - root.start_ns < 20_000_000_000
