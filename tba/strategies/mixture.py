"""The paper's mixture of recent data and replay (MOP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.strategies.recent import Recent
from tba.strategies.reward import Reward
from tba.strategies.uniform import Uniform
from tba.types import Group, Shelf


@dataclass(frozen=True)
class Mixture:
    """For each group: with probability `recent`, the newest data; else data of any age, by reward or uniformly.

    `recent` is the paper's most-on-policy probability m; `reward` is the share of the replay arm that draws by
    softmax(reward / temperature), the rest draws uniformly. Trajectory Balance with Asynchrony (arXiv 2503.18929), section 3.
    """

    recent: float = 0.5
    reward: float = 0.5
    temperature: float = 1.0
    """Of `reward`."""
    window: int = 1
    """Of `recent`, in steps."""

    def __post_init__(self) -> None:
        for name, share in (("recent", self.recent), ("reward", self.reward)):
            if not 0 <= share <= 1:
                raise ValueError(
                    f"strategy.{name} = {share} is a probability: give a number from 0 to 1"
                )

    def draw(
        self, shelves: Sequence[Shelf], groups: int, size: int, now: int, rng: np.random.Generator
    ) -> list[Group]:
        shares = (
            self.recent,
            (1 - self.recent) * self.reward,
            (1 - self.recent) * (1 - self.reward),
        )
        arms: tuple[Recent | Reward | Uniform, ...] = (
            Recent(self.window),
            Reward(self.temperature),
            Uniform(),
        )
        counts = rng.multinomial(groups, shares)
        return [
            g
            for arm, n in zip(arms, counts, strict=True)
            if n
            for g in arm.draw(shelves, int(n), size, now, rng)
        ]
