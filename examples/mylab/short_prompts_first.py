# examples/mylab/short_prompts_first.py
"""A curriculum: short prompts first, all of them in the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.config.tables import FILLED_IN
from tba.prompt import Prompt
from tba.types import Group


@dataclass
class ShortPromptsFirst:
    """Draws from the shortest tenth of the prompts at first, from all of them in the end.

    The share grows linearly while the first `over` prompts are chosen.
    """

    prompts: Sequence[Prompt] = field(metadata=FILLED_IN)
    seed: int = field(metadata=FILLED_IN)
    pass_reward: float | None = field(metadata=FILLED_IN)
    over: int = 1000
    _chosen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.over < 1:
            raise ValueError(f"selection.over = {self.over} must be 1 or more; try 1000")
        self.prompts = sorted(self.prompts, key=lambda p: len(str(p.text)))

    def choose(self, count: int) -> list[Prompt]:
        rng = np.random.default_rng([self.seed, self._chosen])
        share = min(1.0, 0.1 + 0.9 * self._chosen / self.over)
        shortest = math.ceil(len(self.prompts) * share)
        self._chosen += count
        return [self.prompts[i] for i in rng.integers(shortest, size=count)]

    def learn(self, group: Group) -> None:
        pass  # choices do not depend on the answers

    def state(self) -> dict[str, Any]:
        return {"chosen": self._chosen}

    def restore(self, state: dict[str, Any]) -> None:
        self._chosen = state["chosen"]
