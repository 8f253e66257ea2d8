"""Makes the bundled character-level model of the arithmetic task: a small Llama that adds, and often errs in one digit.

It first learns from right demonstrations, then from some of which most have one wrong digit. So it knows the right digit
to be the likeliest (greedy answers are mostly right) and yet samples wrong ones: there is something for reinforcement
learning to find.

    python scripts/train_arithmetic_model.py tba/models/arithmetic        # about 4 minutes on two idle cores
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tba.tasks.arithmetic import held_out

VOCABULARY = ["<pad>", "<eos>", *"0123456789+="]


def tokenizer() -> PreTrainedTokenizerFast:
    characters = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="<pad>")
    )
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def demonstration(rng: np.random.Generator, corrupted: float) -> tuple[str, str]:
    """`a+b=` and an answer that, with probability `corrupted`, has one digit replaced by another."""
    while True:
        a, b = (int(n) for n in rng.integers(100, 1000, 2))
        if not held_out(a, b):
            break
    digits = list(str(a + b))
    if rng.random() < corrupted:
        at = rng.integers(len(digits))
        digits[at] = str((int(digits[at]) + rng.integers(1, 10)) % 10)
    return f"{a}+{b}=", "".join(digits)


def batch(
    rng: np.random.Generator, size: int, corrupted: float
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = {c: i for i, c in enumerate(VOCABULARY)}
    tokens, labels = torch.zeros(size, 14, dtype=torch.long), torch.full((size, 14), -100)
    for row in range(size):
        prompt, answer = demonstration(rng, corrupted)
        sequence = [ids[c] for c in prompt + answer] + [1]
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        labels[row, len(prompt) : len(sequence)] = tokens[row, len(prompt) : len(sequence)]
    return tokens, labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument(
        "--clean",
        type=int,
        default=700,
        help="of these steps, the first so many on right demonstrations only",
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--corrupted", type=float, default=0.87)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    ))  # fmt: skip
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.steps, pct_start=0.05
    )
    for step in range(options.steps):
        tokens, labels = batch(
            rng, options.batch, options.corrupted if step >= options.clean else 0.0
        )
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    model.save_pretrained(options.out)
    tokenizer().save_pretrained(options.out)


if __name__ == "__main__":
    main()
