from dataclasses import dataclass

from tba.config.tables import PositiveFloat
from tba.objectives import (
    Loss,
    Objective,
    PerToken,
    importance,
    log_ratio,
    ratio,
    standardised,
    token_mean,
)
from tba.types import Batch


@dataclass(frozen=True)
class Cispo(Objective):
    """CISPO: policy gradient with capped weights, where every token keeps a gradient.

        loss[b] = -sum_jt min(rho_jt, cap) A_j log pi_jt / (tokens of the group)
        A_j     = (r_j - mean r) / (std r + 1e-4)

    rho = pi / mu of a token, with mu the policy that sampled it; the weight has no gradient.

    MiniMax-M1 (arXiv 2506.13585), equation 4, where the mean is over the tokens of all groups;
    `cap` as in ScaleRL (arXiv 2510.13786) and TRL.
    """

    needs_behavior = True
    cap: PositiveFloat = 5.0
    """Upper bound of the weights."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        weight = importance("token", logp, batch, self.cap)
        loss = -token_mean(weight * standardised(batch.reward)[..., None] * logp, batch)
        above = ratio(log_ratio(logp.detach(), batch)) > self.cap
        return loss, {"clip_ratio": token_mean(above.float(), batch)}
