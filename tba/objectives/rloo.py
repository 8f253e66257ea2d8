"""REINFORCE with a leave-one-out baseline, KL in the reward."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tba.types import Batch, Loss


@dataclass(frozen=True)
class Rloo:
    """loss = -mean_j A_j log pi(y_j), A_j = R_j - mean of the others' R, R = r - beta (log mu - log ref).

    mu is the policy that sampled y_j: the reward of a response is settled when it is sampled. Unbiased only on policy:
    there is no correction for data that other weights made.
    Back to Basics (arXiv 2402.14740), equation 7. A_j is K / (K - 1) times the mean-baseline advantage, so that on
    policy its gradient is K / (K - 1) times that of trajectory balance.
    """

    beta: float = 0.05

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        total = (logp * batch.mask).sum(-1)
        kl = ((batch.behavior_logp - batch.ref_logp) * batch.mask).sum(-1)
        value = batch.reward - self.beta * kl
        k = batch.samples
        advantage = (value - value.mean(1, keepdim=True)) * k / (k - 1)
        return -(advantage * total).mean(1), {"rloo/advantage_std": advantage.std(1)}
