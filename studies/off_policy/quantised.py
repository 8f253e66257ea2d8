"""An engine that searches with rounded weights, as int8 and int4 kernels do, on any machine.

engine.use = "studies.off_policy.quantised.Quantised"

The policy that samples is not the policy that is trained. Its log-probs are its own, so that
objectives with importance weights can correct for the difference. Evaluations are of the exact
weights: they must sample otherwise than the searches do (`eval.samples`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from tba.engines import Engine
from tba.engines.transformers import Transformers
from tba.types import Completion, Sampling
from tba.weights import Weights


@dataclass
class Quantised(Engine):
    """Two `transformers` engines: searches are of the rounded weights, all else of the exact ones.

    A weight of a linear layer is rounded to the nearest of 2^bits - 1 values, symmetric around 0,
    with one scale for each output. Embeddings and the head are exact. 32 bits: nothing is rounded.
    """

    longest_block: ClassVar[int] = 0
    bits: Literal[2, 3, 4, 8, 32] = 8
    """Bits of a weight."""

    def __post_init__(self) -> None:
        given = (self.policy, self.text, self.device, self.bf16, self.sampling)
        self._exact = Transformers(*given)
        self._rounded = Transformers(*given)
        self._round()

    @property
    def version(self) -> int:
        return self._exact.version

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        engine = self._rounded if sampling == self.sampling else self._exact
        return engine.generate(prompts, sampling, seed)

    def load_weights(self, weights: Weights) -> float | None:
        """Load the exact weights, and compare them; then the rounded ones."""
        gap = self._exact.load_weights(weights)
        self._rounded.load_weights(weights)
        self._round()
        return gap

    @torch.no_grad()
    def _round(self) -> None:
        if self.bits == 32:
            return
        model = self._rounded.model
        for layer in model.base_model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(rounded(layer.weight, self.bits))


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a weight of shape (out, in) as it is after quantisation."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    return (weight / scale).round() * scale
