"""What `python -m server tokenizer` writes counts as the server does, in the library of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from server.disk_cache import DiskCache
from server.engine.errors import ModelNotFoundError, UnsupportedModelError
from server.tokenizer import load_tokenizer
from server.tokenizer_folder import write_tokenizer_folder
from tests.support.tiny_models import gguf_tokens

TEXTS = [
    "Hello, world!",
    "x  =  y\t\tz\r\n\n  def f(): pass",
    "naïve 你好 🙂",
    "3.14159",
    "<|im_end|>",
]


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_ids_of_texts_and_chats_are_the_servers(tmp_path: Path) -> None:
    write_tokenizer_folder(None, tmp_path / "new" / "tokenizer")
    theirs = transformers_tokenizer(tmp_path / "new" / "tokenizer")
    ours = load_tokenizer(None)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
    messages = [
        {"role": "user", "content": TEXTS[0]},
        {"role": "assistant", "content": TEXTS[1]},
        {"role": "user", "content": TEXTS[2]},
    ]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert chat["input_ids"] == ours.encode_chat(messages)
    assert theirs.eos_token_id in ours.eos_token_ids


def test_bos_that_the_server_adds_is_the_tokenizers_there(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "llama-bpe")
    tokens = gguf_tokens(280)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    write_tokenizer_folder(str(path), tmp_path / "tokenizer", DiskCache(tmp_path / "cache"))
    theirs = transformers_tokenizer(tmp_path / "tokenizer")
    assert theirs("he")["input_ids"] == [1, tokens.index("he")]
    assert theirs.bos_token == "<|one|>"
    assert theirs.chat_template is None


def test_models_without_a_gguf_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="give it to the program as it is"):
        write_tokenizer_folder(str(tmp_path), tmp_path / "new")
    with pytest.raises(ModelNotFoundError, match="fake"):
        write_tokenizer_folder("fake:step_ms=2", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["."], "error: . exists: name a folder that does not"),
        (["new", "--model", "missing"], "error: no model at missing: expected a GGUF file"),
    ],
)
def test_refusal_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "tokenizer", *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path.cwd()), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(expected)
