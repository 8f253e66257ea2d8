from dataclasses import dataclass, field

import numpy as np

from tba.prompt import Prompt
from tba.selections import Counted


@dataclass
class Cyclic(Counted):
    """All prompts in turn, reshuffled in each epoch."""

    _order: np.ndarray = field(init=False)
    _order_of: int = field(default=-1, init=False)

    def choose(self, count: int) -> list[Prompt]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Prompt:
        epoch, position = divmod(self._chosen, len(self.prompts))
        if epoch != self._order_of:
            rng = np.random.default_rng([self.seed, epoch])
            self._order = rng.permutation(len(self.prompts))
            self._order_of = epoch
        self._chosen += 1
        return self.prompts[self._order[position]]
