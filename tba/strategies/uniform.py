from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from tba.strategies import Columns, by_count, pick


@dataclass(frozen=True)
class Uniform:
    """Draws a prompt at random, then K of all its samples without replacement.

    A response that arrived several times counts as often as it was sampled.
    """

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> Int[np.ndarray, "{groups} {size}"]:
        drawn = []
        for prompt, times in pick(columns.prompts, groups, rng).items():
            rows = columns.rows(prompt)
            chosen = by_count(columns.count[rows], times, size, rng)
            drawn.append(np.where(chosen < 0, -1, rows[chosen]))
        return np.concatenate(drawn)
