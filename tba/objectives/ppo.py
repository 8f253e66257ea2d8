from dataclasses import dataclass

import torch

from tba.config.tables import NotNegative, PositiveFloat, Share
from tba.objectives import (
    Head,
    Loss,
    Objective,
    PerToken,
    clipped,
    log_ratio,
    outside,
    ratio,
    total,
    whitened,
)
from tba.types import Batch


@dataclass(frozen=True)
class Ppo(Objective):
    """PPO: clipped policy gradient with advantages from a value head.

        loss[b] = mean_j sum_t [-min(rho_t A_t, clip(rho_t) A_t) + c / 2 (V_t - target_t)^2]
        target  = A_t + V_t, without gradient

    c is `value_coefficient`. The reward of a token is -beta (log mu - log ref), plus r at the last
    one. A_t is the generalised advantage estimate (arXiv 1506.02438) with the live value head.

    Implementations for language models usually whiten over the tokens of the whole batch; `whiten`
    does so over a group's tokens, so that a group's loss depends on that group only.

    Proximal Policy Optimization (arXiv 1707.06347), equations 7, 9 and 11; for language models
    arXiv 2203.02155.
    """

    needs_behavior = True
    learns_from_equal_rewards = True
    beta: NotNegative = 0.05
    """Coefficient of the KL to the reference."""
    clip: PositiveFloat = 0.2
    """Clip ratios to [1 - clip, 1 + clip]."""
    discount: Share = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """Lambda of the generalised advantage estimate."""
    value_coefficient: float = 0.1
    """Weight of the value loss."""
    head_learning_rate: PositiveFloat = 0.01
    """AdamW's learning rate for the head; it follows the policy's schedule."""
    whiten: bool = False
    """Whiten advantages: mean 0 and variance 1 over the tokens of a group."""

    @property
    def head(self) -> Head:
        return Head("response", self.head_learning_rate)

    def __call__(self, logp: PerToken, batch: Batch, head: PerToken) -> Loss:
        value = head.detach()
        advantage = self.advantages(value, batch)
        rho = ratio(log_ratio(logp, batch))
        scaled = whitened(advantage, batch) if self.whiten else advantage
        surrogate = clipped(rho, scaled, self.clip, self.clip)
        error = (head - (advantage + value)) * batch.mask
        value_loss = self.value_coefficient / 2 * error.square()
        loss = total(value_loss - surrogate, batch).mean(1)
        value_error = total(error.detach().square(), batch) / batch.mask.sum(-1)
        clip_ratio = outside(rho, self.clip, self.clip, batch)
        return loss, {"clip_ratio": clip_ratio, "ppo/value_error": value_error.mean(1)}

    def advantages(self, value: PerToken, batch: Batch) -> PerToken:
        """Return the advantages; `value` is V before each token, and V after the last is 0.

        A step goes from one sampled token to the next; tokens of the environment are skipped.
        """
        reward = -self.beta * (batch.behavior_logp - batch.ref_logp)
        advantage = torch.zeros_like(value)
        next_value = torch.zeros_like(batch.reward)
        after = torch.zeros_like(batch.reward)
        arriving = batch.reward  # at the last token
        for t in reversed(range(value.shape[-1])):
            sampled = batch.mask[..., t]
            v = value[..., t]
            delta = reward[..., t] + arriving + self.discount * next_value - v
            gained = delta + self.discount * self.gae_lambda * after
            advantage[..., t] = torch.where(sampled, gained, 0.0)
            after = torch.where(sampled, gained, after)
            next_value = torch.where(sampled, v, next_value)
            arriving = torch.where(sampled, 0.0, arriving)
        return advantage
