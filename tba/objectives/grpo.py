"""Group relative policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tba.objectives import Loss
from tba.objectives._terms import centred, penalised, positive
from tba.types import Batch


@dataclass(frozen=True)
class Grpo:
    """Clipped policy gradient, rewards in units of the group's spread, KL as a loss of its own.

    loss = -mean_j (1 / T_j) sum_t [min(rho_t A_j, clip(rho_t) A_j) - beta KL_t], A_j = (r_j - mean r) / (std r + 1e-4).

    rho_t = pi / mu of a token, mu being the policy that sampled it; KL_t is the k3 estimate of the KL to the reference.
    `clip_high` above `clip` is DAPO's clip-higher (arXiv 2503.14476).
    DeepSeekMath (arXiv 2402.03300), equation 3.
    """

    beta: float = 0.04
    clip: float = 0.2
    clip_high: float | None = None

    def __post_init__(self) -> None:
        positive("clip", self.clip, 0.2)
        if self.clip_high is not None:
            positive("clip_high", self.clip_high, 0.28)
            if self.clip_high < self.clip:
                raise ValueError(
                    f"objective.clip_high = {self.clip_high} is below objective.clip = {self.clip}; write {self.clip} or more"
                )

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        advantage = (centred(batch.reward) / (batch.reward.std(1, keepdim=True) + 1e-4))[..., None]
        summed, outside = penalised(
            logp,
            batch,
            advantage,
            self.beta,
            self.clip,
            self.clip if self.clip_high is None else self.clip_high,
        )
        return -(summed / batch.mask.sum(-1)).mean(1), {"clip_ratio": outside}
