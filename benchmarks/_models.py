"""Models of the benchmarks: random ones in the shape of real ones, and snapshots of weights."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from _measure import need_model
from safetensors.torch import save_file
from torch import Tensor

from tba.config.tables import PolicyTable
from tba.models import BUNDLED
from tba.models.pretrained import load_config
from tba.types import Batch

PROMPTS = 4
SAMPLES = 16
PROMPT = 100
RESPONSE = 64
"""Size of a batch: prompts, responses to each, and tokens of both."""

SMOLLM2_135M = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2_048,
    "tie_word_embeddings": True,
}
SMALL = SMOLLM2_135M | {"vocab_size": 512, "hidden_size": 252, "num_hidden_layers": 6}
TINY = SMOLLM2_135M | {"vocab_size": 512, "hidden_size": 36, "num_hidden_layers": 2}


def save_random(
    folder: Path, shape: dict[str, int | bool], tokenizer_of: Path = BUNDLED / "arithmetic"
) -> None:
    """Save a Llama of this shape, with the tokenizer of another model."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    shape = shape | {"vocab_size": max(shape["vocab_size"], len(tokenizer))}
    eos = tokenizer.eos_token_id
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=eos, pad_token_id=None)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_of(options: argparse.Namespace) -> str:
    """Return the folder of the model; with `--tiny`, that of a tiny random one."""
    if options.tiny:
        folder = Path(tempfile.mkdtemp(prefix="tba-"))
        save_random(folder, TINY)
        return str(folder)
    return need_model(options)


def random_batch(model: str) -> Batch:
    """Return a batch of random tokens without padding."""
    vocabulary = load_config(PolicyTable(model=model)).vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = (PROMPTS, SAMPLES, RESPONSE)
    prompts = torch.randint(10, vocabulary, (PROMPTS, PROMPT), generator=generator)
    logp = -torch.ones(shape)
    return Batch(
        prompt_tokens=prompts,
        prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
        tokens=torch.randint(10, vocabulary, shape, generator=generator),
        mask=torch.ones(shape, dtype=torch.bool),
        restarts=torch.zeros(shape, dtype=torch.bool),
        behavior_logp=logp,
        ref_logp=logp,
        reward=torch.randn(shape[:2], generator=generator),
        value=torch.full(shape, torch.nan),
    )


class Snapshots:
    """A clock of the training time, and copies of the weights for an evaluation after the run.

    Copies are taken every so many seconds, or after the steps `at`. They are kept in memory, in
    bf16 where engines sample from bf16 weights, and written when the run has ended. Copying stops
    the clock.
    """

    def __init__(self, folder: Path, every: float, bf16: bool, at: Collection[int] = ()):
        self.folder = folder
        self.every = every
        self.at = at
        self.bf16 = bf16
        self.rows: list[dict[str, float | str]] = []
        self._copies: list[dict[str, Tensor]] = []
        self._started = time.perf_counter()
        self._paused = 0.0
        self._next = 0.0

    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return time.perf_counter() - self._started - self._paused

    def take(self, weights: Callable[[], Mapping[str, Tensor]], step: int) -> None:
        """Copy the weights if the next snapshot is due."""
        seconds = self.seconds()
        due = step in self.at if self.at else self.every and seconds >= self._next
        if not due:
            return
        before = time.perf_counter()
        copies = {}
        for name, tensor in weights().items():
            dtype = torch.bfloat16 if self.bf16 and "lora" not in name else torch.float32
            copies[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        self._copies.append(copies)
        path = self.folder / f"step-{step:05}.safetensors"
        self.rows.append({"step": step, "seconds": seconds, "path": str(path)})
        self._next = seconds + self.every
        self._paused += time.perf_counter() - before

    def write(self) -> None:
        """Write every copy to its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for row, copies in zip(self.rows, self._copies, strict=True):
            save_file(copies, str(row["path"]))
        self._copies.clear()
