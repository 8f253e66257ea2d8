"""Trajectory balance (TB) with the VarGrad estimate of log Z."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tba.objectives import Loss
from tba.objectives._terms import Importance, importance, positive, total
from tba.types import Batch


@dataclass(frozen=True)
class TrajectoryBalance:
    """Trajectory balance: pulls pi(y|x) towards ref(y|x) exp(r(x, y) / beta) / Z(x).

        loss[b]    = (1 / 2 beta) mean_j (beta (log pi - log ref)_j - r_j + beta log Z)^2
        beta log Z = mean_j (r_j - beta (log pi - log ref)_j), without gradient (VarGrad)

    The optimum does not depend on which policy generated the data. The loss is in units of reward,
    so that the learning rate does not depend on beta.

    With `importance_cap` c, each residual has weight min(pi / mu, c), also in the mean. This
    correction for lag, biased by the cap and by O(1 / K), is there for comparison: trajectory
    balance does not need it.

    Trajectory Balance with Asynchrony (arXiv 2503.18929), equations 3-5; trajectory balance:
    arXiv 2201.13259; VarGrad: arXiv 2010.10436.
    """

    beta: float = 0.05
    """Temperature of the target: smaller values weigh the reward more."""
    importance_cap: float | None = None
    """Upper bound of the importance weights; default: no weights."""
    log_ratio_clamp: float | None = None
    """Clamp each token's log pi - log ref to +- this value; beyond it there is no gradient.
    Default: no clamp."""

    def __post_init__(self) -> None:
        positive("beta", self.beta, 0.05)
        if self.importance_cap is not None:
            positive("importance_cap", self.importance_cap, 2.0)
        if self.log_ratio_clamp is not None:
            positive("log_ratio_clamp", self.log_ratio_clamp, 10.0)

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        bound = float("inf") if self.log_ratio_clamp is None else self.log_ratio_clamp
        kl = total((logp - batch.ref_logp).clamp(-bound, bound), batch)
        residual = self.beta * kl - batch.reward
        kind: Importance = "none" if self.importance_cap is None else "sequence"
        weight = importance(kind, logp, batch, self.importance_cap or 1.0)[..., 0]
        # beta log Z: live policy, this group, no gradient
        weighted = (weight * residual.detach()).sum(1, keepdim=True)
        log_z = -weighted / weight.sum(1, keepdim=True)
        loss = (weight * (residual + log_z).square()).mean(1) / (2 * self.beta)
        return loss, {"tb/log_z": log_z.squeeze(1) / self.beta}
