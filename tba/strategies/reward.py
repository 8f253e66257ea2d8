from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from tba.config.tables import PositiveFloat
from tba.prompt import passes
from tba.strategies import Columns, by_weight, pick


@dataclass(frozen=True)
class Reward:
    """Draws a prompt at random, then K distinct responses by softmax(reward / temperature).

    The draw is without replacement. The paper's code uses temperature 1 for TL;DR.
    """

    temperature: PositiveFloat = 1.0
    """Higher values make the draw more uniform."""

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> Int[np.ndarray, "{groups} {size}"]:
        drawn = []
        for prompt, times in pick(columns.prompts, groups, rng).items():
            rows = columns.rows(prompt)
            reward = columns.reward[rows]
            best = reward.max()
            below = np.where(passes(reward, best), 0.0, reward - best)
            chosen = by_weight(below / self.temperature, times, size, rng)
            drawn.append(np.where(chosen < 0, -1, rows[chosen]))
        return np.concatenate(drawn)
