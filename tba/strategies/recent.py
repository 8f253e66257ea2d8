"""Newest data only."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from tba.strategies import Columns
from tba.strategies._draw import by_count, newest, pick


@dataclass(frozen=True)
class Recent:
    """Draws prompts that arrived in the last `window` steps, or the newest if those are too few.

    Each group consists of samples of the prompt's latest arrival. With as many fresh groups a step
    as a batch has, this is on-policy training: exactly what just arrived, each sample once.
    """

    window: int = 1

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"strategy.window = {self.window} must be 1 step or more")

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> Int[np.ndarray, "{groups} {size}"]:
        drawn = []
        prompts = newest(columns, groups, self.window, now)
        for prompt, times in pick(prompts, groups, rng).items():
            rows = columns.latest_rows(prompt)
            chosen = by_count(columns.arrived_count[rows], times, size, rng)
            drawn.append(np.where(chosen < 0, -1, rows[chosen]))
        return np.concatenate(drawn)
