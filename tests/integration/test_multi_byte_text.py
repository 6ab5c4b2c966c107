"""Characters of several bytes, over several tokens of a real model, through a whole server."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace import semconv as a
from tests.support.aftermath import assert_recovered
from tests.support.completions import Ask, ask
from tests.support.recorded import spans_of
from tests.support.server import running_server

pytestmark = pytest.mark.server

PROMPTS = {"emoji": 8 * "🎉", "cjk": 4 * "日本語、", "combining": 6 * "e\u0301"}
"""Their repetition is what the default model goes on with."""
CUT = "\ufffd"


@pytest.mark.case("API-06")
@pytest.mark.timeout(300)
def test_streamed_and_whole_texts_are_the_same_and_no_character_is_cut(tmp_path: Path) -> None:
    """The emoji takes three tokens here, a CJK character one or two: with 12 and 13 tokens at least
    one text of each ends within a character."""
    cut: set[str] = set()
    with running_server(tmp_path / "run", model=None) as server:
        for name, prompt in PROMPTS.items():
            for max_tokens in (12, 13):
                whole = ask(server, Ask(prompt=prompt, max_tokens=max_tokens))
                request_id = f"{name}-{max_tokens}"
                streamed = ask(
                    server,
                    Ask(prompt=prompt, max_tokens=max_tokens, stream=True, request_id=request_id),
                )
                assert (whole.status, streamed.status) == (200, 200)
                assert "".join(streamed.pieces) == streamed.text == whole.text
                assert not whole.text.isascii()
                assert CUT not in whole.text[:-1]  # what was begun is flushed at the end, once
                cut |= {name} if whole.text.endswith(CUT) else set()
                assert streamed.usage is not None
                assert streamed.usage["completion_tokens"] == max_tokens
                (root, *_) = spans_of(server, request_id)
                assert root.attributes[a.OUTCOME.key] == "completed"
                assert root.attributes[a.OUTPUT_TOKENS.key] == max_tokens
        assert cut >= {"emoji", "cjk"}
        probe = Ask(prompt=PROMPTS["cjk"], max_tokens=4)
        assert_recovered(server, probe=probe, expected=ask(server, probe).text)
