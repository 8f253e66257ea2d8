"""The terms that objectives share. What stands at padding never counts, whatever it is."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tba.types import Batch

Importance = Literal["none", "token", "sequence"]
LARGEST = 20.0
"""Log-ratios are cut there before they are exponentiated: e^20 is as good as infinite, and finite."""


def total(values: Float[Tensor, "B K T"], batch: Batch) -> Float[Tensor, "B K"]:
    """Summed over the response."""
    return (values * batch.mask).sum(-1)


def of_response(
    values: Float[Tensor, "B K T"], batch: Batch, length_normalised: bool
) -> Float[Tensor, "B K"]:
    """The sum over the response, or the mean over its tokens."""
    summed = total(values, batch)
    return summed / batch.mask.sum(-1) if length_normalised else summed


def centred(values: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """Less the group's mean."""
    return values - values.mean(1, keepdim=True)


def leave_one_out(values: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """Less the mean of the others, which is K / (K - 1) times the centred value."""
    k = values.shape[1]
    return centred(values) * k / (k - 1)


def regularised(batch: Batch, beta: float) -> Float[Tensor, "B K"]:
    """r - beta (log mu - log ref): the reward, with the KL settled when the response was sampled."""
    return batch.reward - beta * total(batch.behavior_logp - batch.ref_logp, batch)


def log_ratio(logp: Float[Tensor, "B K T"], batch: Batch) -> Float[Tensor, "B K T"]:
    """log pi - log mu of each token, 0 at padding."""
    return (logp - batch.behavior_logp) * batch.mask


def ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST, LARGEST).exp()


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO's surrogate (arXiv 1707.06347, equation 7): no gain from a ratio outside of [1 - low, 1 + high]."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def outside(
    ratio: Float[Tensor, "B K T"], low: float, high: float, batch: Batch
) -> Float[Tensor, " B"]:
    """TRL's `clip_ratio`: the share of a response's tokens whose ratio is not in [1 - low, 1 + high]."""
    return (
        (((ratio < 1 - low) | (ratio > 1 + high)) * batch.mask)
        .sum(-1)
        .div(batch.mask.sum(-1))
        .mean(1)
    )


def importance(
    kind: Importance, logp: Float[Tensor, "B K T"], batch: Batch, cap: float
) -> Float[Tensor, "B K T"]:
    """Truncated importance weights min(pi / mu, cap), without gradient: of each token, or the whole response's at each of its tokens."""
    change = log_ratio(logp.detach(), batch)
    if kind == "none":
        return torch.ones_like(change)
    return ratio(
        change if kind == "token" else change.sum(-1, keepdim=True).expand_as(change)
    ).clamp(max=cap)


def kl_k3(logp: Float[Tensor, "B K T"], batch: Batch) -> Float[Tensor, "B K T"]:
    """Per token ref / pi - log(ref / pi) - 1, Schulman's k3 estimate of KL(pi, ref); 0 at padding.

    As a loss its gradient is that of KL(ref, pi), in expectation and on policy: another pull to the reference than KL in the reward.
    """
    difference = ((batch.ref_logp - logp) * batch.mask).clamp(max=LARGEST)
    return difference.exp() - difference - 1


def penalised(
    logp: Float[Tensor, "B K T"],
    batch: Batch,
    advantage: Float[Tensor, "B K #T"],
    beta: float,
    low: float,
    high: float,
) -> tuple[Float[Tensor, "B K"], Float[Tensor, " B"]]:
    """sum_t [min(rho_t A_t, clip(rho_t) A_t) - beta KL_t] of each response, rho = pi / mu of a token, KL by k3; and the share of tokens outside."""
    rho = ratio(log_ratio(logp, batch))
    return total(clipped(rho, advantage, low, high) - beta * kl_k3(logp, batch), batch), outside(
        rho, low, high, batch
    )


def positive(name: str, value: float, instead: float) -> None:
    """ValueError unless above 0."""
    if not value > 0:
        raise ValueError(f"objective.{name} = {value} must be above 0; try {instead}")
