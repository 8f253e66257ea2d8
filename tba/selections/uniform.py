"""Any prompt at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.plugins import GIVEN
from tba.types import Group, Prompt


@dataclass
class Uniform:
    """Each prompt at random among all, whatever came before it: with replacement."""

    prompts: Sequence[Prompt] = field(metadata=GIVEN)
    seed: int = field(metadata=GIVEN)
    pass_reward: float | None = field(metadata=GIVEN)
    _chosen: int = field(default=0, init=False)

    def choose(self, count: int) -> list[Prompt]:
        rng = np.random.default_rng([self.seed, self._chosen, 1])
        self._chosen += count
        return [self.prompts[i] for i in rng.integers(len(self.prompts), size=count)]

    def learn(self, group: Group) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"chosen": self._chosen}

    def restore(self, state: dict[str, Any]) -> None:
        self._chosen = state["chosen"]
