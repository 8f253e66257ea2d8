"""An engine that searches with two policies: the first weights, and the newest.

engine.use = "studies.coverage.mixed.HalfFirst"

With `runtime.lag=0`, half of each batch is as old as the run, and half is on policy. Evaluations
are of the newest weights: they must sample otherwise than the searches do (`eval.samples`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from studies.off_policy.two_engines import TwoEngines
from tba.types import Completion, Sampling


@dataclass
class HalfFirst(TwoEngines):
    """Every second prompt of a search is answered by the first weights.

    Versions and log-probs of completions are those of the weights that sampled them. Both halves
    use the same random numbers.
    """

    def search(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        completions: list[list[Completion]] = [[] for _ in prompts]
        completions[0::2] = self._other.generate(prompts[0::2], sampling, seed)
        completions[1::2] = self._exact.generate(prompts[1::2], sampling, seed)
        return completions
