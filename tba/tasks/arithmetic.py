"""Addition of two numbers, the default task: prompts are generated, nothing is downloaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.config.tables import Count, Positive
from tba.prompt import Answer, Prompt
from tba.tasks import Task


def is_held_out(a: int, b: int) -> bool:
    """Return whether a sum is in the held-out tenth, by Knuth's multiplicative hash."""
    return (a * 1_000_003 + b) * 2_654_435_761 % 2**32 < 2**32 // 10


@dataclass(frozen=True)
class Arithmetic(Task):
    """`a+b=` -> the sum of two numbers with exactly `digits` digits.

    The reward is 1 for exactly the right answer, else 0.
    """

    digits: int = 3
    """Number of digits of each summand."""
    train_size: Positive = 20_000
    """Number of training sums."""
    held_out_size: Count = 512
    """Number of held-out sums."""
    seed: Count = 0
    """Seed of the generated sums."""
    pass_reward: float = 1.0
    """Minimum reward of a correct answer."""

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9:
            raise ValueError(
                f"task.digits = {self.digits}: give 1 to 9 (the bundled model has learned 3)"
            )
        sums = (9 * 10 ** (self.digits - 1)) ** 2
        if self.train_size > 0.8 * sums or self.held_out_size > 0.05 * sums:
            raise ValueError(
                f"there are {sums} sums of task.digits = {self.digits}; lower task.train_size to"
                f" {int(0.8 * sums)} and task.held_out_size to {int(0.05 * sums)}, or less"
            )

    def prompts(self) -> Sequence[Prompt]:
        return self._draw(self.train_size, held_out=False)

    def held_out(self) -> Sequence[Prompt]:
        return self._draw(self.held_out_size, held_out=True)

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        right = prompt.columns["answer"]
        return [float(a.finished and a.text == right) for a in answers]

    def _draw(self, count: int, held_out: bool) -> list[Prompt]:
        """Draw distinct sums; deterministic in the seed."""
        rng = np.random.default_rng([self.seed, held_out])
        smallest = 10 ** (self.digits - 1)
        pairs: dict[tuple[int, int], None] = {}
        while len(pairs) < count:
            a, b = rng.integers(smallest, 10 * smallest, 2).tolist()
            if is_held_out(a, b) == held_out:
                pairs[a, b] = None
        return [Prompt(f"{a}+{b}", f"{a}+{b}=", {"answer": str(a + b)}) for a, b in pairs]
