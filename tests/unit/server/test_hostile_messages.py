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
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdtrace.recorder import RequestContext
from server.config import COLOCATED
from server.kv.layout import KvLayout
from server.wire.messages import AnyMessage, LegStatus, Peer, PoolRef, Tokens, WireError, decode
from tests.support.scheduler_bus import MODEL, PAGE
from tests.support.whole_server import GATEWAY, WholeServer, scarce_settings
from tests.support.wire_shapes import Known, bodies, frame_of, shape_of

EXAMPLES = int(os.environ.get("PDTRACE_MODEL_EXAMPLES", "40"))
"""The same variable as of the model test searches longer."""
SHAPES = {
    "pd": scarce_settings(),
    "pd, early": scarce_settings(first_token="prefill"),
    "colocated": scarce_settings(mode=COLOCATED, workers=2),
}
LONG_S = 60.0
"""Longer than all deadlines that may follow each other, twice."""
PLACEHOLDERS = tuple(f"handoff {number}" for number in range(3))
"""Stand for handoffs that are in flight when the message is sent."""
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "transfer-0", "worker-0", GATEWAY)

text = st.text(max_size=8)
own_ids = st.sampled_from(["mine-0", "mine-1"])
ids = st.sampled_from(PLACEHOLDERS) | own_ids | text
numbers = st.sampled_from([-(2**63), -1, 0, 1, 2, 7, 10**6, 2**31, 2**63 - 1])
lives = st.sampled_from([1, 2, 9]) | text
peers = st.builds(
    lambda instance, endpoint, life: {
        "instance": instance,
        "endpoint": endpoint,
        "incarnation": f"{instance}-{life}" if isinstance(life, int) else life,
    },
    st.sampled_from(NAMES) | text,
    st.sampled_from(NAMES) | text,
    lives,
)
pages = st.lists(
    st.sampled_from([-(2**63), -1, 24, 10**6, 2**63 - 1]) | st.integers(24, 99), max_size=6
)
"""None that exists in a pool: what lies in one that does would be overwritten, as it says."""
tokens = st.lists(st.integers(0, 255) | numbers, max_size=40)
layouts = st.just(
    {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "page_size": PAGE, "dtype": "float32"}
) | shape_of(msgspec.inspect.type_info(KvLayout))
contexts = st.builds(
    lambda handoff_id, request_id, attempt: msgspec.to_builtins(
        msgspec.structs.replace(
            RequestContext.create(request_id=request_id), handoff_id=handoff_id, attempt=attempt
        )
    ),
    ids,
    ids,
    numbers,
)
KNOWN: Known = {
    "handoff_id": ids,
    "prompt_ids": tokens,
    "prompt_len": numbers,
    "max_tokens": numbers | st.integers(1, 20),
    "index": numbers,
    "num_bytes": numbers,
    "pages": pages,
    "source_pages": pages,
    "destination_pages": pages,
    "token_id": numbers,
    "faults": st.just({}) | st.dictionaries(text, numbers, max_size=2),
    "stop": st.lists(text, max_size=3),
    "fingerprint": st.just(MODEL.info.fingerprint) | text,
    "outcome": st.sampled_from(["completed", "failed", "cancelled", "lost", ""]) | text,
    "transfer_address": st.none() | st.just("127.0.0.1:1") | text,
    RequestContext: contexts,
    Peer: peers,
    PoolRef: st.builds(
        lambda owner, life: {"owner": owner, "incarnation": f"{owner}-{life}"},
        st.sampled_from(NAMES),
        lives,
    ),
    KvLayout: layouts,
    LegStatus: bodies(LegStatus, {"handoff_id": ids, "outcome": text}),
}
OF_NOBODY: Known = {**KNOWN, "handoff_id": own_ids | text}
"""Tokens with the right handoff and index are what they say they are."""
MESSAGES = st.one_of(
    [bodies(message, OF_NOBODY if message is Tokens else KNOWN) for message in get_args(AnyMessage)]
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


def resolved(value: Any, handoffs: Sequence[str]) -> Any:
    """`value` with handoffs that there are in place of those that stand for them."""
    if isinstance(value, dict):
        return {key: resolved(one, handoffs) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(one, handoffs) for one in value]
    if value in PLACEHOLDERS and handoffs:
        return handoffs[PLACEHOLDERS.index(value) % len(handoffs)]
    return value


def send(server: WholeServer, step: Step) -> bool:
    """Whether it is a message at all: types check some of what they hold."""
    body = resolved(step.body, in_flight(server))
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
    patch = pytest.MonkeyPatch()

    def patch_time(fake: Any) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("server.gateway") and getattr(module, "time", None) is time:
                patch.setattr(module, "time", fake)

    server = WholeServer(directory, SHAPES[shape], patch_time)
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
        patch.undo()
        shutil.rmtree(directory)
