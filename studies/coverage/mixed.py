"""An engine that searches with two policies: the first weights, and the newest.

engine.use = "studies.coverage.mixed.HalfFirst"

With `runtime.lag=0`, half of each batch is as old as the run, and half is on policy. Evaluations
are of the newest weights: they must sample otherwise than the searches do (`eval.samples`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tba.engines import Engine
from tba.engines.transformers import Transformers
from tba.types import Completion, Sampling
from tba.weights import Weights


@dataclass
class HalfFirst(Engine):
    """Two `transformers` engines: every second prompt of a search is answered by the first weights.

    Versions and log-probs of completions are those of the weights that sampled them. Both halves
    use the same random numbers. Calls with other sampling than that of the searches use the newest
    weights only.
    """

    longest_block: ClassVar[int] = 0

    def __post_init__(self) -> None:
        given = (self.policy, self.text, self.device, self.bf16, self.sampling)
        self._first = Transformers(*given)
        self._newest = Transformers(*given)

    @property
    def version(self) -> int:
        return self._newest.version

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        if sampling != self.sampling:
            return self._newest.generate(prompts, sampling, seed)
        completions: list[list[Completion]] = [[] for _ in prompts]
        completions[0::2] = self._first.generate(prompts[0::2], sampling, seed)
        completions[1::2] = self._newest.generate(prompts[1::2], sampling, seed)
        return completions

    def load_weights(self, weights: Weights) -> float | None:
        return self._newest.load_weights(weights)
