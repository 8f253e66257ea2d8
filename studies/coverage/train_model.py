"""Train the model of the study: it knows many right pairs, some much better than others.

    python -m studies.coverage.train_model studies/coverage/model

The model has the size of the bundled one. It first learns right pairs, whose first number is often
small, or a multiple of 5 or 10. Then it learns from pairs of which many are wrong, most of them
where the second number needs a borrow. About half of its samples are right. It takes three minutes
on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from scripts.train_arithmetic_model import VOCABULARY, new_model, tokenizer
from studies.coverage.pairs import SUMS, is_held_out

STEPS = 500
RIGHT = 350
"""First steps, on right pairs only."""
SIZE = 256
RATE = 3e-3
TRAINED = [n for n in SUMS if not is_held_out(n)]
FIRST = np.arange(10, 100)
ODDS = np.exp(-(FIRST - 10) / 60) * np.select([FIRST % 10 == 0, FIRST % 5 == 0], [8.0, 4.0], 1.0)


def pair(rng: np.random.Generator, n: int, may_be_wrong: bool) -> str:
    """Return an answer to a sum."""
    odds = ODDS * ((n - FIRST >= 10) & (n - FIRST <= 99))
    a = int(rng.choice(FIRST, p=odds / odds.sum()))
    b = n - a
    borrows = n % 10 < a % 10
    if may_be_wrong and rng.random() < (0.8 if borrows else 0.35):
        b += int(rng.choice([10, -10, 1, -1], p=[0.55, 0.15, 0.15, 0.15]))
    return f"{a}+{min(max(b, 10), 99)}"


def batch(rng: np.random.Generator, may_be_wrong: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels; only answers are labelled."""
    tokens = []
    labels = []
    for n in rng.choice(TRAINED, SIZE).tolist():
        text = f"{n}=" + pair(rng, n, may_be_wrong)
        tokens.append(torch.tensor([*map(VOCABULARY.index, text), VOCABULARY.index("<eos>")]))
        labels.append(tokens[-1].clone())
        labels[-1][: text.index("=") + 1] = -100
    return pad_sequence(tokens, True), pad_sequence(labels, True, -100)


def main(out: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = new_model(VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=STEPS, pct_start=0.05
    )
    for step in range(STEPS):
        tokens, labels = batch(rng, may_be_wrong=step >= RIGHT)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    model.save_pretrained(out)
    tokenizer(VOCABULARY).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
