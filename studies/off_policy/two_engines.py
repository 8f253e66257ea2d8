"""The base of engines whose searches sample from other weights than those that are trained."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tba.engines import Engine
from tba.engines.transformers import Transformers
from tba.types import Completion, Sampling
from tba.weights import Weights


@dataclass
class TwoEngines(Engine):
    """Two `transformers` engines: one with the exact weights, and one with others.

    Calls with the sampling of the searches may use both; all other calls use the exact weights.
    So evaluations are of the exact weights if they sample otherwise (`eval.samples`).
    """

    longest_block: ClassVar[int] = 0

    def __post_init__(self) -> None:
        given = (self.policy, self.text, self.device, self.bf16, self.sampling)
        self._exact = Transformers(*given)
        self._other = Transformers(*given)

    @property
    def version(self) -> int:
        return self._exact.version

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        generate = self.search if sampling == self.sampling else self._exact.generate
        return generate(prompts, sampling, seed)

    @abstractmethod
    def search(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """Return the completions of a search, as `generate` does."""

    def load_weights(self, weights: Weights) -> float | None:
        return self._exact.load_weights(weights)
