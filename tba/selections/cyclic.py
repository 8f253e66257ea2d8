"""Every prompt in its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.plugins import GIVEN
from tba.types import Group, Prompt


@dataclass
class Cyclic:
    """All prompts in an order shuffled anew each epoch: none comes again before all others have come."""

    prompts: Sequence[Prompt] = field(metadata=GIVEN)
    seed: int = field(metadata=GIVEN)
    pass_reward: float | None = field(metadata=GIVEN)
    _chosen: int = field(default=0, init=False)
    _order: np.ndarray = field(init=False)
    _order_of: int = field(default=-1, init=False)

    def choose(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def learn(self, group: Group) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"chosen": self._chosen}

    def restore(self, state: dict[str, Any]) -> None:
        self._chosen = state["chosen"]

    def _next(self) -> Prompt:
        epoch, position = divmod(self._chosen, len(self.prompts))
        if epoch != self._order_of:
            self._order, self._order_of = np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts)), epoch
        self._chosen += 1
        return self.prompts[self._order[position]]
