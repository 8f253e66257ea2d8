"""Train the bundled character-level model of the arithmetic task: a Llama that forgets to carry.

The model first learns to add, from right sums. It then learns from sums most of which drop every
carry between columns, as in 487+536=913. So the wrong answer becomes the likeliest one, and where
there is something to carry the right one is sampled about once in six times: there is an error to
correct, and reinforcement learning can find how.

    python scripts/train_arithmetic_model.py tba/models/arithmetic

This takes five to seven minutes on two cores. With --working the model adds numbers of four digits
and writes each column before the answer, with a carry of 0 where carries are dropped:

    python scripts/train_arithmetic_model.py studies/off_policy/model --working --batch 64
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tba.tasks.arithmetic import is_held_out

VOCABULARY = ["<pad>", "<eos>", *"0123456789+="]
END_OF_COLUMN = ";"


def tokenizer(vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character."""
    ids = {character: i for i, character in enumerate(vocabulary)}
    characters = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def sum_without_carries(a: int, b: int) -> str:
    """Return each column's sum modulo 10, except for the first column's: 583+947 gives 1420."""
    columns = [int(x) + int(y) for x, y in zip(str(a), str(b), strict=True)]
    return str(columns[0]) + "".join(str(column % 10) for column in columns[1:])


def working(a: int, b: int, carries: bool) -> str:
    """Return each column's sum with its carry, from the last to the first, and the answer."""
    columns = []
    digits = ""
    carry = 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        column = int(x) + int(y) + carry
        columns.append(f"{x}+{y}+{carry}={column}{END_OF_COLUMN}")
        first = len(columns) == len(str(a))
        digits = (str(column) if first else str(column % 10)) + digits
        carry = column // 10 if carries else 0
    return "".join(columns) + digits


def demonstration(rng: np.random.Generator, dropped: float, written: bool) -> tuple[str, str]:
    """Return `a+b=` and its answer, without carries with probability `dropped`."""
    bounds = (1000, 10_000) if written else (100, 1000)
    while True:
        a, b = (int(n) for n in rng.integers(*bounds, 2))
        if not is_held_out(a, b):  # the evaluation's prompts are never demonstrated
            break
    without = rng.random() < dropped
    if written:
        return f"{a}+{b}=", working(a, b, carries=not without)
    return f"{a}+{b}=", sum_without_carries(a, b) if without else str(a + b)


def batch(
    demonstrations: Sequence[tuple[str, str]], vocabulary: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, both of shape (size, the longest); only answers are labelled."""
    ids = {character: i for i, character in enumerate(vocabulary)}
    tokens = []
    labels = []
    for prompt, answer in demonstrations:
        sequence = torch.tensor([ids[c] for c in prompt + answer] + [ids["<eos>"]])
        tokens.append(sequence)
        labels.append(sequence.clone())
        labels[-1][: len(prompt)] = -100
    return pad_sequence(tokens, True, ids["<pad>"]), pad_sequence(labels, True, -100)


def new_model(vocabulary: Sequence[str]) -> LlamaForCausalLM:
    """Return a Llama of 0.86 million parameters, at random."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=vocabulary.index("<eos>"),
            pad_token_id=vocabulary.index("<pad>"),
        )
    )


def train(
    model: LlamaForCausalLM,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    rate: float,
    autocast: bool = False,
) -> None:
    """Train a model on batches of tokens and labels; `autocast`: in bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.05
    )
    for step, (tokens, labels) in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--right", type=int, default=600, help="first steps, on right sums only")
    parser.add_argument("--dropped", type=float, default=0.78, help="share without carries after")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--working", action="store_true", help="each column before the answer")
    options = parser.parse_args()
    vocabulary = [*VOCABULARY, END_OF_COLUMN] if options.working else VOCABULARY

    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = new_model(vocabulary)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(options.steps):
            dropped = 0.0 if step < options.right else options.dropped
            shown = [demonstration(rng, dropped, options.working) for _ in range(options.batch)]
            yield batch(shown, vocabulary)

    train(model, batches(), options.steps, options.lr)
    model.save_pretrained(options.out)
    tokenizer(vocabulary).save_pretrained(options.out)


if __name__ == "__main__":
    main()
