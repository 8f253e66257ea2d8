"""Terms that objectives share. Only values at sampled tokens affect the result."""

from typing import Literal

import torch
from torch import Tensor

from tba.objectives import PerGroup, PerResponse, PerToken
from tba.types import Batch

Importance = Literal["none", "token", "sequence"]
LARGEST = 20.0
"""Bound on log-ratios before exponentiation: e^20 is large enough, and finite."""


def total(values: PerToken, batch: Batch) -> PerResponse:
    """Return the sum over the sampled tokens of each response."""
    return (values * batch.mask).sum(-1)


def centred(values: PerResponse) -> PerResponse:
    """Subtract the mean of the group."""
    return values - values.mean(1, keepdim=True)


def leave_one_out(batch: Batch, beta: float) -> PerResponse:
    """Return R - mean of the others' R in the group: K / (K - 1) times the centred R.

    R = r - beta (log mu - log ref), where mu sampled the response.
    """
    regularised = batch.reward - beta * total(batch.behavior_logp - batch.ref_logp, batch)
    return centred(regularised) * batch.samples / (batch.samples - 1)


def log_ratio(logp: PerToken, batch: Batch) -> PerToken:
    """Return log pi - log mu of each token, 0 where none was sampled."""
    return (logp - batch.behavior_logp) * batch.mask


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), finite for any finite input."""
    return log_ratio.clamp(-LARGEST, LARGEST).exp()


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, equation 7)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def outside(ratio: PerToken, low: float, high: float, batch: Batch) -> PerGroup:
    """Return the share of tokens whose ratio is not in [1 - low, 1 + high], mean over responses."""
    is_outside = (ratio < 1 - low) | (ratio > 1 + high)
    share = (is_outside * batch.mask).sum(-1) / batch.mask.sum(-1)
    return share.mean(1)


def importance(kind: Importance, logp: PerToken, batch: Batch, cap: float) -> PerToken:
    """Return importance weights min(pi / mu, cap) of tokens or whole responses, detached."""
    change = log_ratio(logp.detach(), batch)
    if kind == "none":
        return torch.ones_like(change)
    if kind == "sequence":
        change = change.sum(-1, keepdim=True).expand_as(change)
    return ratio(change).clamp(max=cap)


def kl_k3(logp: PerToken, batch: Batch) -> PerToken:
    """Return Schulman's k3 estimate of KL(pi, ref): ref / pi - log(ref / pi) - 1.

    As a loss, its gradient is in expectation and on-policy that of KL(ref, pi).
    """
    difference = ((batch.ref_logp - logp) * batch.mask).clamp(max=LARGEST)
    return difference.expm1() - difference  # exp(x) - 1 would round away a small x


def penalised(
    logp: PerToken, batch: Batch, advantage: Tensor, beta: float, low: float, high: float
) -> tuple[PerResponse, PerGroup]:
    """Return sum_t [min(rho_t A_t, clip(rho_t) A_t) - beta KL_t] of each response, and `outside`.

    rho_t = pi / mu of a token, KL_t is the k3 estimate, and the advantage is [B K T] or [B K 1].
    """
    rho = ratio(log_ratio(logp, batch))
    surrogate = clipped(rho, advantage, low, high) - beta * kl_k3(logp, batch)
    return total(surrogate, batch), outside(rho, low, high, batch)
