"""One way to an engine: picks the fake or the torch engine by the model's name.

The only module that chooses; torch is imported when a real model is loaded, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from server.disk_cache import DiskCache
from server.engine.base import Engine, ModelInfo
from server.engine.config import load_config
from server.engine.errors import UnsupportedModelError
from server.engine.fake import FakeEngine, FakeModel, StepShape, no_step_time
from server.models import FAKE_MODEL, fingerprint, is_fake, locate_model


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to make an engine.

    model      None: the default model; a path; or "fake", "fake:step_ms=5,token_us=50"
    pool_path  file that backs the KV pool, on a memory file system
    owner      instance id of the worker
    num_pages  pages in the pool
    page_size  tokens per page
    dtype      "float32" or "bfloat16", of weights and KV
    threads    CPU threads of a step
    device     "cpu" or "cuda"
    """

    model: str | None = None
    pool_path: str
    owner: str
    num_pages: int
    page_size: int = 16
    dtype: str = "float32"
    threads: int = 1
    device: str = "cpu"


def load_engine(config: EngineConfig) -> Engine:
    """Load the engine that `config` asks for. Raises ModelError with one clear line."""
    if is_fake(config.model):
        return FakeEngine(
            pool_path=Path(config.pool_path),
            owner=config.owner,
            num_pages=config.num_pages,
            page_size=config.page_size,
            step_time=fake_step_time(config.model or FAKE_MODEL),
        )
    # torch takes seconds and 300 MiB to import; a control-plane test does without.
    from server.engine.torch_engine import TorchEngine  # noqa: PLC0415

    return TorchEngine.load(
        config.model,
        pool_path=Path(config.pool_path),
        owner=config.owner,
        num_pages=config.num_pages,
        page_size=config.page_size,
        dtype=config.dtype,
        threads=config.threads,
        device=config.device,
    )


def load_model_info(model: str | None, cache: DiskCache | None = None) -> ModelInfo:
    """What `load_engine(...).info` will say, without weights or torch. Raises ModelError."""
    if is_fake(model):
        return FakeModel().info
    cache = cache or DiskCache.default()
    source = locate_model(model)
    config = load_config(source, cache)
    return ModelInfo(
        name=source.name,
        fingerprint=fingerprint(source, cache),
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        eos_token_ids=config.eos_token_ids,
    )


def fake_step_time(model: str) -> Callable[[StepShape], float]:
    """Duration of a fake step, in seconds, from "fake:step_ms=…,token_us=…".

    A step takes `step_ms` milliseconds plus `token_us` microseconds per computed position.
    Raises UnsupportedModelError for an unknown option or a bad number.
    """
    _, _, options = model.partition(":")
    if not options:
        return no_step_time
    values = {"step_ms": 0.0, "token_us": 0.0}
    for option in options.split(","):
        key, _, text = option.partition("=")
        if key not in values:
            raise UnsupportedModelError(
                f"fake model option {key!r}, expected one of {list(values)}"
            )
        try:
            values[key] = float(text)
        except ValueError:
            values[key] = -1.0
        if not 0 <= values[key] < float("inf"):
            raise UnsupportedModelError(f"fake model option {option!r}, expected a number from 0")
    step_s, token_s = values["step_ms"] / 1e3, values["token_us"] / 1e6

    def duration(shape: StepShape) -> float:
        return step_s + token_s * shape.num_tokens

    return duration
