"""Objectives for stale data against numbers by hand and identities; tests/hand.py has the case."""

from dataclasses import replace
from math import exp, inf, log, sqrt
from typing import Any

import pytest
import torch
from hand import (
    check,
    drifted,
    head_gradient,
    metric,
    moved,
    on_policy,
    per_response,
    per_token,
    ragged,
    solve,
)
from torch import Tensor

from tba.config.plugins import check_options
from tba.objectives import whitened
from tba.objectives.asymre import AsymRe
from tba.objectives.cispo import Cispo
from tba.objectives.gspo import Gspo
from tba.objectives.m2po import M2po
from tba.objectives.oapl import Oapl
from tba.objectives.ppo import Ppo
from tba.objectives.rloo import Rloo
from tba.objectives.tb import TrajectoryBalance
from tba.objectives.topr import Topr
from tba.objectives.vespo import Vespo
from tba.objectives.vineppo import VinePpo
from tba.types import Batch

LENGTH = per_response([[2, 4, 1], [3, 1, 2]])
TOKENS = per_response([[7], [6]])
"""Tokens of each response, and of each group."""
LESS_MEAN = per_response([[2 / 3, -1 / 3, -1 / 3], [-1 / 2, -1 / 2, 1]])
"""Rewards (1, 0, 0) and (1/2, 1/2, 2) less their means."""
A = LESS_MEAN / per_response([[sqrt(1 / 3) + 1e-4], [sqrt(3 / 4) + 1e-4]])
"""The same over their standard deviation + 1e-4."""
W = per_response([[1, 1.1, 0.25], [1.5, 3, 0.35]])
"""pi / mu of the responses."""


def at_tokens(values: Tensor) -> Tensor:
    """Give every token the number of its response."""
    return values[..., None] * ragged()[1].mask


def check_rows(found: tuple[Tensor, Tensor], loss: Tensor, gradient: Tensor) -> None:
    """Compare with the terms of each response, whose mean is the loss, and with gradients."""
    check(found, loss.mean(1).tolist(), gradient)


def test_oapl_by_hand():
    """beta = b = 1/2: V = log(mean exp(2 r)) / 2, error log(w) / 2 - r + V, gradient error / K."""
    value = per_response([[log((exp(2) + 2) / 3) / 2], [log((2 * exp(1) + exp(4)) / 3) / 2]])
    error = W.log() / 2 - per_response([[1, 0, 0], [0.5, 0.5, 2]]) + value
    check_rows(solve(Oapl(0.5, 0.5), *drifted()), error**2, at_tokens(error / 3))


def test_m2po_by_hand():
    """Squares of the log-ratios from the smallest: 0, 0, 0, .009 | .48, .48, 1.92, and 0, 0, .127 |
    .164, .480, 1.207. Their running means stay below .05 up to the bar.
    """
    ratios = per_token([[0, 0], [1.1, 1, 1, 1], [0]], [[1, 1, 0], [0], [0, 0.7]])
    sums = per_response([[0, 4.1, 0], [2, 0, 0.7]])
    found = solve(M2po(threshold=0.05), *drifted())
    check_rows(found, -3 * sums * A / TOKENS, -ratios * at_tokens(A / TOKENS))
    assert metric(M2po(threshold=0.05), "clip_ratio", *drifted()) == pytest.approx([3 / 7, 3 / 6])
    assert metric(M2po(threshold=0.04), "clip_ratio", *drifted()) == pytest.approx([3 / 7, 4 / 6])


def test_vespo_by_hand():
    """phi = w^2 e^(3 - 3 w) where A > 0, and w^3 e^(2 - 2 w) where A < 0; log pi is -T."""
    phi = torch.where(A > 0, W**2 * (3 - 3 * W).exp(), W**3 * (2 - 2 * W).exp())
    weight = phi * A / TOKENS
    check_rows(solve(Vespo(), *drifted()), 3 * weight * LENGTH, at_tokens(-weight))


def test_asymre_by_hand():
    """Advantages are .1 more than the centred rewards."""
    advantage = LESS_MEAN + 0.1
    found = solve(AsymRe(shift=-0.1), *drifted())
    check_rows(found, advantage * LENGTH, at_tokens(-advantage / 3))


def test_topr_by_hand():
    """r - 1/2 is (1/2, -1/2, -1/2) and (0, 0, 3/2); below 0, weights are min(pi / mu, 1)."""
    weighted = per_response([[0.5, -0.5, -0.125], [0, 0, 1.5]])
    check_rows(solve(Topr(), *drifted()), weighted * LENGTH, at_tokens(-weighted / 3))


def test_cispo_by_hand():
    """Ratios above the cap of 1.2 weigh 1.2, and still have a gradient."""
    weights = per_token([[1.2, 0.5], [1.1, 1, 1, 1], [0.25]], [[1, 1, 1.2], [1.2], [0.5, 0.7]])
    sums = per_response([[1.7, 4.1, 0.25], [3.2, 1.2, 1.2]])
    found = solve(Cispo(cap=1.2), *drifted())
    check_rows(found, 3 * sums * A / TOKENS, -weights * at_tokens(A / TOKENS))
    assert metric(Cispo(cap=1.2), "clip_ratio", *drifted()) == pytest.approx([1 / 7, 2 / 6])


def test_gspo_by_hand():
    """s = w^(1 / T), clipped to .98 and 1.03: only the third response, which is unlikely and bad,
    has no gradient. Those of the second group are bad and too likely, or good and too unlikely.
    """
    s = W ** (1 / LENGTH)
    gradient = -s * A / (3 * LENGTH)
    gradient[0, 2] = 0
    s[0, 2] = 0.98
    found = solve(Gspo(clip=0.02, clip_high=0.03), *drifted())
    check_rows(found, -s * A, at_tokens(gradient))
    assert metric(Gspo(), "clip_ratio", *drifted()) == pytest.approx([2 / 3, 1])


def test_whitening_by_hand():
    """Advantages of tokens (1, 2), (3, 0, 0, 0), (1) have mean 1 and variance 8 / 7."""
    _, batch = ragged()
    given = per_token([[1, 2], [3, 0, 0, 0], [1]], [[5, 5, 5], [5], [5, 5]])
    found = whitened(given, batch)
    wanted = per_token([[0, 1], [2, -1, -1, -1], [0]], [[0] * 3, [0], [0] * 2])
    torch.testing.assert_close(found, wanted / sqrt(8 / 7 + 1e-8))  # equal ones have no gradient


def test_whitened_ppo_and_vineppo_are_policy_gradients_of_whitened_advantages():
    """On policy; PPO's head learns from advantages that are not whitened."""
    logp, batch = on_policy()
    value = per_token([[0.1, 0.4], [0.2, 0.3, 0.1, 0], [0.5]], [[0.2] * 3, [1], [0.3, 0.9]])
    options: dict[str, Any] = {"beta": 0.0, "whiten": True}
    tokens = per_token([[1] * 2, [1] * 4, [1]], [[1] * 3, [1], [1] * 2])

    ppo = Ppo(**options)
    advantage = ppo.advantages(value, batch)
    found = solve(ppo, logp, batch, value)[1]
    torch.testing.assert_close(found, -whitened(advantage, batch) * tokens / 3)
    plain = head_gradient(Ppo(beta=0.0), logp, batch, value)
    torch.testing.assert_close(head_gradient(ppo, logp, batch, value), plain)

    vine = VinePpo(**options, step_tokens=1)
    filled = replace(batch, value=value)
    found = solve(vine, logp, filled)[1]
    torch.testing.assert_close(found, -whitened(vine.advantages(filled), batch) * tokens / 3)


# Identities


def errors_of(beta: float, logp: Tensor, batch: Batch, ref: Tensor) -> Tensor:
    """beta (log pi - log ref) - r of each response [B K]."""
    return beta * ((logp - ref) * batch.mask).sum(-1) - batch.reward


def gradient_of(loss: Any, logp: Tensor) -> Tensor:
    logp = logp.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(logp).sum(), logp)[0]


def test_agro_and_pairwise_copg_have_the_gradient_of_tb():
    """A variance within the group, with a gradient through its mean; and squared differences of
    every pair.
    """
    logp, batch = drifted()
    beta = 0.3

    def agro(logp: Tensor) -> Tensor:
        return errors_of(beta, logp, batch, batch.ref_logp).var(1, correction=0) / (2 * beta)

    def copg(logp: Tensor) -> Tensor:
        error = errors_of(beta, logp, batch, batch.ref_logp)
        return (error[:, :, None] - error[:, None, :]).square().mean((1, 2)) / (4 * beta)

    _, gradient = solve(TrajectoryBalance(beta, taper="none"), logp, batch)
    torch.testing.assert_close(gradient_of(agro, logp), gradient)
    torch.testing.assert_close(gradient_of(copg, logp), gradient)


def test_gvpo_is_tb_with_the_sampling_policy_as_its_reference():
    """Weights are rewards less their mean, minus log pi / mu less its mean, times beta."""
    logp, batch = drifted()
    change = 0.3 * ((logp - batch.behavior_logp) * batch.mask).sum(-1)
    weight = batch.reward - batch.reward.mean(1, keepdim=True)
    weight = weight - (change - change.mean(1, keepdim=True))
    behaved = replace(batch, ref_logp=batch.behavior_logp)
    found = solve(TrajectoryBalance(0.3, taper="none"), logp, behaved)[1]
    torch.testing.assert_close(found, -weight[..., None] * batch.mask / 3)


@pytest.mark.parametrize("value_beta", [0.3, 1.0, inf])
def test_oapl_is_gvpo_and_a_push_on_all_responses(value_beta):
    """(mean f + V) mean grad log pi: to all equally, unless V is the group's own."""
    logp, batch = moved()
    objective = Oapl(0.3, value_beta)
    behaved = replace(batch, ref_logp=batch.behavior_logp)
    error = errors_of(0.3, logp, batch, batch.behavior_logp)
    push = (error.mean(1) + objective.value(batch.reward))[:, None, None] * batch.mask / 3
    assert push.abs().max() > 0.01
    found = solve(objective, logp, batch)[1]
    plain = solve(TrajectoryBalance(0.3, taper="none"), logp, behaved)[1]
    torch.testing.assert_close(found, plain + push)


def test_oapl_with_the_mean_reward_is_the_mirror_descent_of_kimi():
    """(r - mean r) grad log pi - tau / 2 grad (log pi / mu)^2, mean over the responses, ascends."""
    logp, batch = moved()

    def kimi(logp: Tensor) -> Tensor:
        change = ((logp - batch.behavior_logp) * batch.mask).sum(-1)
        left = batch.reward - batch.reward.mean(1, keepdim=True)
        return -(left * change - 0.3 / 2 * change.square()).mean(1)

    torch.testing.assert_close(solve(Oapl(0.3, inf), logp, batch)[1], gradient_of(kimi, logp))
    near = solve(Oapl(0.3, 1e4), logp, batch)[1]
    torch.testing.assert_close(near, gradient_of(kimi, logp), atol=1e-4, rtol=0)


def test_the_first_steps_are_reinforce_with_their_baseline():
    """Rewards less a baseline: over the spread and the group's tokens, over the spread and each
    length, or over neither.
    """
    logp, batch = on_policy()
    left = (batch.reward - batch.reward.mean(1, keepdim=True))[..., None] * batch.mask
    spreads = batch.reward.std(1)[:, None, None] + 1e-4
    tokens = batch.mask.sum((1, 2))[:, None, None]
    for by_token in (Cispo(), Vespo(), M2po()):
        torch.testing.assert_close(solve(by_token, logp, batch)[1], -left / spreads / tokens)
    lengths = batch.mask.sum(-1, keepdim=True)
    torch.testing.assert_close(solve(Gspo(), logp, batch)[1], -left / spreads / lengths / 3)
    above = (batch.reward - 0.2)[..., None] * batch.mask
    torch.testing.assert_close(solve(Topr(baseline=0.2), logp, batch)[1], -above / 3)
    rloo = solve(Rloo(beta=0.0), logp, batch)[1]
    torch.testing.assert_close(solve(AsymRe(shift=0.0), logp, batch)[1], rloo * 2 / 3)


def test_options_without_a_sense_are_refused():
    refused: list[tuple[Any, dict[str, Any]]] = [
        (Oapl, {"beta": 0.0}),
        (Oapl, {"value_beta": 0.0}),
        (M2po, {"threshold": 0.0}),
        (Cispo, {"cap": -1.0}),
        (Gspo, {"clip": 0.0}),
        (TrajectoryBalance, {"alpha": 0.5, "taper": "reward"}),
        (TrajectoryBalance, {"alpha": 0.5, "importance_cap": 2.0}),
    ]
    for objective, options in refused:
        with pytest.raises(ValueError, match=rf"objective\.{next(iter(options))}"):
            objective(**check_options(objective, "objective", "it", options))


def test_tb_with_alpha_by_hand():
    """k = 1/2, x = e - c: loss 2 l(x), l = 4 (x / 2 + exp(-x / 2) - 1), gradient l'(x) / K."""
    error = per_response([[-0.5, 0, 1], [-0.5, 0, -2]])
    c = -2 * (-error / 2).exp().mean(1).log()
    x = error - c[:, None]
    objective = TrajectoryBalance(0.5, alpha=0.5)
    gradient = (2 - 2 * (-x / 2).exp()) / 3
    found = solve(objective, *ragged())
    check_rows(found, 8 * (x / 2 + (-x / 2).exp() - 1), at_tokens(gradient))
    assert metric(objective, "tb/log_z", *ragged()) == pytest.approx((-2 * c).tolist())


def test_alpha_close_to_one_is_the_square():
    logp, batch = drifted()
    square = solve(TrajectoryBalance(0.3, taper="none"), logp, batch)
    for alpha, tolerance in ((1.0005, 0.0), (1.002, 2e-3), (0.998, 2e-3)):
        near = solve(TrajectoryBalance(0.3, alpha=alpha), logp, batch)
        torch.testing.assert_close(near, square, atol=tolerance, rtol=0)
