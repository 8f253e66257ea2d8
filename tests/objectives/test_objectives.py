"""Losses and gradients against numbers worked out by hand from the equation of each paper.

Also identities between objectives, and finite differences. tests/hand.py describes the case.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import exp, log, sqrt
from typing import Any

import pytest
import torch
from hand import (
    LEFT,
    RATIOS,
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

from tba.config.plugins import check_options, find
from tba.objectives import better, centred, standardised, tapered
from tba.objectives.cispo import Cispo
from tba.objectives.dr_grpo import DrGrpo
from tba.objectives.grpo import Grpo
from tba.objectives.gspo import Gspo
from tba.objectives.m2po import M2po
from tba.objectives.oapl import Oapl
from tba.objectives.online_dpo import OnlineDpo
from tba.objectives.ppo import Ppo
from tba.objectives.proximal_rloo import ProximalRloo
from tba.objectives.raft import Raft
from tba.objectives.rloo import Rloo
from tba.objectives.tb import TrajectoryBalance
from tba.objectives.tb_learned_z import TrajectoryBalanceLearnedZ
from tba.objectives.tba_prime import TBAPrime
from tba.objectives.vespo import Vespo
from tba.objectives.vineppo import VinePpo
from tba.types import Batch, Group, collate

# Trajectory balance


def test_tb_by_hand():
    """Residuals, KL / 2 - r less their mean, are -LEFT; loss = mean of their squares / (2 beta), d
    loss / d logp = residual / K.
    """
    a = LEFT
    loss = [sum(x * x for x in row) / 3 for row in a]
    gradient = per_token(
        [[-a[0][0] / 3] * 2, [-a[0][1] / 3] * 4, [-a[0][2] / 3]],
        [[-a[1][0] / 3] * 3, [-a[1][1] / 3], [-a[1][2] / 3] * 2],
    )
    objective = TrajectoryBalance(0.5, taper="none")
    check(solve(objective, *ragged()), loss, gradient)
    check(solve(objective, *drifted()), loss, gradient)  # whoever found the responses
    # mean(2 r - KL)
    assert metric(objective, "tb/log_z", *ragged()) == pytest.approx([-1 / 3, 5 / 3])


def test_tb_corrected_for_delay_by_hand():
    """Weights (1, 1.1, .25), (1.5, 2 for 3, .35): residuals (-.5, 0, 1) have the weighted mean -.25
    / 2.35, (-.5, 0, -2) -1.45 / 3.85.
    """
    p, q = 0.25 / 2.35, 1.45 / 3.85
    loss = [
        ((p - 0.5) ** 2 + 1.1 * p**2 + 0.25 * (1 + p) ** 2) / 3,
        (1.5 * (q - 0.5) ** 2 + 2 * q**2 + 0.35 * (q - 2) ** 2) / 3,
    ]
    first = [[(p - 0.5) / 3] * 2, [1.1 * p / 3] * 4, [0.25 * (1 + p) / 3]]
    second = [[1.5 * (q - 0.5) / 3] * 3, [2 * q / 3], [0.35 * (q - 2) / 3] * 2]
    objective = TrajectoryBalance(0.5, importance_cap=2.0)
    check(solve(objective, *drifted()), loss, per_token(first, second))
    assert metric(objective, "tb/log_z", *drifted()) == pytest.approx([2 * p, 2 * q])


@pytest.mark.parametrize("options", [{"importance_cap": 2.0}, {"taper": "residual"}])
def test_tb_with_weights_is_tb_on_policy(options):
    found = solve(TrajectoryBalance(0.3, **options), *on_policy())
    torch.testing.assert_close(found, solve(TrajectoryBalance(0.3), *on_policy()))


def test_tapered_tb_by_hand():
    """Weights min(pi / mu, 1) for errors above 0, which push down: .25 for the last response of the
    first group, 1 for both of the second; log Z is that of `tb`.
    """
    a = LEFT
    first = a[0][0] ** 2 + a[0][1] ** 2 + 0.25 * a[0][2] ** 2
    loss = [first / 3, sum(x * x for x in a[1]) / 3]
    gradient = per_token(
        [[-a[0][0] / 3] * 2, [-a[0][1] / 3] * 4, [-a[0][2] / 12]],
        [[-a[1][0] / 3] * 3, [-a[1][1] / 3], [-a[1][2] / 3] * 2],
    )
    objective = TrajectoryBalance(0.5, taper="residual")
    check(solve(objective, *drifted()), loss, gradient)
    assert metric(objective, "tb/log_z", *drifted()) == pytest.approx([-1 / 3, 5 / 3])


def unlikely() -> tuple[Tensor, Batch]:
    """Return `drifted`, where the last response of the first group is e^-2 of the reference's."""
    logp, batch = drifted()
    ref = batch.ref_logp.clone()
    ref[0, 2, 0] += 4
    return logp, replace(batch, ref_logp=ref)


def test_tb_tapered_by_the_reward_by_hand():
    """r - KL / 2 is (1/2, 0, 1) and (1/2, 0, 2). Better than the mean are the first of the first
    group, so that 1 counts as 1/2 in log Z, and the last of the second.

    Of the responses to be raised, with A = (1/6, -1/3, 2/3) and (-1/3, -5/6, 7/6), the last of
    the first group is no better one, and weighs .25; the last of the second weighs 1, not .35.
    """
    a = [[1 / 6, -1 / 3, 2 / 3], LEFT[1]]
    loss = [(1 / 36 + 1 / 9 + 0.25 * 4 / 9) / 3, sum(x * x for x in a[1]) / 3]
    gradient = per_token(
        [[-a[0][0] / 3] * 2, [-a[0][1] / 3] * 4, [-a[0][2] / 12]],
        [[-a[1][0] / 3] * 3, [-a[1][1] / 3], [-a[1][2] / 3] * 2],
    )
    objective = TrajectoryBalance(0.5, taper="reward")
    check(solve(objective, *unlikely()), loss, gradient)
    assert metric(objective, "tb/log_z", *unlikely()) == pytest.approx([2 / 3, 5 / 3])
    # a better response that is pushed down tapers, too: r - KL / 2 is (1/2, 0, -1), r (1, 0, .9)
    logp, batch = drifted()
    reward = batch.reward.clone()
    reward[0, 2] = 0.9
    _, pushed = solve(objective, logp, replace(batch, reward=reward))
    assert pushed[0, 2, 0].item() == pytest.approx(0.25 * (0.1 + (0.5 - 0.1) / 3) / 3)


def test_tb_with_shift_by_hand():
    """The other responses have mean rewards (0, 1/2, 1/2) and (5/4, 5/4, 1/2): half of them is
    added to LEFT.
    """
    a = [[2 / 3, 1 / 6 + 1 / 4, 1 / 4 - 5 / 6], [5 / 8 - 1 / 3, 5 / 8 - 5 / 6, 1 / 4 + 7 / 6]]
    loss = [sum(x * x for x in row) / 3 for row in a]
    gradient = per_token(
        [[-a[0][0] / 3] * 2, [-a[0][1] / 3] * 4, [-a[0][2] / 3]],
        [[-a[1][0] / 3] * 3, [-a[1][1] / 3], [-a[1][2] / 3] * 2],
    )
    objective = TrajectoryBalance(0.5, taper="none", shift=0.5)
    check(solve(objective, *drifted()), loss, gradient)
    assert metric(objective, "tb/log_z", *drifted()) == pytest.approx([-1 / 3, 5 / 3])
    assert metric(objective, "tb/graded", *drifted()) == [0.0, 1.0]


def test_tb_learned_z_by_hand():
    """log Z = (1, -1): residuals KL / 2 + log Z / 2 - r are (0, .5, 1.5) and (-1, -.5, -2.5); that
    of log Z is their mean, 2/3 and -4/3.
    """
    objective, head = TrajectoryBalanceLearnedZ(0.5), torch.tensor([1.0, -1.0], dtype=torch.float64)
    gradient = per_token([[0, 0], [0.5 / 3] * 4, [0.5]], [[-1 / 3] * 3, [-0.5 / 3], [-2.5 / 3] * 2])
    check(solve(objective, *ragged(), head), [2.5 / 3, 7.5 / 3], gradient)
    torch.testing.assert_close(
        head_gradient(objective, *ragged(), head),
        torch.tensor([2 / 3, -4 / 3], dtype=torch.float64),
    )
    assert metric(objective, "tb/log_z", *ragged(), head) == [1.0, -1.0]


@pytest.mark.parametrize(
    ("taper", "log_z", "last"),
    [("residual", 1.0, 0.25), ("residual", -4.0, 1.0), ("reward", -4.0, 0.25)],
)
def test_tapered_tb_learned_z_by_hand(taper, log_z, last):
    """The weight of the last response of the first group, whose residual is 1.5 or -1; of the
    others, it is 1. The weights are those of log Z, too.
    """
    objective = TrajectoryBalanceLearnedZ(0.5, taper=taper)
    head = torch.tensor([log_z, -1.0], dtype=torch.float64)
    own = [log_z / 2 - 0.5, log_z / 2, log_z / 2 + 1]
    loss = [(own[0] ** 2 + own[1] ** 2 + last * own[2] ** 2) / 3, 7.5 / 3]
    gradient = per_token(
        [[own[0] / 3] * 2, [own[1] / 3] * 4, [last * own[2] / 3]],
        [[-1 / 3] * 3, [-0.5 / 3], [-2.5 / 3] * 2],
    )
    check(solve(objective, *drifted(), head), loss, gradient)
    pull = head_gradient(objective, *drifted(), head)
    assert pull.tolist() == pytest.approx([(own[0] + own[1] + last * own[2]) / 3, -4 / 3])


def test_tb_learned_z_at_the_groups_own_log_z_is_tb():
    logp, batch = drifted()
    own = TrajectoryBalance(0.3, taper="none")(logp, batch)[1]["tb/log_z"]
    for taper in ("none", "residual"):
        found = solve(TrajectoryBalanceLearnedZ(0.3, taper=taper), logp, batch, own)
        torch.testing.assert_close(found, solve(TrajectoryBalance(0.3, taper=taper), logp, batch))
    pull = head_gradient(TrajectoryBalanceLearnedZ(0.3, taper="none"), logp, batch, own)
    torch.testing.assert_close(pull, torch.zeros(2).double())  # there log Z stays


def test_group_residual_has_mean_zero():
    logp, batch = ragged()
    _, extras = TrajectoryBalance(beta=0.5, taper="residual")(logp, batch)
    residual = (
        0.5 * ((logp - batch.ref_logp) * batch.mask).sum(-1)
        - batch.reward
        + 0.5 * extras["tb/log_z"][:, None]
    )
    torch.testing.assert_close(residual.mean(1), torch.zeros(2).double(), atol=1e-9, rtol=0)


def test_tb_is_zero_at_the_tilted_reference():
    _, batch = ragged()
    bonus = batch.reward / 0.5 / batch.mask.sum(-1)
    target = batch.ref_logp + bonus[..., None] * batch.mask
    for found in solve(TrajectoryBalance(beta=0.5), target, batch):
        torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-9, rtol=0)


def test_tb_is_zero_at_the_tempered_target():
    """log pi = (log ref / gamma + r / beta) / tau + log Z, however it is spread over the tokens."""
    _, batch = ragged()
    options = {"beta": 0.5, "gamma": 1.25, "tau": 2.0}
    bonus = (batch.reward / 0.5 / 2.0 - 0.7) / batch.mask.sum(-1)
    target = batch.ref_logp / 2.5 + bonus[..., None] * batch.mask
    head = torch.tensor([0.7, 0.7], dtype=torch.float64)
    both = ((TrajectoryBalance, None), (TrajectoryBalanceLearnedZ, head))
    for cls, log_z in both:
        for found in solve(cls(**options), target, batch, log_z):
            torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-9, rtol=0)
        plain, _ = solve(cls(0.5), target, batch, log_z)
        assert (plain > 0.01).all()


@pytest.mark.parametrize("importance", ["none", "token", "sequence"])
def test_tba_prime_by_hand(importance):
    """A = LEFT; 7 and 6 tokens. Weights, cut at 2: those of the tokens, or of their response at
    each.
    """
    weights = {
        "none": per_token([[1, 1], [1] * 4, [1]], [[1] * 3, [1], [1] * 2]),
        "token": per_token([[2, 0.5], [1.1, 1, 1, 1], [0.25]], [[1, 1, 1.5], [2], [0.5, 0.7]]),
        "sequence": per_token([[1, 1], [1.1] * 4, [0.25]], [[1.5] * 3, [2], [0.35] * 2]),
    }[importance]
    sums = {
        "none": [[2, 4, 1], [3, 1, 2]],
        "token": [[2.5, 4.1, 0.25], [3.5, 2, 1.2]],
        "sequence": [[2, 4.4, 0.25], [4.5, 2, 0.7]],
    }[importance]
    loss = [
        sum(a * w for a, w in zip(LEFT[b], sums[b], strict=True)) / n for b, n in ((0, 7), (1, 6))
    ]  # log pi = -1
    gradient = -per_response(LEFT)[..., None] * weights / torch.tensor([7, 6])[:, None, None]
    check(
        solve(TBAPrime(0.5, importance=importance, importance_cap=2.0), *drifted()), loss, gradient
    )


def test_tba_prime_clamps_each_token():
    """Log-ratios cut at 1: KL (1, 0, 1) instead of (1, 0, 2), so r - KL / 2 = (.5, 0, -.5); the
    other group has none above.
    """
    objective = TBAPrime(0.5, log_ratio_clamp=1.0, importance="none")
    gradient = per_token(
        [[-0.5 / 7] * 2, [0] * 4, [0.5 / 7]], [[1 / 18] * 3, [5 / 36], [-7 / 36] * 2]
    )
    check(
        solve(objective, *ragged()),
        [(0.5 * 2 - 0.5) / 7, (-1 / 3 * 3 - 5 / 6 + 7 / 6 * 2) / 6],
        gradient,
    )
    logp, batch = ragged()
    # log-ratios of the other sign, (-1, 0, -1) and (0, -1, 0), in mean(2 r - KL)
    far = replace(batch, ref_logp=2 * logp - batch.ref_logp)
    log_z = metric(objective, "tb/log_z", logp, far)
    assert log_z == pytest.approx([2 / 3 + 2 / 3, 2 + 1 / 3])
    _, gradient = solve(objective, logp, far)  # r + .5 (1, 0, 1) = (1.5, 0, .5), less 2/3
    torch.testing.assert_close(
        gradient[0], per_token([[-5 / 6 / 7] * 2, [2 / 3 / 7] * 4, [1 / 6 / 7]], [[0], [0], [0]])[0]
    )


def test_tba_prime_without_clamp_and_weights_is_tb_over_the_mean_length():
    """7 and 6 tokens of 3 responses."""
    _, tb = solve(TrajectoryBalance(0.3, taper="none"), *drifted())
    _, prime = solve(TBAPrime(0.3, log_ratio_clamp=1e9, importance="none"), *drifted())
    torch.testing.assert_close(prime, tb / torch.tensor([7 / 3, 6 / 3])[:, None, None])
    _, free = solve(TBAPrime(1e-9, importance="none"), *on_policy())
    _, without_kl = solve(DrGrpo(beta=0.0), *on_policy())
    torch.testing.assert_close(free, without_kl / torch.tensor([7 / 3, 6 / 3])[:, None, None])


# Policy gradients


def test_rloo_by_hand():
    """A = 3/2 LEFT = (1, .25, -1.25), (-.5, -1.25, 1.75), settled by mu; loss = -mean A log pi with
    today's log pi.
    """
    sums = [[-2, -4 + log(1.1), -1 + log(0.25)], [-3 + log(1.5), -1 + log(3), -2 + log(0.35)]]
    loss = [
        -(sums[0][0] + 0.25 * sums[0][1] - 1.25 * sums[0][2]) / 3,
        -(-0.5 * sums[1][0] - 1.25 * sums[1][1] + 1.75 * sums[1][2]) / 3,
    ]
    gradient = per_token(
        [[-1 / 3] * 2, [-0.25 / 3] * 4, [1.25 / 3]], [[0.5 / 3] * 3, [1.25 / 3], [-1.75 / 3] * 2]
    )
    check(solve(Rloo(0.5), *moved()), loss, gradient)
    check(
        solve(Rloo(0.5), *on_policy()),
        [(2 + 0.25 * 4 - 1.25) / 3, (-0.5 * 3 - 1.25 + 1.75 * 2) / 3],
        gradient,
    )


@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_rloo_with_importance_weights_by_hand(importance):
    """The same A, weights cut at 2."""
    token = [[[2, 0.5], [1.1, 1, 1, 1], [0.25]], [[1, 1, 1.5], [2], [0.5, 0.7]]]
    sequence = [[[1, 1], [1.1] * 4, [0.25]], [[1.5] * 3, [2], [0.35] * 2]]
    weights = per_token(*(token if importance == "token" else sequence))
    advantage = per_response([[1, 0.25, -1.25], [-0.5, -1.25, 1.75]])
    logp, batch = moved()
    check(
        solve(Rloo(0.5, importance=importance, importance_cap=2.0), logp, batch),
        (-(advantage * (weights * logp).sum(-1)).sum(1) / 3).tolist(),
        -advantage[..., None] * weights / 3,
    )


def test_proximal_rloo_by_hand():
    """A = (1, .25, -1.25), (-.5, -1.25, 1.75); ratios (1, 1.1, .25), (1.5, 3, .35): only .25 with A
    < 0 is clipped, to .8.
    """
    loss = [-(1 + 0.25 * 1.1 - 1.25 * 0.8) / 3, -(-0.5 * 1.5 - 1.25 * 3 + 1.75 * 0.35) / 3]
    gradient = per_token(
        [[-1 / 3] * 2, [-0.275 / 3] * 4, [0]], [[0.25] * 3, [1.25], [-0.6125 / 3] * 2]
    )
    check(solve(ProximalRloo(0.5), *moved()), loss, gradient)
    assert metric(ProximalRloo(0.5), "clip_ratio", *moved()) == pytest.approx([1 / 3, 1])
    narrow = [-(1 + 0.25 * 1.05 - 1.25 * 0.95) / 3, loss[1]]  # now 1.1 with A > 0 as well
    gradient[0, 1] = 0
    check(solve(ProximalRloo(0.5, clip=0.05), *moved()), narrow, gradient)


def test_dr_grpo_by_hand():
    """A = (2/3, -1/3, -1/3), (-1/2, -1/2, 1). Of the ratios 2 (A > 0) and .25 (A < 0) are clipped,
    to 1.2 and .8; 1.5 and 3 (A < 0) are not.
    """
    loss = [
        -(2 / 3 * (1.2 + 0.5) - (1.1 + 3) / 3 - 0.8 / 3) / 3,
        -(-(2 + 1.5) / 2 - 3 / 2 + 0.5 + 0.7) / 3,
    ]
    gradient = per_token(
        [[0, -1 / 9], [1.1 / 9, 1 / 9, 1 / 9, 1 / 9], [0]],
        [[1 / 6, 1 / 6, 0.25], [0.5], [-0.5 / 3, -0.7 / 3]],
    )
    check(solve(DrGrpo(), *drifted()), loss, gradient)
    # (2/2, 0/4, 1/1) and (1/3, 1/1, 2/2)
    assert metric(DrGrpo(), "clip_ratio", *drifted()) == pytest.approx([2 / 3, 7 / 9])
    # k3 = ref / pi - log(ref / pi) - 1
    penalty = [0.1 * (2 * (exp(-0.5) + 0.5 - 1) + (exp(-2) + 2 - 1)), 0.1 * (exp(-1) + 1 - 1)]
    pulled = per_token(
        [[0.1 * (1 - exp(-0.5))] * 2, [0] * 4, [0.1 * (1 - exp(-2))]],
        [[0] * 3, [0.1 * (1 - exp(-1))], [0] * 2],
    )
    check(
        solve(DrGrpo(beta=0.3), *drifted()),
        [a + b for a, b in zip(loss, penalty, strict=True)],
        gradient + pulled,
    )


@pytest.mark.parametrize(
    ("clip_high", "bound", "slope"), [(None, 1.2, 0.0), (0.6, 1.6, 0.0), (1.5, 2.0, 2.0)]
)
def test_grpo_by_hand(clip_high, bound, slope):
    """As Dr. GRPO, each response over its length, A over the spread sqrt(1/3), sqrt(3/4);
    `clip_high` lets 2 (A > 0) go further.
    """
    s, u = sqrt(1 / 3) + 1e-4, sqrt(3 / 4) + 1e-4
    loss = [
        -(2 / 3 * (bound + 0.5) / 2 - (1.1 + 3) / 3 / 4 - 0.8 / 3) / s / 3,
        -(-(2 + 1.5) / 2 / 3 - 3 / 2 + (0.5 + 0.7) / 2) / u / 3,
    ]
    penalty = [0.1 * (exp(-0.5) - 0.5 + exp(-2) + 1), 0.1 * exp(-1)]  # each response's mean
    gradient = per_token(
        [[-slope / 9 / s, -0.5 / 9 / s], [1.1 / 36 / s, 1 / 36 / s, 1 / 36 / s, 1 / 36 / s], [0]],
        [[1 / 18 / u, 1 / 18 / u, 1.5 / 18 / u], [0.5 / u], [-0.25 / 3 / u, -0.35 / 3 / u]],
    )
    pulled = per_token(
        [[0.05 * (1 - exp(-0.5))] * 2, [0] * 4, [0.1 * (1 - exp(-2))]],
        [[0] * 3, [0.1 * (1 - exp(-1))], [0] * 2],
    )
    check(
        solve(Grpo(0.3, clip_high=clip_high), *drifted()),
        [a + b for a, b in zip(loss, penalty, strict=True)],
        gradient + pulled,
    )
    # 1.5 is within .6, 2 within 1.5, 3 is not
    outside = {None: [2 / 3, 7 / 9], 0.6: [2 / 3, 2 / 3], 1.5: [1 / 2, 2 / 3]}
    found = metric(Grpo(clip_high=clip_high), "clip_ratio", *drifted())
    assert found == pytest.approx(outside[clip_high])


VALUES = per_token([[0.5, 1], [0, 1, 0, 2], [-1]], [[1, 2, -1], [0.5], [0, 4]])


def test_ppo_by_hand():
    """Rewards of the tokens, -KL / 2 and r at the end: (-.25, .75) (0, 0, 0, 0) (-1) and
    (0, 0, .5) (0) (0, 2).

    Differences r + V' - V: (.25, -.25) (1, -1, 2, -2) (0) and (1, -3, 1.5) (-.5) (4, -2). With
    lambda = 1/2, from the end, A:
    (.125, -.25) (.75, -.5, 1, -2) (0) and (-.125, -2.25, 1.5) (-.5) (3, -2).
    """
    advantage = per_token(
        [[0.125, -0.25], [0.75, -0.5, 1, -2], [0]], [[-0.125, -2.25, 1.5], [-0.5], [3, -2]]
    )
    objective = Ppo(0.5, gae_lambda=0.5, value_coefficient=0.4)
    _, batch = on_policy()
    torch.testing.assert_close(objective.advantages(VALUES, batch), advantage)
    squares = [0.015625 + 0.0625 + 0.5625 + 0.25 + 1 + 4, 0.015625 + 5.0625 + 2.25 + 0.25 + 9 + 4]
    loss = [
        -(-0.125 - 0.75) / 3 + 0.2 * squares[0] / 3,
        -(-0.875 - 0.5 + 1) / 3 + 0.2 * squares[1] / 3,
    ]
    check(solve(objective, *on_policy(), VALUES), loss, -advantage / 3)
    pull = head_gradient(objective, *on_policy(), VALUES)
    torch.testing.assert_close(pull, -0.4 * advantage / 3)  # V goes towards V + A
    # 2 is clipped to 1.2, and .5, as A < 0, to .8; 1.5 to 1.2, and .7, as A < 0, to .8
    surrogate = [
        0.125 * 1.2 - 0.25 * 0.8 + 0.75 * 1.1 - 0.5 + 1 - 2,
        -0.125 - 2.25 + 1.5 * 1.2 - 0.5 * 3 + 3 * 0.5 - 2 * 0.8,
    ]
    slopes = per_token(
        [[0, 0], [0.75 * 1.1, -0.5, 1, -2], [0]], [[-0.125, -2.25, 0], [-0.5 * 3], [3 * 0.5, 0]]
    )
    check(
        solve(objective, *moved(), VALUES),
        [(0.2 * squares[b] - surrogate[b]) / 3 for b in (0, 1)],
        -slopes / 3,
    )
    # of each response's mean square
    errors = [(0.078125 / 2 + 5.8125 / 4) / 3, (7.328125 / 3 + 0.25 + 13 / 2) / 3]
    found = metric(objective, "ppo/value_error", *moved(), VALUES)
    assert found == pytest.approx(errors)


def test_ppo_discounts_by_hand():
    """discount = lambda = 1/2: differences r + V' / 2 - V are (-.25, -.25) (.5, -1, 1, -2) (0) and
    (0, -2.5, 1.5) (-.5) (2, -2).

    A adds a quarter of the next.
    """
    first = [[-0.3125, -0.25], [0.5 - 0.25 + 0.25 * 0.125, -1 + 0.125, 0.5, -2], [0]]
    expected = per_token(first, [[-0.53125, -2.125, 1.5], [-0.5], [1.5, -2]])
    found = Ppo(0.5, discount=0.5, gae_lambda=0.5).advantages(VALUES, on_policy()[1])
    torch.testing.assert_close(found, expected)


def test_vineppo_by_hand_with_steps_of_one_token():
    """V: (.5, .75) (.5, .25, .5, 1) (.5) and (1.25, 1, .5) (1.25) (.5, 1); A is V of the next
    state, r at the end, less V.
    """
    values = per_token(
        [[0.5, 0.75], [0.5, 0.25, 0.5, 1], [0.5]], [[1.25, 1, 0.5], [1.25], [0.5, 1]]
    )
    advantage = per_token(
        [[0.25, 0.25], [-0.25, 0.25, 0.5, -1], [-0.5]], [[-0.25, -0.5, 0], [-0.75], [0.5, 1]]
    )
    logp, batch = drifted()
    slopes = per_token(
        [[0, 0.125], [-0.275, 0.25, 0.5, -1], [0]], [[-0.25, -0.5, 0], [-2.25], [0.25, 0.7]]
    )  # 2 and .25 are clipped
    surrogate = [0.25 * 1.2 + 0.125 - 0.275 - 0.25 - 0.5 * 0.8, -0.75 - 2.25 + 0.25 + 0.7]
    objective, filled = VinePpo(beta=0.0, step_tokens=1), replace(batch, value=values)
    torch.testing.assert_close(objective.advantages(filled), advantage)
    check(solve(objective, logp, filled), [-s / 3 for s in surrogate], -slopes / 3)


def test_vineppo_by_hand_with_steps_of_two_tokens():
    """Both tokens of a step share its A; the step that begins a response of odd length's last token
    is that token alone. beta = .3.
    """
    values = per_token(
        [[0.5, 0.5], [0.5, 0.5, 0.75, 0.75], [0.5]], [[1.25, 1.25, 1], [1.25], [0.5, 0.5]]
    )
    advantage = per_token(
        [[0.5, 0.5], [0.25, 0.25, -0.75, -0.75], [-0.5]],
        [[-0.25, -0.25, -0.5], [-0.75], [1.5, 1.5]],
    )
    logp, batch = on_policy()
    objective, filled = VinePpo(beta=0.3, step_tokens=2), replace(batch, value=values)
    torch.testing.assert_close(objective.advantages(filled), advantage)
    penalty = [0.3 * (2 * (exp(-0.5) - 0.5) + exp(-2) + 1) / 3, 0.3 * exp(-1) / 3]
    pulled = per_token(
        [[0.1 * (1 - exp(-0.5))] * 2, [0] * 4, [0.1 * (1 - exp(-2))]],
        [[0] * 3, [0.1 * (1 - exp(-1))], [0] * 2],
    )
    check(
        solve(objective, logp, filled),
        [penalty[0] + 0.5 / 3, penalty[1] - (-1 - 0.75 + 3) / 3],
        pulled - advantage / 3,
    )


def test_vineppo_refuses_what_was_found_without_rollouts():
    logp, batch = ragged()
    with pytest.raises(ValueError, match="without rollouts; start a new run"):
        VinePpo()(logp, replace(batch, value=torch.full_like(logp, float("nan"))))


# Preferences and imitation


def test_online_dpo_by_hand():
    """d = (1, 0, 2), (0, 1, 0). Best against worst: the first over the second (d 1 - 0), the third
    over the first (0 - 0): -log sigmoid(1/2), log 2.
    """
    s = 1 / (1 + exp(0.5))  # sigmoid(-1/2)
    gradient = per_token([[-s / 2] * 2, [s / 2] * 4, [0]], [[0.25] * 3, [0], [-0.25] * 2])
    check(solve(OnlineDpo(0.5), *drifted()), [log(1 + exp(-0.5)), log(2)], gradient)
    assert metric(OnlineDpo(0.5), "rewards/margins", *ragged()) == [0.5, 0.0]


def test_raft_by_hand():
    """r >= 1/2: the first; all three. r >= 1: the first; the third."""
    one = per_token([[-1 / 3] * 2, [0] * 4, [0]], [[0] * 3, [0], [-1 / 3] * 2])
    all_three = per_token([[0], [0], [0]], [[-1 / 3] * 3, [-1 / 3], [0] * 2])
    check(solve(Raft(0.5), *drifted()), [2 / 3, 6 / 3], one + all_three)
    check(solve(Raft(1.0), *drifted()), [2 / 3, 2 / 3], one)
    logp, batch = ragged()
    assert metric(Raft(0.5), "raft/accepted", logp, batch) == pytest.approx([1 / 3, 1])


# Identities


@pytest.mark.parametrize("beta", [0.01, 0.5, 3.0])
def test_on_policy_tb_is_rloo_up_to_its_constant(beta):
    """RLOO's gradient is K / (K - 1) times TB's, whatever beta: that is why beta / 2 is in the
    loss.
    """
    _, tb = solve(TrajectoryBalance(beta, taper="residual"), *on_policy())
    torch.testing.assert_close(solve(Rloo(beta), *on_policy())[1], tb * 3 / 2)


def test_off_policy_rloo_is_not_tb():
    """RLOO's advantage knows the policy that sampled, TB's residual the live one: that is what
    staleness changes.
    """
    _, tb = solve(TrajectoryBalance(0.5), *ragged())
    assert (solve(Rloo(0.5), *ragged())[1] - tb * 3 / 2).abs().max() > 0.1


def test_the_first_step_of_proximal_rloo_is_rloos():
    torch.testing.assert_close(
        solve(ProximalRloo(0.3), *on_policy())[1], solve(Rloo(0.3), *on_policy())[1]
    )


@pytest.mark.parametrize("baseline", [0.0, 0.7, -2.0])
def test_the_first_step_of_ppo_is_a_policy_gradient_whose_baseline_is_a_constant_value(baseline):
    """With lambda = 1 and V of every state the same, A = r - V at every token, for V cancels
    between the first and the last: REINFORCE's gradient where V = 0.
    """
    logp, batch = on_policy()
    _, gradient = solve(Ppo(beta=0.0, gae_lambda=1.0), logp, batch, torch.full_like(logp, baseline))
    torch.testing.assert_close(gradient, -(batch.reward - baseline)[..., None] * batch.mask / 3)


def test_the_first_steps_of_grpo_and_dr_grpo_are_policy_gradients():
    """Without KL: of r less its mean, over the spread and each length, or over neither."""
    logp, batch = on_policy()
    left = (batch.reward - batch.reward.mean(1, keepdim=True))[..., None] * batch.mask / 3
    torch.testing.assert_close(solve(DrGrpo(), logp, batch)[1], -left)
    divisor = (batch.reward.std(1)[:, None] + 1e-4) * batch.mask.sum(-1)
    torch.testing.assert_close(solve(Grpo(beta=0.0), logp, batch)[1], -left / divisor[..., None])


def test_dr_grpo_is_grpo_without_its_two_normalisers():
    """Responses all of 3 tokens, and rewards whose spread plus 1e-4 is 1: GRPO is a third of Dr.
    GRPO, off policy and with KL.
    """
    logp, batch = drifted()
    first = (per_token(*RATIOS) > 0)[..., :3].any(-1, keepdim=True) & (torch.arange(4) < 3)
    left = batch.reward - batch.reward.mean(1, keepdim=True)
    spread = left / batch.reward.std(1, keepdim=True) * (1 - 1e-4)
    noise = torch.linspace(-0.4, 0.4, 24).view(2, 3, 4).double()
    equal = replace(
        batch, mask=first, reward=spread, behavior_logp=logp + noise, ref_logp=logp - 2 * noise
    )
    dr_grpo = [each / 3 for each in solve(DrGrpo(beta=0.2), logp, equal)]
    torch.testing.assert_close(solve(Grpo(beta=0.2), logp, equal), tuple(dr_grpo))


def test_the_first_step_of_vineppo_with_one_long_step_is_rloos():
    """Then V is the mean of the others, and A = r - V: RLOO without KL."""
    logp, batch = on_policy()
    others = (batch.reward.sum(1, keepdim=True) - batch.reward) / 2
    filled = replace(batch, value=others[..., None] * batch.mask)
    _, found = solve(VinePpo(beta=0.0, step_tokens=4), logp, filled)
    torch.testing.assert_close(found, solve(Rloo(beta=0.0), logp, batch)[1])


def test_raft_on_right_or_wrong_is_reinforce_without_a_baseline():
    """And with PPO's machinery switched off, PPO is the same."""
    logp, batch = on_policy()
    binary = replace(batch, reward=(batch.reward >= 1).double())
    loss, gradient = solve(Raft(0.5), logp, binary)
    torch.testing.assert_close(loss, -(binary.reward * (logp * batch.mask).sum(-1)).mean(1))
    torch.testing.assert_close(gradient, -binary.reward[..., None] * batch.mask / 3)
    _, by_ppo = solve(Ppo(beta=0.0, gae_lambda=1.0), logp, binary, torch.zeros_like(logp))
    torch.testing.assert_close(gradient, by_ppo)


# Expectations, by going through every group that can be drawn

BETA = 0.4
LOGITS = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
REWARD = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64)
REF = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
MU = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
LOG_Z = torch.logsumexp(REF.log() + REWARD / BETA, 0)


def answers(index: Tensor, logits: Tensor, mu: Tensor) -> tuple[Tensor, Batch]:
    """Groups [B K] of the three answers, each of one token, sampled by mu."""
    b, k = index.shape
    ones, index = torch.ones(b, 1), index[..., None]
    batch = Batch(
        ones.long(), ones.bool(), index, torch.ones(b, k, 1).bool(), torch.zeros(b, k, 1).bool(),
        mu.log()[index], REF.log()[index], REWARD[index[..., 0]],
        torch.zeros(b, k, 1),
    )  # fmt: skip
    return logits.log_softmax(0)[index], batch


def expected_gradient(
    objective: Any, k: int, mu: Tensor | None = None, head: float | None = None
) -> Tensor:
    """Return d E[loss] / d logits over all groups of k samples of mu, or of the policy itself."""
    logits = LOGITS.clone().requires_grad_()
    mu = LOGITS.softmax(0) if mu is None else mu
    index = torch.tensor(list(product(range(3), repeat=k)))
    logp, batch = answers(index, logits, mu)
    own = () if head is None else (torch.full((len(index),), head, dtype=torch.float64),)
    loss, _ = objective(logp, batch, *own)
    return torch.autograd.grad((mu[index].prod(1) * loss).sum(), logits)[0]


def true_gradient(value: Tensor) -> Tensor:
    """Of -E[value] under the policy, the values held fixed."""
    p = LOGITS.softmax(0)
    return -p * (value - (p * value).sum())


def regularised() -> Tensor:
    """r - beta log(pi / ref) of each answer: its gradient, held fixed, is that of E[r] - beta
    KL(pi, ref).
    """
    return REWARD - BETA * (LOGITS.log_softmax(0) - REF.log())


@pytest.mark.parametrize("k", [2, 3])
def test_on_policy_expectations(k):
    """RLOO, and TB with any constant for log Z, are unbiased; TB's own mean costs it 1 / K of the
    gradient.
    """
    target = true_gradient(regularised())
    torch.testing.assert_close(expected_gradient(Rloo(BETA), k), target)
    torch.testing.assert_close(expected_gradient(ProximalRloo(BETA), k), target)
    tb = TrajectoryBalance(BETA, taper="residual")
    torch.testing.assert_close(expected_gradient(tb, k), target * (k - 1) / k)
    for log_z in (LOG_Z.item(), 0.0):
        found = expected_gradient(TrajectoryBalanceLearnedZ(BETA), k, head=log_z)
        torch.testing.assert_close(found, target)
    torch.testing.assert_close(expected_gradient(DrGrpo(), k), true_gradient(REWARD) * (k - 1) / k)
    accepted = true_gradient((REWARD >= 0.5).double())
    torch.testing.assert_close(expected_gradient(Raft(0.5), k), accepted)


def test_the_learned_log_z_is_pulled_by_the_distance_to_the_target():
    """E[d loss / d log Z] at the true log Z is beta KL(pi, pi*): 0 at the target alone."""
    p, star = LOGITS.softmax(0), (REF.log() + REWARD / BETA - LOG_Z).exp()
    logp, batch = answers(torch.arange(3)[:, None].expand(3, 2), LOGITS, p)
    pull = head_gradient(TrajectoryBalanceLearnedZ(BETA), logp, batch, LOG_Z.expand(3))
    torch.testing.assert_close((p * pull).sum(), BETA * (p * (p / star).log()).sum())


def test_grpo_with_kl_pulls_towards_the_reference_from_its_side():
    """E[d k3] is the gradient of KL(ref, pi), not of KL(pi, ref): p - ref in the logits. That is
    where GRPO's target parts from TB's.
    """
    p = LOGITS.softmax(0)
    pull = expected_gradient(DrGrpo(beta=BETA), 2) - expected_gradient(DrGrpo(), 2)
    torch.testing.assert_close(pull, BETA * (p - REF))


@pytest.mark.parametrize("k", [2, 3])
def test_weighted_rloo_off_policy_is_the_policy_gradient_of_what_was_settled(k):
    """Unbiased for r - beta (log mu - log ref) as a reward, whoever sampled; without weights it is
    not.
    """
    settled = REWARD - BETA * (MU / REF).log()
    for kind in ("token", "sequence"):
        weighted = Rloo(BETA, importance=kind, importance_cap=9.0)
        torch.testing.assert_close(expected_gradient(weighted, k, MU), true_gradient(settled))
    assert (expected_gradient(Rloo(BETA), k, MU) - true_gradient(settled)).abs().max() > 0.05


def test_tb_corrected_for_delay_has_the_on_policy_gradient():
    """In the largest of groups: one that has each answer as often as mu, (.2, .5, .3), gives it.
    Raw TB has another, to the same target.
    """
    index = torch.tensor([[0] * 2 + [1] * 5 + [2] * 3])
    found = {}
    for cap in (None, 9.0):
        logits = LOGITS.clone().requires_grad_()
        loss, _ = TrajectoryBalance(BETA, importance_cap=cap)(*answers(index, logits, MU))
        found[cap] = torch.autograd.grad(loss.sum(), logits)[0]
    torch.testing.assert_close(found[9.0], true_gradient(regularised()))
    assert (found[None] - true_gradient(regularised())).abs().max() > 0.02


def test_both_are_at_rest_at_the_target_whoever_samples():
    """There, and off policy: TB, raw or corrected, and with the true log Z, has no gradient in any
    group.
    """
    star = REF.log() + REWARD / BETA - LOG_Z
    logp, batch = answers(torch.tensor(list(product(range(3), repeat=3))), star, MU)
    options: list[dict[str, Any]] = [
        {"taper": "none"}, {"taper": "residual"}, {"taper": "reward"}, {"importance_cap": 1.5},
    ]  # fmt: skip
    for each in options:
        assert solve(TrajectoryBalance(BETA, **each), logp, batch)[1].abs().max() < 1e-12
    _, learned = solve(TrajectoryBalanceLearnedZ(BETA), logp, batch, LOG_Z.expand(27))
    assert learned.abs().max() < 1e-12
    assert solve(TBAPrime(BETA), logp, batch)[1].abs().max() < 1e-12
    assert solve(Rloo(BETA), logp, batch)[1].abs().max() > 0.05


# Finite differences


SMOOTH = [
    TrajectoryBalance(0.3, taper="none"), TrajectoryBalance(0.3, alpha=0.5), OnlineDpo(0.3),
    Grpo(0.3), Grpo(0.3, clip_high=1.5), DrGrpo(0.3), ProximalRloo(0.3), VinePpo(0.3), Oapl(0.3),
    Gspo(),
]  # fmt: skip


@pytest.mark.parametrize("objective", SMOOTH, ids=repr)
def test_finite_differences(objective):
    """For TB: VarGrad's detached log Z changes nothing, for the loss is a variance."""
    logp, batch = moved()
    assert torch.autograd.gradcheck(lambda x: objective(x, batch)[0], logp.clone().requires_grad_())


@pytest.mark.parametrize("options", [{}, {"taper": "reward"}, {"taper": "reward", "shift": 0.3}])
def test_finite_differences_with_weights(options):
    """Weights and log Z have no gradient: the loss is that of the others, with both held fixed."""
    logp, batch = moved()
    objective = TrajectoryBalance(0.3, **options)
    kl = ((logp - batch.ref_logp) * batch.mask).sum(-1)
    log_z = objective(logp, batch)[1]["tb/log_z"][:, None]
    others = (batch.reward.sum(1, keepdim=True) - batch.reward) / 2
    error = 0.3 * (kl + log_z) - batch.reward
    weight = tapered(objective.tapers_by, error, logp, batch)
    assert (weight < 1).any()

    def fixed(x: Tensor) -> Tensor:
        error = 0.3 * (((x - batch.ref_logp) * batch.mask).sum(-1) + log_z) - batch.reward
        return weight * (error - objective.shift * others).square() / 0.6

    small = 1e-6
    _, gradient = solve(objective, logp, batch)
    for place in batch.mask.nonzero():
        step = torch.zeros_like(logp)
        step[tuple(place)] = small
        slope = (fixed(logp + step) - fixed(logp - step)).mean(1).sum() / (2 * small)
        torch.testing.assert_close(gradient[tuple(place)], slope, atol=1e-7, rtol=1e-6)


def test_finite_differences_with_a_head():
    """PPO's head learns from a target that is held fixed, so that only log-probs can be varied."""
    logp, batch = moved()
    log_z = torch.tensor([0.7, -0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, z: TrajectoryBalanceLearnedZ(0.3, taper="none")(x, batch, z)[0],
        (logp.clone().requires_grad_(), log_z),
    )
    assert torch.autograd.gradcheck(
        lambda x: Ppo(0.3)(x, batch, VALUES)[0], logp.clone().requires_grad_()
    )


# Options


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize(
    "objective", [TrajectoryBalance, TrajectoryBalanceLearnedZ, TBAPrime, OnlineDpo]
)
def test_a_beta_without_a_target_is_refused(objective, beta):
    with pytest.raises(ValueError, match=r"objective\.beta"):
        check_options(objective, "objective", "it", {"beta": beta})


def test_other_options_without_a_sense_are_refused():
    refused: list[tuple[Any, dict[str, Any]]] = [
        (TrajectoryBalance, {"importance_cap": 0.0}),
        (TrajectoryBalance, {"taper": "residual", "importance_cap": 1.0}),
        (TrajectoryBalance, {"shift": 0.5, "alpha": 0.5}),
        (TrajectoryBalance, {"shift": -0.5}),
        (TrajectoryBalance, {"shift": 1.5}),
        (TrajectoryBalance, {"taper": "rewards"}),
        (TBAPrime, {"log_ratio_clamp": 0.0}),
        (TBAPrime, {"importance_cap": -1.0}),
        (Rloo, {"importance_cap": 0.0}),
        (ProximalRloo, {"clip": 0.0}),
        (DrGrpo, {"clip": -0.2}),
        (Grpo, {"clip": 0.0}),
        (Grpo, {"clip_high": 0.0}),
        (Ppo, {"clip": 0.0}),
        (Ppo, {"head_learning_rate": 0.0}),
        (VinePpo, {"clip": 0.0}),
        (TrajectoryBalanceLearnedZ, {"head_learning_rate": 0.0}),
        (VinePpo, {"rollouts": 0}),
        (VinePpo, {"step_tokens": 0}),
    ]
    for objective, options in refused:
        with pytest.raises(ValueError, match=rf"objective\.{next(iter(options))}"):
            objective(**check_options(objective, "objective", "it", options))


def test_tapered_tb_hardly_pushes_down_what_is_already_unlearned():
    """The worst response of the first group, e^-6 as likely as when it was sampled."""
    logp, batch = drifted()
    behavior = batch.behavior_logp.clone()
    behavior[0, 2] += 6
    stale = replace(batch, behavior_logp=behavior)
    plain = solve(TrajectoryBalance(0.5, taper="none"), logp, stale)[1]
    tapered = solve(TrajectoryBalance(0.5, taper="residual"), logp, stale)[1]
    assert plain[0, 2].abs().max() > 0.2
    assert tapered[0, 2].abs().max() < 0.001
    torch.testing.assert_close(tapered[0, :2], plain[0, :2])


def test_ppo_settles_the_kl_when_it_sampled():
    """`drifted`, V = 0, lambda = 1: a token's A is the rewards to come, with log mu - log ref = log
    pi - log ref - log ratio.
    """
    _, batch = drifted()
    last = [-(0.5 - log(0.5)) / 2 + 1, -(1 - log(3)) / 2 + 0.5]
    found = Ppo(0.5, gae_lambda=1.0).advantages(torch.zeros_like(VALUES), batch)
    assert found[0, 0, :2].tolist() == pytest.approx([last[0] - (0.5 - log(2)) / 2, last[0]])
    assert found[1, 1, 0].item() == pytest.approx(last[1])


def test_tb_corrected_for_delay_is_biased_by_one_over_k():
    """Its mean is a ratio of two estimates. Relative to TB's own (K - 1) / K of the on-policy
    gradient, the rest falls with K; raw TB's does not.
    """
    target = true_gradient(regularised())
    corrected, raw = [], []
    for cap, biases in ((9.0, corrected), (None, raw)):
        for k in (2, 4, 8):
            found = expected_gradient(TrajectoryBalance(BETA, importance_cap=cap), k, MU)
            biases.append((found - target).abs().max().item())
    assert corrected[1] < 0.6 * corrected[0] and corrected[2] < 0.6 * corrected[1]
    assert raw[2] > 2 * corrected[2]


SHIFTED = (
    "asymre", "cispo", "dr_grpo", "grpo", "gspo", "m2po", "oapl", "online_dpo", "proximal_rloo",
    "rloo", "tb", "tba_prime", "vespo",
)  # fmt: skip
"""Objectives that subtract a baseline of the group."""


def rewarded(groups: list[Group], rewards: Sequence[float]) -> Batch:
    """Return the batch of the groups with these rewards in each."""
    changed = []
    for group in groups:
        pairs = zip(group.trajectories, rewards, strict=True)
        own = tuple(replace(t, reward=reward) for t, reward in pairs)
        changed.append(replace(group, trajectories=own))
    return collate(changed)


@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("common", [-5000.1, 1e5 + 0.1, 1e8])
def test_what_all_rewards_of_a_group_have_in_common_changes_nothing(name, common, groups, logp):
    rewards = (0.25, 0.75, 0.25, 1.0)
    objective = find("objectives", name)()
    plain, shifted = (
        solve(objective, logp, rewarded(groups, [r + by for r in rewards])) for by in (0.0, common)
    )
    torch.testing.assert_close(plain, shifted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size, least", [(0.0, 1e-8), (1e6, 5e-4), (1e9, 1e-3), (1e12, 1.0)])
def test_a_small_difference_of_rewards_counts(size, least, groups, logp):
    """However large they are: one response is better than the others."""
    reward = rewarded(groups, (size, size + least, size, size)).reward
    for advantage in (centred(reward), standardised(reward)):
        assert (advantage.argmax(1) == 1).all() and (advantage[:, 0] < 0).all()
    assert better(reward).tolist() == [[False, True, False, False]] * len(groups)


EQUAL = [(0.1,) * 4, (-5000.1,) * 4, (1e12,) * 4, (1e12, 1e12 + 1e-4, 1e12, 1e12 + 2e-4)]


@pytest.mark.parametrize("rewards", [*EQUAL, (0.3, 0.1 + 0.2, 0.3, 0.3)])
def test_equal_rewards_have_no_advantage(rewards, groups, logp):
    """Whatever their size, and also if rounding has made them differ."""
    batch = rewarded(groups, rewards)
    assert not standardised(batch.reward).any() and not standardised(batch.reward.float()).any()
    plain = (Cispo(), Gspo(), OnlineDpo(), Grpo(beta=0.0), Rloo(beta=0.0), M2po(), Vespo())
    whitened = VinePpo(beta=0.0, whiten=True), Ppo(beta=0.0, gae_lambda=1.0, whiten=True)
    value = torch.as_tensor(rewards[0], dtype=torch.float32).expand_as(batch.value)
    for objective in (*plain, whitened[0]):
        assert not solve(objective, logp, replace(batch, value=value))[1].any(), objective
    head = torch.zeros_like(logp)
    assert solve(whitened[1], logp, batch, head)[1].abs().max() < 1e-6
