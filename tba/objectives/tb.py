"""Trajectory balance with the VarGrad estimate of log Z."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tba.objectives import Loss
from tba.objectives._terms import importance, positive, total
from tba.types import Batch


@dataclass(frozen=True)
class TrajectoryBalance:
    """Pulls pi(y|x) towards ref(y|x) exp(r(x, y) / beta) / Z(x), from any sampling policy.

    loss = (1 / 2 beta) mean_j (beta (log pi - log ref)_j - r_j + beta log Z)^2, in reward units, so that the learning rate
    does not depend on beta; beta log Z is the group's own mean, without gradient (VarGrad).
    With `importance_cap` c each residual counts min(pi / mu, c) times, in the mean too: a correction for delay (biased by
    the cap, and by O(1 / K)), which trajectory balance does not need, to be compared with. Without it nothing is weighted.
    Trajectory Balance with Asynchrony (arXiv 2503.18929), equations 3-5; trajectory balance: arXiv 2201.13259;
    VarGrad: arXiv 2010.10436.
    """

    beta: float = 0.05
    importance_cap: float | None = None
    log_ratio_clamp: float | None = None
    """Each token's log pi - log ref counts, and gets a gradient, within +- this only; default: no clamp."""

    def __post_init__(self) -> None:
        positive("beta", self.beta, 0.05)
        for name, value, instead in (
            ("importance_cap", self.importance_cap, 2.0),
            ("log_ratio_clamp", self.log_ratio_clamp, 10.0),
        ):
            if value is not None:
                positive(name, value, instead)

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        bound = float("inf") if self.log_ratio_clamp is None else self.log_ratio_clamp
        residual = (
            self.beta * total((logp - batch.ref_logp).clamp(-bound, bound), batch) - batch.reward
        )
        corrected = self.importance_cap is not None
        weight = importance(
            "sequence" if corrected else "none", logp, batch, self.importance_cap or 1.0
        )[..., 0]
        log_z = -(weight * residual.detach()).sum(1, keepdim=True) / weight.sum(
            1, keepdim=True
        )  # beta log Z: live policy, this group, no gradient
        return (weight * (residual + log_z).square()).mean(1) / (2 * self.beta), {
            "tb/log_z": log_z.squeeze(1) / self.beta
        }
