"""Whole messages that nobody of ours would send, among those of a running server: requests for
impossible things, names of others, pages that do not exist, ends of what others began.

Whoever can write to an inbox belongs to the server, so a message may end the request that it names;
what it says is not proof against one that is right in all. But nothing raises, hangs or stays, no
pool is damaged, and what a client gets is right or an error.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from server.config import COLOCATED
from server.wire.messages import WireError, decode
from tests.support.hostile_messages import hostile_bodies, with_handoffs
from tests.support.scheduler_bus import MODEL, PAGE
from tests.support.whole_server import GATEWAY, TRANSFER, WholeServer, scarce_settings
from tests.support.wire_shapes import frame_of

EXAMPLES = int(os.environ.get("PDTRACE_MODEL_EXAMPLES", "40"))
"""The same variable as of the model test searches longer."""
pytestmark = pytest.mark.timeout(0 if "PDTRACE_MODEL_EXAMPLES" in os.environ else 900)
SHAPES = {
    "pd": scarce_settings(),
    "pd, early": scarce_settings(first_token="prefill"),
    "colocated": scarce_settings(mode=COLOCATED, workers=2),
}
LONG_S = 60.0
"""Longer than all deadlines that may follow each other, twice."""
MESSAGES = hostile_bodies(
    endpoints=(GATEWAY, *("prefill-0", "prefill-1", "decode-0", "decode-1", "worker-0"), TRANSFER),
    layout=MODEL.layout(PAGE),
    fingerprint=MODEL.info.fingerprint,
)


@dataclass(frozen=True, slots=True)
class Step:
    """A client asks (a prompt's length), a message comes, or time passes."""

    ask: int = 0
    body: Any = None
    to: int = 0
    turns: int = 0


STEPS = st.lists(
    st.one_of(
        st.builds(Step, ask=st.sampled_from([1, 4, 5, 13])),
        st.builds(Step, body=MESSAGES, to=st.integers(0, 4)),
        st.builds(Step, body=MESSAGES, to=st.integers(0, 4)),
        st.builds(Step, body=MESSAGES, to=st.integers(0, 4)),
        st.builds(Step, turns=st.integers(1, 6)),
    ),
    min_size=5,
    max_size=40,
)


class Raised(logging.Handler):
    """What was raised and caught, for it would have stopped a loop."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self.said.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def in_flight(server: WholeServer) -> list[str]:
    return sorted({leg.handoff_id for w in server.schedulers().values() for leg in w.legs})


def send(server: WholeServer, step: Step) -> bool:
    """Whether it is a message at all: types check some of what they hold."""
    body = with_handoffs(step.body, in_flight(server))
    try:
        message = decode(frame_of(body))
    except WireError:
        return False
    receivers = [GATEWAY, *server.workers]
    receiver = receivers[step.to % len(receivers)]
    server.post.put(("a stranger", receiver), message)
    return True


@pytest.mark.parametrize("shape", sorted(SHAPES))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="PDTRACE_MODEL_EXAMPLES" not in os.environ,
    phases=[Phase.generate],  # to make an example smaller takes minutes; add Phase.shrink by hand
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(steps=STEPS)
def test_whatever_a_message_says_nothing_breaks_and_nothing_stays(
    shape: str, steps: list[Step]
) -> None:
    directory = Path(tempfile.mkdtemp(prefix="pdtrace-hostile-"))
    server = WholeServer(directory, SHAPES[shape])
    raised = Raised()
    logging.getLogger().addHandler(raised)
    try:
        for step in steps:
            if step.ask:
                prompt = [(step.ask + 7 * i) % 200 for i in range(step.ask)]
                server.ask(prompt, 6, stream=step.ask % 2 == 0)
            elif step.body is not None:
                send(server, step)
            for _ in range(step.turns):
                server.turn()
            server.check()
        server.run(until=lambda: not server.what_is_open(), limit_s=LONG_S, turn_ms=50.0)
        server.check()
        probe = server.ask([9, 8, 7, 6, 5], 6, stream=True)
        server.run(until=lambda: probe.is_over, limit_s=20.0)
        assert (probe.status, probe.text) == (200, probe.right_text)
        server.run(until=lambda: not server.what_is_open(), limit_s=LONG_S, turn_ms=50.0)
        assert raised.said == []
    finally:
        logging.getLogger().removeHandler(raised)
        server.close()
        shutil.rmtree(directory)
