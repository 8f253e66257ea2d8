from dataclasses import dataclass

import torch

from tba.config.tables import PositiveFloat
from tba.objectives import LARGEST, Loss, Objective, PerToken, log_ratio, normalised, token_mean
from tba.types import Batch


@dataclass(frozen=True)
class Vespo(Objective):
    """VESPO: a policy gradient whose weight falls smoothly where a response left its policy.

        loss[b] = -sum_j phi(w_j) A_j log pi(y_j) / (tokens of the group)
        phi(w)  = w^k exp(lambda (1 - w)), without gradient
        A_j     = (r_j - mean r) / (std r + 1e-4)

    w = pi / mu of the whole response, with mu the policy that sampled it. phi(1) = 1: on policy
    this is REINFORCE. phi is largest at w = k / lambda. k and lambda depend on the sign of A.

    VESPO (arXiv 2602.10693); constants as in TRL 1.16.
    """

    needs_behavior = True
    k_positive: PositiveFloat = 2.0
    """k where A >= 0."""
    lambda_positive: PositiveFloat = 3.0
    """lambda where A >= 0."""
    k_negative: PositiveFloat = 3.0
    """k where A < 0."""
    lambda_negative: PositiveFloat = 2.0
    """lambda where A < 0."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        advantage = normalised(batch.reward)
        change = log_ratio(logp.detach(), batch).sum(-1).clamp(-LARGEST, LARGEST)
        k = torch.where(advantage >= 0, self.k_positive, self.k_negative)
        rate = torch.where(advantage >= 0, self.lambda_positive, self.lambda_negative)
        phi = (k * change - rate * change.expm1()).exp()
        return -token_mean((phi * advantage)[..., None] * logp, batch), {}
