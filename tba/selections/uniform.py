from dataclasses import dataclass

import numpy as np

from tba.prompt import Prompt
from tba.selections import CountedSelection


@dataclass
class Uniform(CountedSelection):
    """Prompts drawn uniformly, with replacement."""

    def choose(self, count: int) -> list[Prompt]:
        rng = np.random.default_rng([self.seed, self._chosen])
        self._chosen += count
        return [self.prompts[i] for i in rng.integers(len(self.prompts), size=count)]
