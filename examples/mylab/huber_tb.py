# examples/mylab/huber_tb.py
"""Trajectory balance with a Huber loss: trajectories far from the target cannot dominate a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import huber_loss

from tba.objectives import Loss, Objective
from tba.types import Batch


@dataclass(frozen=True)
class HuberTB(Objective):
    """TB whose loss is linear where the residual, in reward units, exceeds `delta`.

    With a large `delta`, it equals TB.
    """

    beta: float = 0.05
    delta: float = 1.0

    def __post_init__(self) -> None:
        if not (self.beta > 0 and self.delta > 0):
            raise ValueError(
                f"objective.beta = {self.beta} and objective.delta = {self.delta} must be above 0;"
                " try 0.05 and 1.0"
            )

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        log_ratio = ((logp - batch.ref_logp) * batch.mask).sum(-1)  # [B K]
        residual = self.beta * log_ratio - batch.reward
        # the mean of the group estimates -beta log Z; it has no gradient
        residual = residual - residual.mean(1, keepdim=True).detach()
        loss = huber_loss(residual, torch.zeros_like(residual), reduction="none", delta=self.delta)
        linear = (residual.abs() > self.delta).float()
        return loss.mean(1) / self.beta, {"huber/linear": linear.mean(1)}
