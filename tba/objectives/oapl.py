from dataclasses import dataclass
from math import inf, log

from tba.config.tables import PositiveFloat
from tba.objectives import Loss, Objective, PerGroup, PerResponse, PerToken, total
from tba.types import Batch


@dataclass(frozen=True)
class Oapl(Objective):
    """OAPL: regresses beta log(pi / mu) on the advantage of the optimal policy near mu.

        loss[b] = (1 / 2 beta) mean_j (beta (log pi - log mu)_j - (r_j - V))^2
        V       = b log mean_j exp(r_j / b),  b = `value_beta`

    mu is the policy that sampled y_j. The factor 1 / (2 beta), which the paper's loss lacks, makes
    the learning rate independent of beta. With f_j = beta (log pi - log mu)_j - r_j, the gradient
    is that of `tb` with mu as its reference, plus (mean f + V) mean_j grad log pi_j.

    V of K samples is a biased, low estimate of beta log E exp(r / beta), and with b other than beta
    it estimates another quantity: then the optimum is not exactly mu exp(r / beta) / Z. With
    `value_beta = inf`, V is the mean reward, as in the mirror descent of Kimi k1.5
    (arXiv 2501.12599, section 2.3.2).

    LLMs Can Learn to Reason Via Off-Policy RL (arXiv 2602.19362). In its runs on mathematics, as
    reported in NeMo RL's documentation, b is 1, beta is 1e-3, weights are sent every 50 steps,
    older samples are dropped, and the gradient of the loss without 1 / (2 beta) is clipped at 1e-3.
    """

    needs_behavior = True
    learns_from_equal_rewards = True
    beta: PositiveFloat = 1e-3
    """Temperature of the target relative to mu: smaller values weigh the reward more."""
    value_beta: PositiveFloat = 1.0
    """Temperature of V: `inf` for the mean reward of the group."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        change = total(logp - batch.behavior_logp, batch)
        error = self.beta * change - batch.reward + self.value(batch.reward)[:, None]
        return error.square().mean(1) / (2 * self.beta), {}

    def value(self, reward: PerResponse) -> PerGroup:
        """Return V of each group."""
        if self.value_beta == inf:
            return reward.mean(1)
        scaled = (reward / self.value_beta).logsumexp(1)
        return self.value_beta * (scaled - log(reward.shape[1]))
