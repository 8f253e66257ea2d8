"""REINFORCE with a leave-one-out baseline, KL in the reward."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tba.objectives import Loss
from tba.objectives._terms import (
    Importance,
    importance,
    leave_one_out,
    of_response,
    positive,
    regularised,
)
from tba.types import Batch


@dataclass(frozen=True)
class Rloo:
    """A policy gradient whose baseline is the mean of the other responses, with the KL in the reward.

    loss = -mean_j A_j log pi(y_j), A_j = R_j - mean of the others' R, R = r - beta (log mu - log ref).

    mu is the policy that sampled y_j: the reward of a response is settled when it is sampled. Unbiased for that reward on policy
    only, unless `importance` weighs the tokens, or whole responses, by min(pi / mu, `importance_cap`).
    Back to Basics (arXiv 2402.14740), equation 7. A_j is K / (K - 1) times the mean-baseline advantage, so that on
    policy its gradient is K / (K - 1) times that of trajectory balance.
    """

    beta: float = 0.05
    importance: Importance = "none"
    importance_cap: float = 2.0
    length_normalised: bool = False
    """log pi(y_j) as a mean over tokens."""

    def __post_init__(self) -> None:
        positive("importance_cap", self.importance_cap, 2.0)

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        advantage = leave_one_out(regularised(batch, self.beta))
        weight = importance(self.importance, logp, batch, self.importance_cap)
        return -(advantage * of_response(weight * logp, batch, self.length_normalised)).mean(1), {
            "rloo/advantage_std": advantage.std(1)
        }
