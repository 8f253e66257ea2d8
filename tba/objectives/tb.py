"""Trajectory balance with the VarGrad estimate of log Z."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tba.types import Batch, Loss


@dataclass(frozen=True)
class TrajectoryBalance:
    """Pulls pi(y|x) towards ref(y|x) exp(r(x, y) / beta) / Z(x), from any sampling policy.

    loss = (1 / 2 beta) mean_j (beta (log pi - log ref)_j - r_j + beta log Z)^2, in reward units, so that the learning rate
    does not depend on beta; beta log Z is the group's own mean, without gradient (VarGrad).
    Trajectory Balance with Asynchrony (arXiv 2503.18929), equations 3-5; trajectory balance: arXiv 2201.13259;
    VarGrad: arXiv 2010.10436.
    """

    beta: float = 0.05

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"objective.beta = {self.beta} must be above 0: it is the temperature of the target; try 0.05")

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        residual = self.beta * ((logp - batch.ref_logp) * batch.mask).sum(-1) - batch.reward
        log_z = -residual.mean(1, keepdim=True).detach()  # beta log Z: from the live policy and this group, no gradient
        return (residual + log_z).square().mean(1) / (2 * self.beta), {"tb/log_z": log_z.squeeze(1) / self.beta}
