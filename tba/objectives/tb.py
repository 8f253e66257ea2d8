from dataclasses import dataclass
from math import inf, log

import torch

from tba.config.tables import PositiveFloat, Share
from tba.objectives import (
    Importance,
    Loss,
    Objective,
    PerToken,
    Taper,
    better,
    importance,
    tapered,
    total,
)
from tba.types import Batch

SQUARED = 1e-3
"""Distance of alpha from 1 within which the squared loss is used."""
STEADY = (0.5, 1.25)
"""Range of alpha without a warning."""


@dataclass(frozen=True)
class TrajectoryBalance(Objective):
    """Trajectory balance: pulls pi(y|x) towards ref(y|x) exp(r(x, y) / beta) / Z(x).

        loss[b]    = (1 / 2 beta) mean_j w_j (beta (log pi - log ref)_j - r_j + beta log Z)^2
        beta log Z = mean_j (r_j - beta (log pi - log ref)_j), without gradient (VarGrad)

    The optimum does not depend on which policy generated the data. The loss is in units of reward,
    so that the learning rate does not depend on beta.

    `taper` chooses the weights w, which have no gradient. All positive weights have this optimum,
    even if they depend on the whole group, so mu need not be exact. With `none`, weights are 1, as
    in the paper: responses that have become unlikely since they were sampled are pushed down as
    hard as others, and training at a high learning rate oscillates even at a lag of 4
    (docs/results.md). With `residual`, responses whose probability is lowered (the term in the
    square is positive) have weight min(pi / mu, 1). With `reward`, so do all other responses whose
    reward is not above the group's mean: a bad response that has become unlikely is hardly pulled
    up again. Then log Z is the mean of min(r_j - beta (log pi - log ref)_j, m), where m is the
    largest such term among responses with a reward above the mean (unbounded if none is). Without
    m, bad responses that are far less likely than under the reference would lift log Z above the
    good ones. On policy, all weights are 1.

    With `importance_cap` c, each residual has weight min(pi / mu, c), also in the mean. This
    corrects for lag, which trajectory balance does not need; it is provided for comparison.

    `shift` s lowers the baseline: s times the mean reward of the group's other responses is
    subtracted from the term in the square. On the policy's own samples, a bounded number of steps
    old, the optimum is the same; on other samples, it is different while s is not 0. It is meant
    for rewards of 0 and 1: a group with only correct responses then raises them, as in `raft`.

    `gamma` and `tau` temper the target, which is (ref^(1 / gamma) exp(r / beta))^(1 / tau) / Z, as
    in red-teaming (arXiv 2405.18540): in the loss, log ref is divided by gamma tau, r by tau.

    With `alpha` other than 1, another loss replaces the square. It is a function of e_j, the term
    in the square without log Z (f-trajectory balance, arXiv 2605.15417). With k = 1 - alpha,

        loss[b] = (1 / beta) mean_j l(e_j - c),  l(x) = (k x + exp(-k x) - 1) / k^2
        c       = -(1 / k) log mean_j exp(-k e_j), without gradient

    The optimum is the same. On policy, the gradient is that of the Renyi divergence of order
    1 - k beta of pi from the target, times beta / (1 - k beta): with beta = 1, reverse KL at
    alpha = 1 and forward KL, which covers all modes, at alpha = 0.

    Trajectory Balance with Asynchrony (arXiv 2503.18929), equations 3-5; VarGrad: arXiv 2010.10436;
    weights by the sign of the reward: TOPR (arXiv 2503.14286). Why the optimum is the same:
    docs/algorithms.md.
    """

    beta: PositiveFloat = 0.05
    """Temperature of the target: smaller values weigh the reward more, larger ones keep more of the
    reference's diversity."""
    taper: Taper | None = None
    """Responses with weight min(pi / mu, 1). residual: those that are pushed down; reward: also
    those whose reward is not above the group's mean; none: the paper's loss. Default:
    residual, or none if `importance_cap` or `alpha` is given."""
    shift: Share = 0.0
    """Subtract this times the mean reward of the group's other responses from the baseline; for
    rewards of 0 and 1 and the policy's own samples. It may follow a schedule that ends at 0."""
    importance_cap: PositiveFloat | None = None
    """Upper bound of the importance weights; default: no weights."""
    gamma: PositiveFloat = 1.0
    """Temperature of the reference in the target; above 1, the reward weighs more."""
    tau: PositiveFloat = 1.0
    """Temperature of the whole target; above 1, it is flatter."""
    alpha: float = 1.0
    """1: squared loss. Below 1, improbable good responses weigh more; above, probable bad ones."""

    learns_from_equal_rewards = True

    def __post_init__(self) -> None:
        weighs = self.taper in ("reward", "residual")
        if [weighs, self.importance_cap is not None, self.alpha != 1].count(True) > 1:
            raise ValueError(
                "objective.taper, objective.importance_cap and objective.alpha exclude each"
                " other; give one of them"
            )
        if self.shift and self.alpha != 1:
            raise ValueError("objective.shift is for the squared loss; remove objective.alpha")

    @property
    def warning(self) -> str | None:
        low, high = STEADY
        if low <= self.alpha <= high:
            return None
        return (
            f"objective.alpha = {self.alpha:g}: outside {low:g} to {high:g}, a single response can"
            " have almost all of the weight of a group; watch grad_norm"
        )

    @property
    def tapers_by(self) -> Taper:
        """Return the taper in use: the option or its default."""
        by_default = self.importance_cap is None and self.alpha == 1
        return self.taper or ("residual" if by_default else "none")

    @property
    def needs_behavior(self) -> bool:
        return self.importance_cap is not None

    @property
    def needs_own_samples(self) -> bool:
        return self.shift > 0

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        kl = total(logp - batch.ref_logp / (self.gamma * self.tau), batch)
        reward = batch.reward / self.tau
        residual = self.beta * kl - reward
        if abs(self.alpha - 1) > SQUARED:
            k = 1 - self.alpha
            fixed = residual.detach()
            beta_log_z = ((-k * fixed).logsumexp(1) - log(fixed.shape[1])) / k
            # exp(-scaled) has mean 1: it is at most K
            scaled = k * (residual + beta_log_z[:, None])
            loss = (scaled + (-scaled).expm1()).mean(1) / (k * k * self.beta)
            return loss, {"tb/log_z": beta_log_z / self.beta}
        kind: Importance = "none" if self.importance_cap is None else "sequence"
        weight = importance(kind, logp, batch, self.importance_cap or 1.0)[..., 0]
        # its mean is beta log Z: from the live policy and this group only, without a gradient
        value = -residual.detach()
        if self.tapers_by == "reward":
            is_better = better(batch.reward)
            best = value.masked_fill(~is_better, -inf).amax(1, keepdim=True)
            value = torch.where(is_better.any(1, keepdim=True), value.clamp(max=best), value)
        beta_log_z = (weight * value).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        error = residual + beta_log_z
        weight = weight * tapered(self.tapers_by, error, logp, batch)
        metrics = {"tb/log_z": beta_log_z.squeeze(1) / self.beta}
        if self.shift:
            others = (reward.sum(1, keepdim=True) - reward) / (batch.samples - 1)
            error = error - self.shift * others
            is_graded = (batch.reward != 0) & (batch.reward != 1)
            metrics["tb/graded"] = is_graded.float().mean(1)
        loss = (weight * error.square()).mean(1) / (2 * self.beta)
        return loss, metrics
