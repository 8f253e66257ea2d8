"""Data of any age, high rewards first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.strategies._draw import by_weight, pick
from tba.types import Group, Shelf


@dataclass(frozen=True)
class Reward:
    """A prompt at random, then K distinct responses by softmax(reward / temperature), without replacement.

    The paper's code uses temperature 1 for TL;DR.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"the temperature of reward sampling is {self.temperature}; it must be above 0: try 1.0, or the strategy `uniform`"
            )

    def draw(
        self, shelves: Sequence[Shelf], groups: int, size: int, now: int, rng: np.random.Generator
    ) -> list[Group]:
        chosen = []
        for shelf in pick(shelves, groups, rng):
            stored = list(shelf.stored.values())
            log_weight = np.array([s.trajectory.reward for s in stored]) / self.temperature
            chosen.append(shelf.group(by_weight(stored, log_weight, size, rng)))
        return chosen
