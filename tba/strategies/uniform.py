"""Data of any age, as sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.strategies._draw import by_count, pick
from tba.types import Group, Shelf


@dataclass(frozen=True)
class Uniform:
    """A prompt at random, then K of all its samples at random."""

    def draw(
        self, shelves: Sequence[Shelf], groups: int, size: int, now: int, rng: np.random.Generator
    ) -> list[Group]:
        return [
            s.group(by_count(list(s.stored.values()), size, rng))
            for s in pick(shelves, groups, rng)
        ]
