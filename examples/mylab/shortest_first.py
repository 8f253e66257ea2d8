# examples/mylab/shortest_first.py
"""Replay that prefers short responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.types import Group, Shelf


@dataclass(frozen=True)
class ShortestFirst:
    """A prompt at random, then K distinct responses of any age with odds exp(-length / temperature), in tokens.

    Every response keeps a chance: TB needs full support. If a prompt has fewer than K, they are repeated in turn.
    """

    temperature: float = 8.0

    def draw(
        self, shelves: Sequence[Shelf], groups: int, size: int, now: int, rng: np.random.Generator
    ) -> list[Group]:
        chosen = rng.choice(len(shelves), groups, replace=len(shelves) < groups)
        return [self._group(shelves[i], size, rng) for i in chosen]

    def _group(self, shelf: Shelf, size: int, rng: np.random.Generator) -> Group:
        held = [s.trajectory for s in shelf.stored.values()]
        log_odds = -np.array([len(t.tokens) for t in held]) / self.temperature
        best = np.argsort(-(log_odds + rng.gumbel(size=len(held))))[
            :size
        ]  # a draw without replacement that cannot underflow
        return shelf.group([held[i] for i in np.resize(best, size)])
