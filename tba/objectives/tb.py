from dataclasses import dataclass
from math import log

import torch

from tba.config.tables import PositiveFloat
from tba.objectives import (
    Importance,
    Loss,
    Objective,
    PerGroup,
    PerResponse,
    PerToken,
    importance,
    total,
)
from tba.types import Batch

SQUARED = 1e-3
"""Values of alpha this near to 1 have the squared loss."""
STEADY = (0.5, 1.25)
"""Values of alpha without a warning."""


@dataclass(frozen=True)
class TrajectoryBalance(Objective):
    """Trajectory balance: pulls pi(y|x) towards ref(y|x) exp(r(x, y) / beta) / Z(x).

        loss[b]    = (1 / 2 beta) mean_j (beta (log pi - log ref)_j - r_j + beta log Z)^2
        beta log Z = mean_j (r_j - beta (log pi - log ref)_j), without gradient (VarGrad)

    The optimum does not depend on which policy generated the data. The loss is in units of reward,
    so that the learning rate does not depend on beta.

    With `tapered`, the default, responses whose probability is lowered (the term in the square is
    above 0) have weight min(pi / mu, 1). The optimum is the same, and so is the loss on policy.
    Without it, as in the paper, responses that have become unlikely since they were sampled are
    pushed down as hard as others, and training at a high learning rate oscillates even at a lag of
    4 (docs/results.md). Since any weights above 0 have this optimum, mu need not be exact.

    With `importance_cap` c, each residual has weight min(pi / mu, c), also in the mean. This
    corrects for lag. Trajectory balance does not need it; it is there for comparison.

    `gamma` and `tau` temper the target, which is (ref^(1 / gamma) exp(r / beta))^(1 / tau) / Z, as
    for red-teaming (arXiv 2405.18540): in the loss, log ref is divided by gamma tau, r by tau.

    With `alpha` other than 1, the square gives way to another loss of e_j, the term in it without
    log Z (f-trajectory balance, arXiv 2605.15417). With k = 1 - alpha,

        loss[b] = (1 / beta) mean_j l(e_j - c),  l(x) = (k x + exp(-k x) - 1) / k^2
        c       = -(1 / k) log mean_j exp(-k e_j), without gradient

    The optimum is the same. On policy, the gradient is that of the Renyi divergence of order
    1 - k beta of pi from the target, times beta / (1 - k beta): with beta = 1, reverse KL at
    alpha = 1 and forward KL, which covers all modes, at alpha = 0.

    Trajectory Balance with Asynchrony (arXiv 2503.18929), equations 3-5; VarGrad: arXiv 2010.10436;
    tapered weights, there for the sign of the reward: TOPR (arXiv 2503.14286).
    """

    beta: PositiveFloat = 0.05
    """Temperature of the target: smaller values weigh the reward more."""
    tapered: bool | None = None
    """Weigh responses that are pushed down by min(pi / mu, 1); default: true, unless
    `importance_cap` or `alpha` is given. false: the loss of the paper."""
    importance_cap: PositiveFloat | None = None
    """Upper bound of the importance weights; default: no weights."""
    gamma: PositiveFloat = 1.0
    """Temperature of the reference in the target; above 1, the reward weighs more."""
    tau: PositiveFloat = 1.0
    """Temperature of the whole target; above 1, it is flatter."""
    alpha: float = 1.0
    """1: squared loss. Below 1, improbable good responses weigh more; above, probable bad ones."""

    def __post_init__(self) -> None:
        if [self.tapered, self.importance_cap is not None, self.alpha != 1].count(True) > 1:
            raise ValueError(
                "objective.tapered, objective.importance_cap and objective.alpha exclude each"
                " other; give one of them"
            )

    @property
    def warning(self) -> str | None:
        low, high = STEADY
        if low <= self.alpha <= high:
            return None
        return (
            f"objective.alpha = {self.alpha:g}: outside {low:g} to {high:g}, single responses can"
            " have almost all of the weight of a group; watch grad_norm"
        )

    @property
    def tapers(self) -> bool:
        """Return whether the loss is tapered, by the option or by default."""
        by_default = self.importance_cap is None and self.alpha == 1
        return by_default if self.tapered is None else self.tapered

    @property
    def needs_behavior(self) -> bool:
        return self.importance_cap is not None

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        kl = total(logp - batch.ref_logp / (self.gamma * self.tau), batch)
        residual = self.beta * kl - batch.reward / self.tau
        if abs(self.alpha - 1) > SQUARED:
            loss, log_z = self._by_divergence(residual)
            return loss, {"tb/log_z": log_z / self.beta}
        kind: Importance = "none" if self.importance_cap is None else "sequence"
        weight = importance(kind, logp, batch, self.importance_cap or 1.0)[..., 0]
        # beta log Z: live policy, this group, no gradient
        weighted = (weight * residual.detach()).sum(1, keepdim=True)
        log_z = -weighted / weight.sum(1, keepdim=True)
        error = residual + log_z
        if self.tapers:
            share = importance("sequence", logp, batch, cap=1.0)[..., 0]
            weight = torch.where(error > 0, share, 1.0)
        loss = (weight * error.square()).mean(1) / (2 * self.beta)
        return loss, {"tb/log_z": log_z.squeeze(1) / self.beta}

    def _by_divergence(self, residual: PerResponse) -> tuple[PerGroup, PerGroup]:
        """Return the loss with `alpha`, and beta log Z, from residuals without log Z."""
        k = 1 - self.alpha
        fixed = residual.detach()
        log_z = ((-k * fixed).logsumexp(1) - log(fixed.shape[1])) / k
        scaled = k * (residual + log_z[:, None])  # exp(-scaled) has mean 1, and is K at most
        return (scaled + (-scaled).expm1()).mean(1) / (k * k * self.beta), log_z
