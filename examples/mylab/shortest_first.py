"""Replay that prefers short responses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tba.strategies import Columns


@dataclass(frozen=True)
class ShortestFirst:
    """Draws a prompt at random, then K distinct responses with odds exp(-length / temperature).

    Lengths are in tokens. Every response can be drawn, because TB needs full support.
    """

    temperature: float = 8.0

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> np.ndarray:
        prompts = columns.prompts
        chosen = rng.choice(prompts, groups, replace=len(prompts) < groups)
        drawn = np.full((groups, size), -1)  # -1: no response left to draw
        for group, prompt in zip(drawn, chosen, strict=True):
            rows = columns.rows(prompt)
            log_odds = -columns.length[rows] / self.temperature
            # Taking the largest of log-odds + Gumbel noise is a draw that cannot underflow.
            best = np.argsort(-(log_odds + rng.gumbel(size=len(rows))))[:size]
            group[: len(best)] = rows[best]
        return drawn
