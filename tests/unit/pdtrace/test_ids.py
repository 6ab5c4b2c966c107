from __future__ import annotations

import os
import random
import re
from collections.abc import Callable

import pytest

from pdtrace import ids

MAKERS = (ids.new_trace_id, ids.new_span_id, ids.new_request_id, ids.new_handoff_id)


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (ids.new_trace_id, r"[0-9a-f]{32}"),
        (ids.new_span_id, r"[0-9a-f]{16}"),
        (ids.new_request_id, r"req-[0-9a-f]{24}"),
        (ids.new_handoff_id, r"ho-[0-9a-f]{16}"),
    ],
)
def test_ids_have_their_form_and_do_not_repeat(make: Callable[[], str], pattern: str):
    made = [make() for _ in range(1000)]
    assert all(re.fullmatch(pattern, one) for one in made)
    assert len(set(made)) == len(made)


def test_zero_is_drawn_again(monkeypatch: pytest.MonkeyPatch):
    draws = [bytes(8), bytes(8), b"\0\0\0\0\0\0\0\x01"]

    def scripted(num_bytes: int) -> bytes:
        assert num_bytes == 8
        return draws.pop(0)

    monkeypatch.setattr(os, "urandom", scripted)
    assert ids.new_span_id() == "0000000000000001"


def test_seeding_the_global_generator_changes_nothing():
    random.seed(42)
    first = ids.new_trace_id()
    random.seed(42)
    assert ids.new_trace_id() != first


def test_forked_children_draw_other_ids_than_their_parent_and_each_other():
    """Many processes at once, each with thousands of ids, after the parent has drawn some."""
    random.seed(7)
    num_children, draws = 24, 1500
    drawn = [ids.new_trace_id() for _ in range(draws)]
    pipes: list[tuple[int, int]] = []
    for _ in range(num_children):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read_end)
                random.seed(7)
                with os.fdopen(write_end, "w") as out:
                    out.writelines(f"{make()}\n" for make in MAKERS for _ in range(draws))
            finally:
                os._exit(0)
        os.close(write_end)
        pipes.append((pid, read_end))
    for pid, read_end in pipes:
        with os.fdopen(read_end) as inlet:
            drawn += inlet.read().splitlines()
        assert os.waitpid(pid, 0)[1] == 0
    assert len(drawn) == draws * (1 + num_children * len(MAKERS))
    assert len(set(drawn)) == len(drawn)
