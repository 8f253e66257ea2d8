"""Losses by hand: the case of the tests of objectives, and how a loss is compared with numbers.

It has B = 2, K = 3 and ragged T <= 4. Every token has log pi = -1, and log pi - log ref is

    (1/2, 1/2)  (0, 0, 0, 0)  (2)    |    (0, 0, 0)  (1)  (0, 0)

with the sums (1, 0, 2) and (0, 1, 0), and rewards (1, 0, 0) and (1/2, 1/2, 2). With beta = 1/2,
r - beta KL is (1/2, 0, -1) and (1/2, 0, 2). The means are -1/6 and 5/6, and the centred values
(2/3, 1/6, -5/6) and (-1/3, -5/6, 7/6).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tba.objectives import Objective
from tba.types import Batch

Rows = list[list[float]]

LEFT = [[2 / 3, 1 / 6, -5 / 6], [-1 / 3, -5 / 6, 7 / 6]]
"""r - KL / 2 less its mean, K = 3."""
RATIOS: tuple[Rows, Rows] = (
    [[2.0, 0.5], [1.1, 1.0, 1.0, 1.0], [0.25]],
    [[1.0, 1.0, 1.5], [3.0], [0.5, 0.7]],
)
"""pi / mu of each token in tests off policy; those of the responses are (1, 1.1, .25) and
(1.5, 3, .35)."""


def per_token(first: Rows, second: Rows, dtype: torch.dtype = torch.float64) -> Tensor:
    """[B=2, K=3, T=4] of ragged rows, 0 at padding."""
    padded = [[row + [0.0] * (4 - len(row)) for row in rows] for rows in (first, second)]
    return torch.tensor(padded, dtype=dtype)


def per_response(values: Rows) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged() -> tuple[Tensor, Batch]:
    """Return the case of the docstring above; `value` is there to be replaced."""
    logp = -per_token([[1, 1], [1, 1, 1, 1], [1]], [[1, 1, 1], [1], [1, 1]])
    ref = logp - per_token([[0.5, 0.5], [0, 0, 0, 0], [2]], [[0, 0, 0], [1], [0, 0]])
    mask, ones = logp < 0, torch.ones(2, 1)
    reward = per_response([[1, 0, 0], [0.5, 0.5, 2]])
    sampled = mask.long(), mask, torch.zeros_like(mask)
    batch = Batch(ones.long(), ones.bool(), *sampled, ref, ref, reward, torch.zeros_like(logp))
    return logp, batch


def on_policy() -> tuple[Tensor, Batch]:
    logp, batch = ragged()
    return logp, replace(batch, behavior_logp=logp)


def drifted() -> tuple[Tensor, Batch]:
    """The policy is that of `ragged`; another one, 1 / RATIOS of it, found the responses."""
    logp, batch = ragged()
    moves = per_token(*RATIOS).where(batch.mask, 1.0).log()
    return logp, replace(batch, behavior_logp=logp - moves)


def moved() -> tuple[Tensor, Batch]:
    """That of `ragged` found the responses; the policy has become RATIOS of it."""
    logp, batch = ragged()
    moves = per_token(*RATIOS).where(batch.mask, 1.0).log()
    return logp + moves, replace(batch, behavior_logp=logp)


def solve(
    objective: Any, logp: Tensor, batch: Batch, head: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss of each group, and the gradient of their sum in every log-prob."""
    logp = logp.detach().clone().requires_grad_()
    loss, _ = objective(logp, batch) if head is None else objective(logp, batch, head)
    return loss.detach(), torch.autograd.grad(loss.sum(), logp)[0]


def head_gradient(objective: Objective, logp: Tensor, batch: Batch, head: Tensor) -> Tensor:
    head = head.detach().clone().requires_grad_()
    return torch.autograd.grad(objective(logp, batch, head)[0].sum(), head)[0]


def check(found: tuple[Tensor, Tensor], loss: list[float], gradient: Tensor) -> None:
    torch.testing.assert_close(found[0], torch.tensor(loss, dtype=torch.float64))
    torch.testing.assert_close(found[1], gradient)


def metric(objective: Any, name: str, logp: Tensor, batch: Batch, *head: Tensor) -> list[float]:
    return objective(logp, batch, *head)[1][name].tolist()
