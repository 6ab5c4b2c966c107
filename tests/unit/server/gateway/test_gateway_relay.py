"""Tokens to text whatever the order, and the mailbox that a request waits at."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.fake_tokenizer import FakeTokenizer
from server.gateway.mailbox import Mailbox
from server.gateway.relay import MAX_EARLY_ITEMS, OutputStream
from server.wire.messages import TokenItem


def item(
    index: int, data: bytes, finish: str | None = None, cached: int | None = None
) -> TokenItem:
    return TokenItem(
        handoff_id="h",
        index=index,
        token_ids=tuple(data),
        finish_reason=finish,
        cached_tokens=cached,
    )


@given(st.text(max_size=20), st.randoms(use_true_random=False), st.data())
def test_text_does_not_depend_on_order_cuts_or_repetition(
    text: str, shuffler: random.Random, data: st.DataObject
) -> None:
    encoded = text.encode()
    items: list[TokenItem] = []
    at = 0
    while at < len(encoded):
        size = data.draw(st.integers(1, 4))
        last = at + size >= len(encoded)
        items.append(item(at, encoded[at : at + size], "length" if last else None))
        at += size
    items = items or [item(0, b"", "length")]
    items += data.draw(st.lists(st.sampled_from(items), max_size=5))
    shuffler.shuffle(items)
    stream = OutputStream(FakeTokenizer(), ())
    assert "".join(stream.feed(entry).text for entry in items) == text
    assert stream.finish_reason == "length"
    assert stream.num_tokens == len(encoded)


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=3))
def test_stop_string_ends_text_wherever_it_lies(text: str, stop: str) -> None:
    stream = OutputStream(FakeTokenizer(), (stop,))
    output = ""
    for index, byte in enumerate(text.encode()):
        output += stream.feed(item(index, bytes([byte]))).text
    output += stream.feed(item(len(text), b"", "length")).text
    before, found, _ = text.partition(stop)
    assert output == before
    assert stream.finish_reason == ("stop" if found else "length")
    assert stream.stopped is bool(found)


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    stream = OutputStream(FakeTokenizer(), ("END",))
    assert stream.feed(item(0, b"a ENDbc", "length")).text == "a "
    assert (stream.finish_reason, stream.num_tokens) == ("stop", 5)


def test_nothing_counts_after_the_end() -> None:
    stream = OutputStream(FakeTokenizer(), ())
    stream.feed(item(0, b"a", "stop", cached=4))
    assert stream.feed(item(1, b"b")).text == ""
    assert (stream.num_tokens, stream.cached_tokens, stream.ignored) == (1, 4, 1)


def test_items_that_wait_for_their_turn_are_bounded() -> None:
    stream = OutputStream(FakeTokenizer(), ())
    for index in range(1, MAX_EARLY_ITEMS + 10):
        stream.feed(item(index, b"x"))
    assert stream.ignored == 9
    assert len(stream.feed(item(0, b"x")).text) == MAX_EARLY_ITEMS + 1


def test_mailbox_gives_everything_at_once_and_waits_for_more() -> None:
    async def scenario() -> None:
        box = Mailbox[int]()
        box.put(1)
        box.put(2)
        assert await box.take() == [1, 2]
        asyncio.get_running_loop().call_later(0.01, box.put, 3)
        assert await box.take() == [3]

    asyncio.run(scenario())


def test_interruption_ends_every_wait_and_the_first_one_counts() -> None:
    async def scenario() -> None:
        box = Mailbox[int]()
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, box.interrupt, KeyError("first"))
        with pytest.raises(KeyError, match="first"):
            await box.take()
        box.interrupt(ValueError("second"))
        box.put(1)
        for wait in (box.take(), box.pause(60)):
            with pytest.raises(KeyError):
                await wait

    asyncio.run(scenario())


def test_pause_keeps_what_arrives_meanwhile() -> None:
    async def scenario() -> None:
        box = Mailbox[int]()
        loop = asyncio.get_running_loop()
        began = loop.time()
        loop.call_later(0.01, box.put, 1)
        await box.pause(0.05)
        assert loop.time() - began >= 0.049
        assert await box.take() == [1]

    asyncio.run(scenario())
