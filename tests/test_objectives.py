"""Losses against hand-computed numbers, identities between objectives, finite differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tba.objectives.rloo import Rloo
from tba.objectives.tb import TrajectoryBalance
from tba.types import Batch


def ragged(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Batch]:
    """B = 2, K = 3, ragged T <= 4; log-probs chosen so that their sums are easy."""
    lengths = torch.tensor([[2, 4, 1], [3, 1, 2]])
    mask = torch.arange(4) < lengths[..., None]
    logp = torch.tensor([[-2.0, -4.0, -1.0], [-3.0, -1.0, -2.0]], dtype=dtype)[..., None] / lengths[..., None] * mask
    ref = torch.tensor([[-3.0, -4.0, -3.0], [-3.0, -2.0, -2.0]], dtype=dtype)[..., None] / lengths[..., None] * mask
    reward = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 2.0]], dtype=dtype)
    ones = torch.ones(2, 1)
    return logp, Batch(ones.long(), ones.bool(), torch.ones(2, 3, 4).long(), mask, ref, ref, reward, torch.zeros(2, 3).long())


def test_tb_by_hand() -> None:
    """beta = .5. KL sums: (1, 0, 2), (0, 1, 0). Residuals .5 KL - r: (-.5, 0, 1), (-.5, 0, -2); their means 1/6, -5/6."""
    logp, batch = ragged()
    loss, extras = TrajectoryBalance(beta=0.5)(logp, batch)
    torch.testing.assert_close(loss, torch.tensor([(4 / 9 + 1 / 36 + 25 / 36) / 3, (1 / 9 + 25 / 36 + 49 / 36) / 3]))
    torch.testing.assert_close(extras["tb/log_z"], torch.tensor([-1 / 3, 5 / 3]))


def test_tb_gradient_by_hand() -> None:
    """d loss / d logp_jt = (residual_j - mean) / K at every real token."""
    logp, batch = ragged()
    logp.requires_grad_()
    TrajectoryBalance(beta=0.5)(logp, batch)[0].sum().backward()
    centred = torch.tensor([[-2 / 3, -1 / 6, 5 / 6], [1 / 3, 5 / 6, -7 / 6]])
    torch.testing.assert_close(logp.grad, centred[..., None] / 3 * batch.mask)


def test_rloo_by_hand() -> None:
    """R = r - .5 KL: (.5, 0, -1), (.5, 0, 2); advantages are K / (K - 1) (R - mean); loss = -mean A log pi."""
    logp, batch = ragged()
    loss, _ = Rloo(beta=0.5)(logp, replace(batch, behavior_logp=logp))
    a = torch.tensor([[2 / 3, 1 / 6, -5 / 6], [-1 / 3, -5 / 6, 7 / 6]]) * 1.5
    torch.testing.assert_close(loss, -(a * torch.tensor([[-2.0, -4.0, -1.0], [-3.0, -1.0, -2.0]])).mean(1))


@pytest.mark.parametrize("beta", [0.01, 0.5, 3.0])
def test_on_policy_tb_is_rloo_up_to_its_constant(beta: float) -> None:
    """RLOO's gradient is K / (K - 1) times TB's, whatever beta: that is why beta / 2 is in the loss."""
    gradients = []
    for objective in (TrajectoryBalance(beta), Rloo(beta)):
        logp, batch = ragged(torch.float64)
        logp.requires_grad_()
        objective(logp, replace(batch, behavior_logp=logp.detach()))[0].sum().backward()
        gradients.append(logp.grad)
    torch.testing.assert_close(gradients[1], gradients[0] * 3 / 2)


def test_off_policy_rloo_is_not_tb() -> None:
    """RLOO's advantage knows the policy that sampled, TB's residual the live one: that is what staleness changes."""
    gradients = []
    for objective in (TrajectoryBalance(0.5), Rloo(0.5)):
        logp, batch = ragged(torch.float64)
        logp.requires_grad_()
        objective(logp, replace(batch, behavior_logp=batch.ref_logp))[0].sum().backward()
        gradients.append(logp.grad)
    assert (gradients[1] - gradients[0] * 3 / 2).abs().max() > 0.1


def test_group_residual_has_mean_zero() -> None:
    logp, batch = ragged()
    _, extras = TrajectoryBalance(beta=0.5)(logp, batch)
    residual = 0.5 * ((logp - batch.ref_logp) * batch.mask).sum(-1) - batch.reward + 0.5 * extras["tb/log_z"][:, None]
    torch.testing.assert_close(residual.mean(1), torch.zeros(2), atol=1e-6, rtol=0)


def test_tb_is_zero_at_the_tilted_reference() -> None:
    _, batch = ragged()
    bonus = batch.reward / 0.5 / batch.mask.sum(-1)
    loss, _ = TrajectoryBalance(beta=0.5)(batch.ref_logp + bonus[..., None] * batch.mask, batch)
    torch.testing.assert_close(loss, torch.zeros(2), atol=1e-6, rtol=0)


def test_finite_differences() -> None:
    """VarGrad's detached log Z changes nothing: the loss is a variance, and its gradient is the true one."""
    logp, batch = ragged(torch.float64)
    assert torch.autograd.gradcheck(lambda x: TrajectoryBalance(beta=0.3)(x, batch)[0], logp.clone().requires_grad_())


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
def test_tb_refuses_a_beta_without_a_target(beta: float) -> None:
    with pytest.raises(ValueError, match=r"objective\.beta"):
        TrajectoryBalance(beta)
