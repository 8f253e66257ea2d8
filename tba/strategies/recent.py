from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from tba.strategies import Columns
from tba.strategies.uniform import Uniform


@dataclass(frozen=True)
class Recent:
    """Draws prompts that arrived in the last `window` steps, or the newest if those are too few.

    Each group consists of samples of the prompt's latest arrival. With as many fresh groups a step
    as a batch has, this is on-policy training: exactly what just arrived, each sample once.
    """

    window: int = 1

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"strategy.window = {self.window} must be 1 step or more")

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> Int[np.ndarray, "{groups} {size}"]:
        prompts, least = columns.prompts, groups
        while least < len(prompts) and now - columns.latest[prompts[-least]] < self.window:
            least *= 2
        ages = now - columns.latest[prompts[-least:]]
        fresh = max(int(np.count_nonzero(ages < self.window)), groups)
        rows, count = columns.latest_rows, columns.arrived_count
        newest = replace(columns, prompts=prompts[-fresh:], rows=rows, count=count)
        return Uniform().draw(newest, groups, size, now, rng)
