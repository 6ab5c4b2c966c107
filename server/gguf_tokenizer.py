"""Builds a `tokenizers` tokenizer from GGUF metadata.

Owns the table of pre-tokenizers, the part that GGUF names but does not contain; a wrong entry
silently changes every prompt, so an unknown name is an error.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from server.engine.errors import UnsupportedModelError
from server.gguf_metadata import GgufMetadata

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    # Digits come first: the GPT-2 pattern alone would keep "1234" together.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "gpt2": _byte_level,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "llama3": lambda: _split(_LLAMA3_SPLIT),
    "llama-v3": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": lambda: _split(_QWEN2_SPLIT),
}
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})


def build_tokenizer(meta: GgufMetadata) -> Tokenizer:
    """Byte-level BPE tokenizer of the model. Raises UnsupportedModelError or BrokenModelError."""
    kind = meta.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"GGUF tokenizer model is {kind!r}, expected 'gpt2' (byte-level BPE)"
        )
    pre = str(meta.values.get("tokenizer.ggml.pre", "default"))
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"GGUF pre-tokenizer is {pre!r}, expected one of {sorted(_PRE_TOKENIZERS)}"
        )
    tokens = meta.strings("tokenizer.ggml.tokens")
    types = meta.integers("tokenizer.ggml.token_type")
    merges: list[tuple[str, str]] = []
    for merge in meta.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre in _IGNORE_MERGES,
        )
    )
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind_id in zip(tokens, types, strict=True)
            if kind_id == wanted
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer


def adds_bos(meta: GgufMetadata) -> bool:
    """Whether a raw prompt begins with the BOS token."""
    default = meta.values.get("tokenizer.ggml.pre") in _IGNORE_MERGES
    return bool(meta.values.get("tokenizer.ggml.add_bos_token", default))
