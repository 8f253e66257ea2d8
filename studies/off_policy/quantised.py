"""An engine that searches with rounded weights, as int8 and int4 kernels do, on any machine.

engine.use = "studies.off_policy.quantised.Quantised"

The policy that samples is not the policy that is trained. Its log-probs are its own, so that
objectives with importance weights can correct for the difference. Evaluations are of the exact
weights: they must sample otherwise than the searches do (`eval.samples`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from studies.off_policy.two_engines import TwoEngines
from tba.types import Completion, Sampling
from tba.weights import Weights


@dataclass
class Quantised(TwoEngines):
    """Searches are of the rounded weights.

    A weight of a linear layer is rounded to the nearest of 2^bits - 1 values, symmetric around 0,
    with one scale for each output. Embeddings and the head are exact. 32 bits: nothing is rounded.
    """

    bits: Literal[2, 3, 4, 8, 32] = 8
    """Bits of a weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._round()

    def search(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        return self._other.generate(prompts, sampling, seed)

    def load_weights(self, weights: Weights) -> float | None:
        """Load the exact weights, and compare them; then the rounded ones."""
        gap = super().load_weights(weights)
        self._other.load_weights(weights)
        self._round()
        return gap

    @torch.no_grad()
    def _round(self) -> None:
        if self.bits == 32:
            return
        model = self._other.model
        for layer in model.base_model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(rounded(layer.weight, self.bits))


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a weight of shape (out, in) as it is after quantisation."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    return (weight / scale).round() * scale
