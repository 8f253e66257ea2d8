"""Random models and batches in the shape of real ones: nothing is downloaded."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from _measure import need_model

from tba.config.tables import PolicyTable
from tba.models import BUNDLED
from tba.models.pretrained import load_config
from tba.types import Batch

PROMPTS, SAMPLES, PROMPT, RESPONSE = 4, 16, 100, 64
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


def save_random(folder: Path, shape: dict[str, int | bool]) -> None:
    """Save a Llama of this shape, with the tokenizer of the bundled model."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "arithmetic")
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
        behavior_logp=logp,
        ref_logp=logp,
        reward=torch.randn(shape[:2], generator=generator),
        value=torch.full(shape, torch.nan),
    )
