"""Models with random weights in the shape of real ones: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch

from tba.models.pretrained import BUNDLED

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
