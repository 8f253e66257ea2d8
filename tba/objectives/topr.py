from dataclasses import dataclass

import torch

from tba.objectives import Loss, Objective, PerToken, importance, total
from tba.types import Batch


@dataclass(frozen=True)
class Topr(Objective):
    """TOPR: tapered REINFORCE, which forgets bad responses that are already unlikely.

        loss[b] = -mean_j w_j (r_j - c) log pi(y_j),  c = `baseline`
        w_j     = 1 where r_j >= c, else min(pi / mu, 1) of the response, without gradient

    mu is the policy that sampled y_j. There is no KL. `taper` gives `tb` similar
    weights, by the sign of its residual and by the reward.

    Tapered Off-Policy REINFORCE (arXiv 2503.14286). There, rewards are 1 and -1; rewards of 0
    and 1 minus `baseline = 0.5` are half of these.
    """

    needs_behavior = True
    learns_from_equal_rewards = True
    baseline: float = 0.5
    """c: responses with a lower reward are pushed down."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        advantage = batch.reward - self.baseline
        share = importance("sequence", logp, batch, cap=1.0)[..., 0]
        weight = torch.where(advantage >= 0, 1.0, share)
        return -(weight * advantage * total(logp, batch)).mean(1), {}
