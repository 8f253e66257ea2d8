"""Proximal policy optimisation with a value head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tba.objectives import Head, Loss
from tba.objectives._terms import clipped, log_ratio, outside, positive, ratio, total
from tba.types import Batch


@dataclass(frozen=True)
class Ppo:
    """Clipped policy gradient whose advantages come from a value head.

    loss = -mean_j sum_t min(rho_t A_t, clip(rho_t) A_t) + value_coefficient / 2 mean_j sum_t (V_t - (A_t + V_t without gradient))^2.

    A token is an action and its reward is -beta (log mu - log ref), plus r at the last one. A_t is the generalised advantage
    estimate (arXiv 1506.02438) with the live value head, which stands on the policy's own hidden states. Where
    pi = mu rho is 1, and this is a plain policy gradient.
    Proximal Policy Optimization (arXiv 1707.06347), equations 7, 9, 11; for language models arXiv 2203.02155.
    """

    beta: float = 0.05
    clip: float = 0.2
    discount: float = 1.0
    gae_lambda: float = 0.95
    value_coefficient: float = 0.1
    head_learning_rate: float = 0.01
    """Of AdamW for the head; it follows the schedule of the policy's rate."""

    def __post_init__(self) -> None:
        for name, value, instead in (
            ("clip", self.clip, 0.2),
            ("head_learning_rate", self.head_learning_rate, 0.01),
        ):
            positive(name, value, instead)
        for name, value in (("discount", self.discount), ("gae_lambda", self.gae_lambda)):
            if not 0 <= value <= 1:
                raise ValueError(f"objective.{name} = {value} must be from 0 to 1")

    @property
    def head(self) -> Head:
        return Head("response", self.head_learning_rate)

    def __call__(
        self, logp: Float[Tensor, "B K T"], batch: Batch, head: Float[Tensor, "B K T"]
    ) -> Loss:
        advantage = self.advantages(head.detach(), batch)
        rho = ratio(log_ratio(logp, batch))
        error = (head - (advantage + head.detach())) * batch.mask
        loss = total(
            -clipped(rho, advantage, self.clip, self.clip)
            + self.value_coefficient / 2 * error.square(),
            batch,
        ).mean(1)
        value_error = (total(error.detach().square(), batch) / batch.mask.sum(-1)).mean(1)
        return loss, {
            "clip_ratio": outside(rho, self.clip, self.clip, batch),
            "ppo/value_error": value_error,
        }

    def advantages(self, value: Float[Tensor, "B K T"], batch: Batch) -> Float[Tensor, "B K T"]:
        """Generalised advantage estimates from V of the state before each token; the state after the last is worth 0."""
        mask = batch.mask.float()
        last = mask - torch.nn.functional.pad(mask[..., 1:], (0, 1))
        reward = (
            -self.beta * (batch.behavior_logp - batch.ref_logp) + last * batch.reward[..., None]
        ) * mask
        value = value * mask
        delta = reward + self.discount * torch.nn.functional.pad(value[..., 1:], (0, 1)) - value
        found = torch.zeros_like(delta)
        after = torch.zeros_like(batch.reward)
        for t in reversed(range(delta.shape[-1])):
            after = delta[..., t] + self.discount * self.gae_lambda * after
            found[..., t] = after
        return found * mask
