from dataclasses import dataclass

import torch

from tba.objectives import (
    MAX_LOG_RATIO,
    Loss,
    Objective,
    PerToken,
    log_ratio,
    standardised,
    token_mean,
)
from tba.types import Batch


@dataclass(frozen=True)
class Vespo(Objective):
    """VESPO: policy gradient with weights that decay smoothly as responses become off-policy.

        loss[b] = -sum_j phi(w_j) A_j log pi(y_j) / (tokens of the group)
        phi(w)  = w^k exp(lambda (1 - w)), without gradient
        A_j     = (r_j - mean r) / (std r + 1e-4)

    w = pi / mu of the whole response, with mu the policy that sampled it. phi(1) = 1: on policy
    this is REINFORCE. phi is largest at w = k / lambda. (k, lambda) is (2, 3) where
    A >= 0, and (3, 2) elsewhere.

    VESPO (arXiv 2602.10693); constants as in TRL 1.16.
    """

    needs_behavior = True

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        advantage = standardised(batch.reward)
        change = log_ratio(logp.detach(), batch).sum(-1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        k = torch.where(advantage >= 0, 2.0, 3.0)
        rate = torch.where(advantage >= 0, 3.0, 2.0)
        phi = (k * change - rate * change.expm1()).exp()
        return -token_mean((phi * advantage)[..., None] * logp, batch), {}
