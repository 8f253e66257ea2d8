from dataclasses import dataclass

import torch

from tba.config.tables import NotNegative, Positive, PositiveFloat
from tba.objectives import Loss, Objective, PerToken, ValueRollouts, penalised, whitened
from tba.types import Batch


@dataclass(frozen=True)
class VinePpo(Objective):
    """VinePPO: clipped policy gradient with advantages from rollouts during search.

        loss[b] = -mean_j sum_t [min(rho_t A_t, clip(rho_t) A_t) - beta KL_t]
        A_t     = V(state after t's step) - V(state before it)

    A step is `step_tokens` tokens. V of the first state is the mean reward of the prompt's other
    responses, V of the last is r, and V between them is the mean reward of `rollouts`
    continuations, sampled with the weights that made the response.

    The authors use 9 rollouts, and whiten over the tokens of the batch (here, of a group):
    `objective.rollouts=9 objective.whiten=true`.

    VinePPO (arXiv 2410.01679), equations 7-8; there a step is a line, and V of the first state
    is also estimated by rollouts.
    """

    needs_behavior = True
    learns_from_equal_rewards = True
    beta: NotNegative = 1e-4
    """Coefficient of the KL to the reference."""
    clip: PositiveFloat = 0.2
    """Clip ratios to [1 - clip, 1 + clip]."""
    rollouts: Positive = 4
    """Continuations to sample from each state. The authors: 9."""
    step_tokens: Positive = 16
    """Tokens per step."""
    whiten: bool = False
    """Whiten advantages: mean 0 and variance 1 over the tokens of a group. The authors: true."""

    @property
    def value_rollouts(self) -> ValueRollouts:
        return ValueRollouts(self.rollouts, self.step_tokens)

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        if (batch.value.isnan() & batch.mask).any():  # an index by the mask would wait once more
            raise ValueError(
                "these responses were sampled for another objective, without rollouts;"
                " start a new run for vineppo"
            )
        advantage = self.advantages(batch)
        if self.whiten:
            advantage = whitened(advantage, batch)
        summed, outside = penalised(logp, batch, advantage, self.beta, self.clip, self.clip)
        return -summed.mean(1), {"clip_ratio": outside}

    def advantages(self, batch: Batch) -> PerToken:
        """Return the advantage of each token's step; `batch.value` is V of the state before it."""
        length = batch.mask.sum(-1, keepdim=True)
        t = torch.arange(batch.mask.shape[-1], device=length.device)
        next_step = (t // self.step_tokens + 1) * self.step_tokens
        after = next_step.expand_as(batch.mask)
        value = batch.value.masked_fill(~batch.mask, 0.0)
        later = value.gather(-1, after.clamp(max=len(t) - 1))
        next_value = torch.where(after < length, later, batch.reward[..., None].to(value.dtype))
        return (next_value - value) * batch.mask
