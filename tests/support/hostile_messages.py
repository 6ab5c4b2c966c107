"""Hypothesis strategies for whole messages that nobody of ours would send: requests for impossible
things, names of others, pages that do not exist, ends of what others began.

Whoever can write to an inbox belongs to the server: a message that is right in all is believed. So
none of these says where a page that exists is to be written, or which tokens a request in flight
has; they may well end one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import hypothesis.strategies as st
import msgspec

from pdtrace.recorder import RequestContext
from server.kv.layout import KvLayout
from server.wire.messages import AnyMessage, Heartbeat, LegStatus, Peer, PoolRef, Tokens
from tests.support.wire_shapes import Known, bodies, shape_of

PLACEHOLDERS = tuple(f"handoff {number}" for number in range(3))
"""Stand for handoffs that are in flight when the message is sent: `with_handoffs`."""
OWN = ("mine-0", "mine-1")
"""Handoffs that these messages themselves begin, and meddle with."""
NO_PAGE = 100_000
"""No pool has so many pages."""
NOWHERE = ("ipc://", f"ipc:///{'a' * 300}", "tcp://127.0.0.1:x", "tcp://127.0.0.1:1")
"""Endpoints at which nobody can be, or is."""

_text = st.text(max_size=8)
_ids = st.sampled_from(PLACEHOLDERS) | st.sampled_from(OWN) | _text
_numbers = st.sampled_from([-(2**63), -1, 0, 1, 2, 7, 10**6, 2**31, 2**63 - 1])
_lives = st.sampled_from([1, 2, 9]) | _text
_pages = st.lists(
    st.sampled_from([-(2**63), -1, NO_PAGE, 2**63 - 1]) | st.integers(NO_PAGE, NO_PAGE + 9),
    max_size=6,
)


def _peer(instance: str, endpoint: str, life: int | str) -> dict[str, str]:
    incarnation = f"{instance}-{life}" if isinstance(life, int) else life
    return {"instance": instance, "endpoint": endpoint, "incarnation": incarnation}


def _pool(owner: str, life: int | str) -> dict[str, str]:
    return {"owner": owner, "incarnation": f"{owner}-{life}"}


def _context(handoff_id: str, request_id: str, attempt: int) -> Any:
    whole = RequestContext.create(request_id=request_id)
    return msgspec.to_builtins(
        msgspec.structs.replace(whole, handoff_id=handoff_id, attempt=attempt)
    )


def hostile_bodies(
    *, endpoints: Sequence[str], layout: KvLayout, fingerprint: str
) -> st.SearchStrategy[Any]:
    """Bodies of all message types, as builtins.

    endpoints     of the server's processes, by which they are called, too
    layout        of their pools
    fingerprint   of their model
    """
    names = st.sampled_from(sorted(endpoints)) | _text
    places = names | st.sampled_from(NOWHERE)
    known: Known = {
        "handoff_id": _ids,
        "prompt_ids": st.lists(st.integers(0, 255) | _numbers, max_size=40),
        "prompt_len": _numbers,
        "max_tokens": _numbers | st.integers(1, 20),
        "index": _numbers,
        "num_bytes": _numbers,
        "pages": _pages,
        "source_pages": _pages,
        "destination_pages": _pages,
        "token_id": _numbers,
        "faults": st.just({}) | st.dictionaries(_text, _numbers, max_size=2),
        "stop": st.lists(_text, max_size=3),
        "fingerprint": st.just(fingerprint) | _text,
        "outcome": st.sampled_from(["completed", "failed", "cancelled", "lost", ""]) | _text,
        "transfer_address": st.none() | st.just("127.0.0.1:1") | _text,
        RequestContext: st.builds(_context, _ids, _ids, _numbers),
        Peer: st.builds(_peer, names, places, _lives),
        PoolRef: st.builds(_pool, names, _lives),
        KvLayout: st.just(msgspec.to_builtins(layout))
        | shape_of(msgspec.inspect.type_info(KvLayout)),
        LegStatus: bodies(LegStatus, {"handoff_id": _ids, "outcome": _text}),
    }
    own_knowledge: Mapping[Any, Known] = {
        Tokens: {**known, "handoff_id": st.sampled_from(OWN) | _text},
        Heartbeat: {**known, Peer: st.builds(_peer, names, places, st.just(9) | _text)},
    }
    return st.one_of(
        [bodies(message, own_knowledge.get(message, known)) for message in get_args(AnyMessage)]
    )


def with_handoffs(body: Any, handoffs: Sequence[str]) -> Any:
    """`body` with handoffs that there are in place of those that stand for them."""
    if isinstance(body, dict):
        items = cast("dict[str, Any]", body).items()
        return {key: with_handoffs(one, handoffs) for key, one in items}
    if isinstance(body, list | tuple):
        return [with_handoffs(one, handoffs) for one in cast("Sequence[Any]", body)]
    if body in PLACEHOLDERS and handoffs:
        return handoffs[PLACEHOLDERS.index(body) % len(handoffs)]
    return body


def handoffs_in(body: Any) -> set[str]:
    """All handoffs that a body speaks of."""
    found: set[str] = set()
    if isinstance(body, dict):
        for key, value in cast("dict[str, Any]", body).items():
            found |= {value} if key == "handoff_id" else handoffs_in(value)
            if key == "context":  # encoded as an array
                found.add(msgspec.convert(value, RequestContext).handoff_id)
    elif isinstance(body, list | tuple):
        for one in cast("Sequence[Any]", body):
            found |= handoffs_in(one)
    return found
