"""The tokenizer of a GGUF model as a Hugging Face folder, for programs that want one.

Load generators make prompts of a given length and count tokens themselves, and load what they count
with by `transformers`. Knows nothing of serving.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import processors

from server.disk_cache import DiskCache
from server.engine.errors import ModelNotFoundError, UnsupportedModelError
from server.gguf_metadata import GgufMetadata, load_gguf_metadata
from server.gguf_tokenizer import adds_bos, build_tokenizer
from server.models import ModelFormat, is_fake, locate_model

_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}


def write_tokenizer_folder(model: str | None, folder: Path, cache: DiskCache | None = None) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, chat template included, to a new folder.

    Raises ModelError when the model is none, has no GGUF file or is unreadable, and
    FileExistsError.
    """
    if is_fake(model):
        raise ModelNotFoundError("the fake model has no tokenizer: its tokens are bytes")
    source = locate_model(model)
    if source.format is not ModelFormat.GGUF:
        raise UnsupportedModelError(
            f"{source.path} is a Hugging Face folder: give it to the program as it is"
        )
    meta = load_gguf_metadata(source.path, cache or DiskCache.default())
    serialized, settings = _serialized(meta), json.dumps(_settings(meta), indent=2)
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(serialized, "utf-8")
    (folder / "tokenizer_config.json").write_text(settings + "\n", "utf-8")


def _serialized(meta: GgufMetadata) -> str:
    tokenizer = build_tokenizer(meta)
    bos = _special_tokens(meta).get("bos_token")
    if bos is not None and adds_bos(meta):
        # The server puts it there itself; elsewhere it is the tokenizer's to do.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            special_tokens=[(bos, meta.integer("tokenizer.ggml.bos_token_id"))],
        )
    return tokenizer.to_str()


def _settings(meta: GgufMetadata) -> dict[str, object]:
    template = meta.values.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **_special_tokens(meta),
        **({} if template is None else {"chat_template": str(template)}),
    }


def _special_tokens(meta: GgufMetadata) -> dict[str, str]:
    tokens = meta.strings("tokenizer.ggml.tokens")
    found: dict[str, str] = {}
    for name, key in _SPECIAL.items():
        token_id = meta.values.get(f"tokenizer.ggml.{key}")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[name] = tokens[token_id]
    return found
