"""GRPO done right: without its two normalisers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tba.objectives import Loss
from tba.objectives._terms import centred, penalised, positive
from tba.types import Batch


@dataclass(frozen=True)
class DrGrpo:
    """GRPO without its two normalisers.

    loss = -mean_j sum_t [min(rho_t A_j, clip(rho_t) A_j) - beta KL_t], A_j = r_j - mean r.

    As `grpo`, but neither divided by the response's length, which favours long wrong answers, nor by the rewards' spread,
    which favours prompts that are nearly always or nearly never answered.
    Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3; there without KL.
    """

    beta: float = 0.0
    clip: float = 0.2

    def __post_init__(self) -> None:
        positive("clip", self.clip, 0.2)

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        summed, outside = penalised(
            logp, batch, centred(batch.reward)[..., None], self.beta, self.clip, self.clip
        )
        return -summed.mean(1), {"clip_ratio": outside}
