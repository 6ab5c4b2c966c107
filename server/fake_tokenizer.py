"""The tokenizer of `--model fake`: one token per UTF-8 byte, and a fixed chat format.

It needs no model files and no third-party package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.chat_template import flatten_messages

FAKE_BOS_TOKEN_ID = 256
FAKE_EOS_TOKEN_ID = 257
FAKE_TURN_TOKEN_ID = 258  # ends a chat turn's role and its content
FAKE_VOCAB_SIZE = 260


class FakeTokenizer:
    """Bytes as token ids 0 … 255; ids above are control tokens without text."""

    @property
    def vocab_size(self) -> int:
        return FAKE_VOCAB_SIZE

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (FAKE_EOS_TOKEN_ID,)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises ValueError on a lone surrogate."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; control tokens have none."""
        return bytes(t for t in token_ids if t < FAKE_BOS_TOKEN_ID).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < FAKE_BOS_TOKEN_ID else b""

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """BOS, then each turn as role, turn mark, content, turn mark; then the assistant's role."""
        token_ids = [FAKE_BOS_TOKEN_ID]
        for message in flatten_messages(messages):
            token_ids += [*str(message["role"]).encode(), FAKE_TURN_TOKEN_ID]
            token_ids += [*str(message["content"]).encode(), FAKE_TURN_TOKEN_ID]
        return [*token_ids, *b"assistant", FAKE_TURN_TOKEN_ID]
