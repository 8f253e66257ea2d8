"""Train the model of the study: it knows many right pairs, some much better than others.

    python -m studies.coverage.train_model studies/coverage/model

The model has the size of the bundled one. It first learns right pairs, whose first number is often
small, or a multiple of 5 or 10. Then it learns from pairs of which many are wrong, most of them
where the second number needs a borrow. About half of its samples are right. It takes three minutes
on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from scripts.train_arithmetic_model import VOCABULARY, batch, new_model, tokenizer, train
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


def batches(rng: np.random.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(STEPS):
        sums = rng.choice(TRAINED, SIZE).tolist()
        yield batch([(f"{n}=", pair(rng, n, may_be_wrong=step >= RIGHT)) for n in sums], VOCABULARY)


def main(out: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = new_model(VOCABULARY)
    train(model, batches(rng), STEPS, RATE, autocast=True)
    model.save_pretrained(out)
    tokenizer(VOCABULARY).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
