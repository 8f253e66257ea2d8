"""Newest data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.strategies._draw import by_count, newest, pick
from tba.types import Group, Shelf


@dataclass(frozen=True)
class Recent:
    """Groups from the prompts and samples that arrived in the last `window` steps, or the newest ones if those are too few.

    With as many fresh groups a step as a batch has, this is on-policy training: exactly what just arrived, each once.
    """

    window: int = 1

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"the window of recent data is {self.window} steps; write 1 or more")

    def draw(
        self, shelves: Sequence[Shelf], groups: int, size: int, now: int, rng: np.random.Generator
    ) -> list[Group]:
        chosen = pick(newest(shelves, groups, self.window, now), groups, rng)
        return [s.group(by_count(s.latest(), size, rng)) for s in chosen]
