from dataclasses import dataclass

from tba.config.tables import PositiveFloat
from tba.objectives import (
    Importance,
    Loss,
    Objective,
    PerToken,
    centred,
    importance,
    token_mean,
    total,
)
from tba.types import Batch


@dataclass(frozen=True)
class TBAPrime(Objective):
    """TBA': trajectory balance as a policy gradient, with a centred KL in the advantage.

        loss[b] = -sum_j A_j sum_t w_jt log pi_jt / (tokens of the group)
        A_j     = (r_j - mean r) - beta (KL_j - mean KL), without gradient

    KL_j is the sum of the live policy's log-ratios to the reference, each clamped to
    +-`log_ratio_clamp`; w_jt = min(pi / mu, `importance_cap`) of a token. With neither, this is the
    gradient of `tb` divided by the mean length of the group. The paper resets the reference every
    50 steps (`policy.reset_reference_every`) and keeps the lag constant (`runtime.lag`).

    Trajectory Balance with Asynchrony (arXiv 2503.18929), TBA' in the section on MATH.
    """

    beta: PositiveFloat = 0.005
    """Coefficient of the KL to the reference."""
    log_ratio_clamp: PositiveFloat = 10.0
    """Clamp each token's log-ratio to the reference to +- this value."""
    importance: Importance = "token"
    """Importance weights per token, per response, or none."""
    importance_cap: PositiveFloat = 8.0
    """Upper bound of the importance weights."""

    learns_from_equal_rewards = True

    @property
    def needs_behavior(self) -> bool:
        return self.importance != "none"

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        bound = self.log_ratio_clamp
        kl = total((logp.detach() - batch.ref_logp).clamp(-bound, bound), batch)
        advantage = centred(batch.reward - self.beta * kl)
        weight = importance(self.importance, logp, batch, self.importance_cap)
        loss = -token_mean(advantage[..., None] * weight * logp, batch)
        log_z = (batch.reward / self.beta - kl).mean(1)
        return loss, {"tb/advantage_std": advantage.std(1), "tb/log_z": log_z}
