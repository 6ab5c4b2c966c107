"""Is the CPU engine fast enough? Tokens per second against transformers, side by side.

Method: both engines hold the same weights (the same GGUF file, float32) in one process with the
same number of threads. A decode round feeds `--batch` sequences of `--context` random tokens one
token at a time for `--steps` steps; a prefill round feeds one prompt of `--prompt` tokens. In each
round the engines run in random order, each right after an untimed warm-up of its own (a fixed
order gave one of them up to 35 % for nothing). A round's ratio compares the two runs of that
round; the medians over rounds are printed with the lowest and highest. The reference decodes with
its own DynamicCache, which is rebuilt by a prefill before each timed run, outside the timing.

    python -m benchmarks.bench_engine [--rounds 7] [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from server.engine.base import DecodeSlot, PrefillChunk, SamplingParams
from server.engine.torch_engine import TorchEngine, set_threads
from server.models import locate_model

GREEDY = SamplingParams()
PAGE_SIZE = 16


class Contender(Protocol):
    """One engine under test; both methods return seconds of the timed part."""

    def decode(self, prompts: list[list[int]], steps: int) -> float: ...

    def prefill(self, prompt: list[int]) -> float: ...


class PdtraceContender:
    """TorchEngine with one page table per sequence."""

    def __init__(self, engine: TorchEngine, pages_per_seq: int) -> None:
        self._engine = engine
        self._pages_per_seq = pages_per_seq

    def _pages(self, seq: int) -> list[int]:
        first = seq * self._pages_per_seq
        return list(range(first, first + self._pages_per_seq))

    def _fill(self, prompts: list[list[int]]) -> list[int]:
        tokens: list[int] = []
        for seq, prompt in enumerate(prompts):
            chunk = PrefillChunk(token_ids=prompt, start=0, pages=self._pages(seq), sampling=GREEDY)
            (token,) = self._engine.prefill([chunk])
            assert token is not None
            tokens.append(token)
        return tokens

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        tokens = self._fill(prompts)
        started = time.perf_counter()
        for step in range(steps):
            slots = [
                DecodeSlot(
                    token_id=token,
                    position=len(prompt) + step,
                    pages=self._pages(seq),
                    sampling=GREEDY,
                )
                for seq, (prompt, token) in enumerate(zip(prompts, tokens, strict=True))
            ]
            tokens = self._engine.decode(slots)
        return time.perf_counter() - started

    def prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        self._fill([prompt])
        return time.perf_counter() - started


class TransformersContender:
    """The model's own forward with a DynamicCache and greedy argmax, as `generate` does it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> float:
        out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        started = time.perf_counter()
        for _ in range(steps):
            out = self._model(token, cache=out.past_key_values, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            token.tolist()
        return time.perf_counter() - started

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        out = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - started


def compare(
    contenders: dict[str, Contender],
    run: Callable[[Contender], float],
    warm_up: Callable[[Contender], float],
    *,
    rounds: int,
    order: random.Random,
) -> dict[str, list[float]]:
    """Seconds per contender and round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        names = list(contenders)
        order.shuffle(names)
        for name in names:
            warm_up(contenders[name])
            seconds[name].append(run(contenders[name]))
    return seconds


def summarize(seconds: dict[str, list[float]], tokens: int) -> dict[str, float]:
    """Median tokens per second of both, and the median, lowest and highest ratio of a round."""
    ours, theirs = seconds["pdtrace"], seconds["transformers"]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "pdtrace_tokens_per_s": tokens / statistics.median(ours),
        "transformers_tokens_per_s": tokens / statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def load_transformers(model: str | None) -> Any:
    """The same GGUF file or folder, loaded by transformers itself."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    source = locate_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if source.path.is_file():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.path.parent, gguf_file=source.path.name, dtype=torch.float32
            )
        else:
            loaded = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    return loaded.eval()


def cpu_flags() -> list[str]:
    """The vector extensions that decide which kernels run."""
    info = Path("/proc/cpuinfo")
    text = info.read_text("utf-8") if info.is_file() else ""
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return [flag for flag in flags if flag.startswith(("avx", "amx"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="GGUF file or folder; default: the default model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end")
    args = parser.parse_args()

    order = random.Random(0)
    set_threads(args.threads)
    longest = max(args.context + args.steps + 1, args.prompt + 1)
    pages_per_seq = -(-longest // PAGE_SIZE)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = TorchEngine.load(
            args.model,
            pool_path=Path(folder) / "pool",
            owner="bench",
            num_pages=args.batch * pages_per_seq,
            page_size=PAGE_SIZE,
            threads=args.threads,
        )
        contenders: dict[str, Contender] = {
            "pdtrace": PdtraceContender(engine, pages_per_seq),
            "transformers": TransformersContender(load_transformers(args.model)),
        }
        # transformers' import may change the thread count.
        torch.set_num_threads(args.threads)
        vocab_size = engine.info.vocab_size

        def tokens(count: int) -> list[int]:
            return [order.randrange(vocab_size) for _ in range(count)]

        prompts = [tokens(args.context) for _ in range(args.batch)]
        seconds = compare(
            contenders,
            lambda contender: contender.decode(prompts, args.steps),
            lambda contender: contender.decode([prompt[:16] for prompt in prompts], 2),
            rounds=args.rounds,
            order=order,
        )
        results["decode"] = summarize(seconds, args.batch * args.steps)
        prompt = tokens(args.prompt)
        seconds = compare(
            contenders,
            lambda contender: contender.prefill(prompt),
            lambda contender: contender.prefill(prompt[: args.prompt // 4]),
            rounds=args.rounds,
            order=order,
        )
        results["prefill"] = summarize(seconds, args.prompt)
        engine.close()

    shapes = {
        "decode": f"decode, batch {args.batch}, context {args.context}",
        "prefill": f"prefill, one prompt of {args.prompt}",
    }
    print(f"float32, {args.threads} thread(s), {args.rounds} rounds, torch {torch.__version__}")
    for name, result in results.items():
        print(
            f"{shapes[name]}: pdtrace {result['pdtrace_tokens_per_s']:.1f} tok/s, "
            f"transformers {result['transformers_tokens_per_s']:.1f} tok/s, "
            f"ratio {result['ratio']:.2f} [{result['ratio_min']:.2f}-{result['ratio_max']:.2f}]"
        )
    if args.json:
        settings = {
            key: getattr(args, key)
            for key in ("rounds", "threads", "batch", "context", "steps", "prompt")
        }
        record = {"torch": torch.__version__, "cpu_flags": cpu_flags(), **settings, **results}
        print(json.dumps(record))


if __name__ == "__main__":
    main()
