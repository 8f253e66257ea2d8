from dataclasses import dataclass

import numpy as np

from tba.prompt import Prompt
from tba.selections import CountedSelection


@dataclass
class Cyclic(CountedSelection):
    """All prompts in turn, reshuffled in each epoch."""

    def choose(self, count: int) -> list[Prompt]:
        chosen: list[Prompt] = []
        while len(chosen) < count:
            epoch, position = divmod(self._chosen, len(self.prompts))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
            part = order[position : position + count - len(chosen)].tolist()
            chosen += [self.prompts[i] for i in part]
            self._chosen += len(part)
        return chosen
