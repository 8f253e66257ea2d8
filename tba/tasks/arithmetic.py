"""Addition of two numbers: the embedded default. Prompts are made, not read; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.types import Answer, Prompt


def held_out(a: int, b: int) -> bool:
    """A fixed tenth of all pairs is never trained on, whatever the seed (Knuth's multiplicative hash)."""
    return (a * 1_000_003 + b) * 2_654_435_761 % 2**32 < 2**32 // 10


@dataclass(frozen=True)
class Arithmetic:
    """`a+b=` -> the sum, of two numbers with exactly `digits` digits. Reward 1 for exactly the right answer, else 0."""

    digits: int = 3
    train_size: int = 20_000
    held_out_size: int = 512
    seed: int = 0
    pass_reward: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9:
            raise ValueError(
                f"task.digits = {self.digits}: give 1 to 9 (the bundled model has learned 3)"
            )
        pairs = (9 * 10 ** (self.digits - 1)) ** 2
        for name, size, share in (
            ("train_size", self.train_size, 0.8),
            ("held_out_size", self.held_out_size, 0.05),
        ):
            if size > pairs * share:
                raise ValueError(
                    f"task.{name} = {size}: there are not so many sums of {self.digits} digits; give {int(pairs * share)} or fewer"
                )

    def prompts(self) -> Sequence[Prompt]:
        return self._draw(self.train_size, of_held_out=False)

    def held_out(self) -> Sequence[Prompt]:
        return self._draw(self.held_out_size, of_held_out=True)

    def score(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float | None]:
        return [
            float(a.finished and a.text == p.columns["answer"])
            for p, a in zip(prompts, answers, strict=True)
        ]

    def _draw(self, count: int, of_held_out: bool) -> list[Prompt]:
        rng = np.random.default_rng([self.seed, of_held_out])
        found: dict[tuple[int, int], None] = {}
        while len(found) < count:
            a, b = (int(n) for n in rng.integers(10 ** (self.digits - 1), 10**self.digits, 2))
            if held_out(a, b) == of_held_out:
                found[a, b] = None
        return [Prompt(f"{a}+{b}", f"{a}+{b}=", {"answer": str(a + b)}) for a, b in found]
