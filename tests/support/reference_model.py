"""transformers as the judge of greedy output, on the very weights the server loads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from server.models import locate_model


def load_reference() -> Any:
    """The default model in float32, read from the GGUF file by transformers itself."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = locate_model(None).path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )
    return model.eval()


@torch.inference_mode()
def greedy_continuation(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """The most likely token after `prompt` and each proper prefix of `output`.

    It equals `output` exactly when greedy decoding of `prompt` yields `output` (by induction over
    its tokens), at the price of one forward pass instead of one per token.
    """
    token_ids = torch.tensor([[*prompt, *output[:-1]]])
    logits = model(token_ids, use_cache=False, logits_to_keep=len(output)).logits
    return logits[0].argmax(-1).tolist()
