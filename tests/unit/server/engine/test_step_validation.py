"""A step that cannot be right is refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest

from server.engine.base import DecodeSlot, PrefillChunk, SamplingParams
from server.engine.validation import StepLimits, check_sampling
from server.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=4, dtype="float32")
LIMITS = StepLimits(vocab_size=10, context_length=12, num_pages=6, layout=LAYOUT)
GREEDY = SamplingParams()


def chunk(**changes: Any) -> PrefillChunk:
    fields: dict[str, Any] = {
        "token_ids": [1, 2, 3],
        "start": 0,
        "pages": [0, 1],
        "sampling": None,
        **changes,
    }
    return PrefillChunk(**fields)


def slot(**changes: Any) -> DecodeSlot:
    fields: dict[str, Any] = {
        "token_id": 1,
        "position": 3,
        "pages": [0, 1],
        "sampling": GREEDY,
        **changes,
    }
    return DecodeSlot(**fields)


def test_good_steps_pass() -> None:
    LIMITS.check_prefill([chunk(), chunk(pages=[2, 3], start=4), chunk(pages=[4, 5], start=5)])
    LIMITS.check_decode([slot(), slot(pages=[0, 1], position=4), slot(pages=[2, 5, 3], position=8)])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": []}, "has no tokens"),
        ({"start": -1}, "starts at position -1"),
        ({"token_ids": [1, 10]}, "token id 10, the vocabulary has 10"),
        ({"token_ids": [-1]}, "token id -1"),
        ({"start": 6}, "has 2 pages of 4 tokens, positions up to 9 need 3"),
        ({"start": 10, "pages": [0, 1, 2, 3]}, "ends at position 13, the context length is 12"),
        ({"pages": [6]}, "page 6 is not in the pool of 6 pages"),
        ({"pages": [-1]}, "page -1 is not in the pool"),
        ({"sampling": SamplingParams(top_p=0)}, "top_p is 0"),
    ],
)
def test_bad_chunks_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LIMITS.check_prefill([chunk(pages=[4, 5]), chunk(**changes)])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_id": 10}, "token id 10"),
        ({"position": -1}, "is at position -1"),
        ({"position": 8}, "has 2 pages of 4 tokens, positions up to 9 need 3"),
        ({"position": 12, "pages": [0, 1, 2, 3]}, "the context length is 12"),
        ({"pages": [9]}, "page 9 is not in the pool"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature is -1"),
    ],
)
def test_bad_slots_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LIMITS.check_decode([slot(pages=[4, 5]), slot(**changes)])


def test_two_rows_may_share_pages_that_neither_writes() -> None:
    LIMITS.check_prefill([chunk(pages=[0, 1], start=4), chunk(pages=[0, 2], start=4)])


def test_two_rows_may_not_write_one_page() -> None:
    with pytest.raises(ValueError, match="decode slot 1 writes page 1"):
        LIMITS.check_decode([slot(position=4), slot(position=5)])
    with pytest.raises(ValueError, match="prefill chunk 1 writes page 0"):
        LIMITS.check_prefill([chunk(), chunk()])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=float("nan")),
        SamplingParams(temperature=float("inf")),
        SamplingParams(top_p=1.5),
        SamplingParams(top_p=float("nan")),
        SamplingParams(top_k=-1),
    ],
)
def test_bad_sampling_is_refused(sampling: SamplingParams) -> None:
    with pytest.raises(ValueError, match="expected"):
        check_sampling(sampling)
