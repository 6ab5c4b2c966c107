"""Text to token ids and back, for the model at hand.

Owns encoding of prompts and chats; streams of output are `server.detokenize`. Needs no torch.

Control tokens in a raw prompt (`encode`) are what they say, because the caller writes the whole
prompt. In chat messages (`encode_chat`) the text of a control token is ordinary text: a user who
writes "<|im_end|>" does not end the turn, only the template's own control tokens count.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, cast

from tokenizers import Tokenizer as TokenizersModel

from server.chat_template import ChatTemplate, flatten_messages
from server.disk_cache import DiskCache
from server.engine.config import load_config, read_json
from server.engine.errors import (
    BrokenModelError,
    ChatTemplateError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from server.fake_tokenizer import FakeTokenizer
from server.gguf_metadata import load_gguf_metadata
from server.gguf_tokenizer import adds_bos, build_tokenizer
from server.models import ModelFormat, ModelSource, is_fake, locate_model

_SPACE_MARK = "\u2581"  # SentencePiece's visible space


class Tokenizer(Protocol):
    """What the gateway asks of a tokenizer.

    `encode` and `encode_chat` raise ValueError for text that is not valid Unicode (a lone
    surrogate); `encode_chat` also for malformed messages, and ChatTemplateError (a ValueError)
    when the model has no template or its template refuses them. Characters that the vocabulary
    cannot express are dropped, so a prompt that is not empty may have no ids.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with BOS where the model wants one."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Ids of the prompt that the chat template makes of `messages`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; control tokens have none, broken UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that `token_id` adds to the text; empty for control and unknown ids."""
        ...


class ModelTokenizer:
    """A Hugging Face `tokenizers` model with the chat template that belongs to it.

    serialized     content of tokenizer.json
    chat_template  Jinja source, None when the model has none
    add_bos        put `bos_token` before raw prompts (where tokenizer.json does not do so itself)
    """

    def __init__(
        self,
        serialized: str,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
    ) -> None:
        self._serialized = serialized
        self._tokenizer = _parse(serialized)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._template = (
            None
            if chat_template is None
            else ChatTemplate(chat_template, bos_token=bos_token, eos_token=eos_token)
        )
        self._bos_token_id = self._tokenizer.token_to_id(bos_token) if add_bos else None
        self._special_texts = _special_texts(self._tokenizer)
        self._token_bytes = _token_table(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        _check_unicode(text)
        token_ids = self._tokenizer.encode(text).ids
        if self._bos_token_id is not None and token_ids[:1] != [self._bos_token_id]:
            token_ids = [self._bos_token_id, *token_ids]
        return token_ids

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """See `Tokenizer.encode_chat`."""
        if self._template is None:
            raise ChatTemplateError(
                "the model has no chat template: use /v1/completions with a raw prompt"
            )
        flat = flatten_messages(messages)
        shielded, literals = self._shield(flat)
        prompt = self._template.render(shielded)
        _check_unicode(prompt)
        return self._encode_pieces(prompt, literals)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._token_bytes.get(token_id, b"")

    def _shield(
        self, messages: Sequence[Mapping[str, object]]
    ) -> tuple[list[Mapping[str, object]], dict[str, str]]:
        """Messages with each control token's text replaced by a mark; and mark → text."""
        texts = [v for message in messages for v in message.values() if isinstance(v, str)]
        present = [s for s in self._special_texts if any(s in text for text in texts)]
        if not present:
            return list(messages), {}
        # Marks must not occur in any message; they are random, so nobody can write them.
        nonce = secrets.token_hex(8)
        literals = {f"\ue000{nonce}.{index}\ue001": text for index, text in enumerate(present)}
        shielded: list[Mapping[str, object]] = []
        for message in messages:
            fields = dict(message)
            for key, value in message.items():
                if isinstance(value, str):
                    for mark, text in literals.items():
                        value = value.replace(text, mark)  # noqa: PLW2901 - one mark after another
                    fields[key] = value
            shielded.append(fields)
        return shielded, literals

    def _encode_pieces(self, prompt: str, literals: Mapping[str, str]) -> list[int]:
        """Encode the prompt; marks become the ids of their text, read as ordinary text."""
        if not literals:
            return self._tokenizer.encode(prompt, add_special_tokens=False).ids
        token_ids: list[int] = []
        for piece, is_mark in _split_at(prompt, literals):
            tokenizer = self._plain if is_mark else self._tokenizer
            text = literals[piece] if is_mark else piece
            token_ids += tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    @cached_property
    def _plain(self) -> TokenizersModel:
        """The same tokenizer, to which control tokens are ordinary text."""
        plain = _parse(self._serialized)
        plain.encode_special_tokens = True
        return plain


def load_tokenizer(model: str | None, cache: DiskCache | None = None) -> Tokenizer:
    """Tokenizer of `model` (see `server.models.locate_model`; "fake" is the byte tokenizer).

    Raises ModelNotFoundError, UnsupportedModelError or BrokenModelError.
    """
    if is_fake(model):
        return FakeTokenizer()
    cache = cache or DiskCache.default()
    source = locate_model(model)
    if source.format is ModelFormat.GGUF:
        return _from_gguf(source, cache)
    return _from_folder(source, cache)


def _from_gguf(source: ModelSource, cache: DiskCache) -> ModelTokenizer:
    meta = load_gguf_metadata(source.path, cache)
    config = load_config(source, cache)
    tokens = meta.strings("tokenizer.ggml.tokens")

    def token_text(key: str) -> str:
        token_id = meta.values.get(key)
        return tokens[token_id] if isinstance(token_id, int) and token_id < len(tokens) else ""

    template = meta.values.get("tokenizer.chat_template")
    return ModelTokenizer(
        build_tokenizer(meta).to_str(),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        chat_template=None if template is None else str(template),
        bos_token=token_text("tokenizer.ggml.bos_token_id"),
        eos_token=token_text("tokenizer.ggml.eos_token_id"),
        add_bos=adds_bos(meta),
    )


def _from_folder(source: ModelSource, cache: DiskCache) -> ModelTokenizer:
    path = source.path / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFoundError(f"no tokenizer.json in {source.path}")
    settings = read_json(source.path / "tokenizer_config.json")
    template_file = source.path / "chat_template.jinja"
    template = (
        template_file.read_text("utf-8")
        if template_file.is_file()
        else _default_template(settings.get("chat_template"))
    )
    config = load_config(source, cache)
    return ModelTokenizer(
        path.read_text("utf-8"),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        chat_template=template,
        bos_token=_token_setting(settings.get("bos_token")),
        eos_token=_token_setting(settings.get("eos_token")),
    )


def _default_template(setting: object) -> str | None:
    """The template in tokenizer_config.json: a string, or a list of named ones."""
    if isinstance(setting, str):
        return setting
    if isinstance(setting, list):
        for entry in cast("list[dict[str, Any]]", setting):
            if entry.get("name") == "default":
                return str(entry["template"])
    return None


def _token_setting(setting: object) -> str:
    """A token in tokenizer_config.json: its text, or an object with `content`."""
    if isinstance(setting, Mapping):
        return str(cast("Mapping[str, Any]", setting).get("content", ""))
    return setting if isinstance(setting, str) else ""


def _parse(serialized: str) -> TokenizersModel:
    try:
        return TokenizersModel.from_str(serialized)
    except Exception as error:  # the library raises bare Exception
        raise BrokenModelError(f"tokenizer.json cannot be read: {error}") from error


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not valid Unicode at character {error.start}") from error


def _special_texts(tokenizer: TokenizersModel) -> list[str]:
    """Texts of control tokens, longest first, so that one inside another is found last."""
    added = tokenizer.get_added_tokens_decoder().values()
    return sorted((token.content for token in added if token.special), key=len, reverse=True)


def _split_at(text: str, marks: Iterable[str]) -> list[tuple[str, bool]]:
    """`text` cut at each mark: (piece, is it a mark), empty pieces left out."""
    pieces = [(text, False)]
    for mark in marks:
        cut: list[tuple[str, bool]] = []
        for piece, is_mark in pieces:
            if is_mark:
                cut.append((piece, True))
                continue
            first, *rest = piece.split(mark)
            cut.append((first, False))
            for part in rest:
                cut += [(mark, True), (part, False)]
        pieces = cut
    return [(piece, is_mark) for piece, is_mark in pieces if piece]


def _token_table(tokenizer: TokenizersModel) -> dict[int, bytes]:
    """Bytes of every token that has text. Raises UnsupportedModelError for an unknown decoder."""
    decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
    if '"ByteLevel"' in decoder:
        to_bytes = _byte_level_bytes
    elif '"ByteFallback"' in decoder or '"Metaspace"' in decoder:
        to_bytes = _sentence_piece_bytes
    else:
        raise UnsupportedModelError(
            f"tokenizer decoder is {decoder}, expected ByteLevel, ByteFallback or Metaspace"
        )
    added = tokenizer.get_added_tokens_decoder()
    table = {
        token_id: to_bytes(token)
        for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items()
    }
    for token_id, token in added.items():
        table[token_id] = b"" if token.special else token.content.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's visible character for each byte, inverted."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()  # a token outside the alphabet stands for its own text


def _sentence_piece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE_MARK, " ").encode()
