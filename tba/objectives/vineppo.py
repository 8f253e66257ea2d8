"""PPO with values by rollouts instead of a value head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tba.objectives import Loss, ValueRollouts
from tba.objectives._terms import penalised, positive
from tba.types import Batch


@dataclass(frozen=True)
class VinePpo:
    """Clipped policy gradient whose advantages come from rollouts in search.

    loss = -mean_j sum_t [min(rho_t A_t, clip(rho_t) A_t) - beta KL_t], A_t = V(state after t's step) - V(state before it).

    A step is `step_tokens` tokens. V of the first state is the mean reward of the prompt's other responses, V of the last is r, and V
    between them the mean reward of `rollouts` new endings, which the searcher samples with the weights that made the response.
    VinePPO (arXiv 2410.01679), equations 7-8; there a step is a line, and V of the first state has rollouts of its own.
    """

    beta: float = 1e-4
    clip: float = 0.2
    rollouts: int = 4
    step_tokens: int = 16

    def __post_init__(self) -> None:
        for name, value in (("rollouts", self.rollouts), ("step_tokens", self.step_tokens)):
            if value < 1:
                raise ValueError(f"objective.{name} = {value}: at least 1")
        positive("clip", self.clip, 0.2)

    @property
    def value_rollouts(self) -> ValueRollouts:
        return ValueRollouts(self.rollouts, self.step_tokens)

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        if batch.value[batch.mask].isnan().any():
            raise ValueError(
                "these responses were found without rollouts, for another objective; begin a new run for vineppo"
            )
        summed, outside = penalised(
            logp, batch, self.advantages(batch), self.beta, self.clip, self.clip
        )
        return -summed.mean(1), {"clip_ratio": outside}

    def advantages(self, batch: Batch) -> Float[Tensor, "B K T"]:
        """Of the step that each token belongs to; `batch.value` has, at each token, V of the state before its step."""
        length = batch.mask.sum(-1, keepdim=True)
        t = torch.arange(batch.mask.shape[-1], device=length.device)
        after = ((t // self.step_tokens + 1) * self.step_tokens).expand_as(
            batch.mask
        )  # where the next step begins
        value = batch.value.masked_fill(~batch.mask, 0.0)
        next_value = torch.where(
            after < length, value.gather(-1, after.clamp(max=len(t) - 1)), batch.reward[..., None]
        )
        return (next_value - value) * batch.mask
