"""Measure generation by the `transformers` engine beside plain `model.generate`, in one process.

    python benchmarks/generation.py --model FOLDER_OR_NAME

The peer runs each prompt once for every sample, as calling `generate` on a repeated batch does, and
samples by `torch.multinomial`. Both sides take turns; the figures are medians and their ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from transformers import GenerationConfig

from tba.config.tables import PolicyTable
from tba.engines.transformers import Transformers
from tba.models.pretrained import load_text
from tba.types import Sampling

PROMPTS, SAMPLES, TOKENS = 8, 16, 8
LENGTHS = (132, 18)
"""Tokens of a prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or name of a causal LM")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bf16")
    arguments = parser.parse_args()
    policy = PolicyTable(model=arguments.model)
    text = load_text(policy)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Transformers(policy, text, device, not arguments.fp32)
    rng = np.random.default_rng(0)
    print("prompt tokens | engine s | generate s | ratio")
    print("--- | --- | --- | ---")
    for length in LENGTHS:
        ids = rng.integers(100, len(text.tokenizer) - 100, (PROMPTS, length)).astype(np.int32)
        sides = (lambda i, ids=ids: ours(engine, ids, i), lambda _, ids=ids: peers(engine, ids))
        own, other = alternate(sides, arguments.repeats)
        print(f"{length} | {own:.2f} | {other:.2f} | {other / own:.1f}", flush=True)


def alternate(sides: tuple[Callable[[int], None], ...], repeats: int) -> list[float]:
    """Return the median seconds of each side. A first call of each is not counted."""
    seconds: list[list[float]] = [[] for _ in sides]
    for i in range(repeats + 1):
        for side, own in zip(sides, seconds, strict=True):
            started = time.perf_counter()
            side(i)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            own.append(time.perf_counter() - started)
    return [median(own[1:]) for own in seconds]


def ours(engine: Transformers, ids: np.ndarray, seed: int) -> None:
    engine.generate(list(ids), Sampling(SAMPLES, 1.0, TOKENS), seed)


@torch.inference_mode()
def peers(engine: Transformers, ids: np.ndarray) -> None:
    repeated = torch.from_numpy(ids).long().repeat_interleave(SAMPLES, 0).to(engine.device)
    config = GenerationConfig(
        max_new_tokens=TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=sorted(engine.text.eos_ids), pad_token_id=engine.text.pad_id,
    )  # fmt: skip
    engine.model.generate(
        input_ids=repeated, attention_mask=torch.ones_like(repeated), generation_config=config
    )


if __name__ == "__main__":
    main()
