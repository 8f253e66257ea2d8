"""Where losses end, and what their gradients are on policy, by enumeration of all answers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from build import counted, grouped
from conftest import module_at
from torch import Tensor

from tba.objectives.oapl import Oapl
from tba.objectives.tb import TrajectoryBalance
from tba.objectives.tb_learned_z import TrajectoryBalanceLearnedZ

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

ROOT = Path(__file__).parents[2]
SCRIPT = module_at(ROOT / "scripts" / "draw_fixed_value.py")
REF = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
REWARD = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64)


def minimum(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the distribution at which gradient steps on its logits end."""
    logits = start.clone().requires_grad_()
    for _ in range(20_000):
        (gradient,) = torch.autograd.grad(loss(logits).sum(), logits)
        if gradient.abs().max() < 1e-10:
            break
        logits = (logits - 2.0 * gradient).detach().requires_grad_()
    return logits.detach().softmax(0)


def total_variation(p: Tensor, q: Tensor) -> float:
    return 0.5 * (p - q).abs().sum().item()


# f-trajectory balance


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 1.0, 1.25, 2.0])
def test_the_optimum_of_tb_is_the_target_for_every_alpha(alpha):
    """From samples of another policy, (.2, .5, .3)."""
    beta = 0.4
    objective = TrajectoryBalance(beta, alpha=alpha)
    star = torch.softmax(REF.log() + REWARD / beta, 0)
    found = minimum(lambda z: objective(*counted([2, 5, 3], z, REF, REWARD))[0], REF.log())
    assert total_variation(REF, star) > 0.2
    assert total_variation(found, star) < 1e-6


def on_policy_gradient(alpha: float, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `tb` in the logits, pi = (.2, .5, .3), and the target."""
    pi = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logits = pi.log().requires_grad_()
    loss, _ = TrajectoryBalance(beta, alpha=alpha)(*counted([2, 5, 3], logits, REF, REWARD))
    star = torch.softmax(REF.log() + REWARD / beta, 0)
    return torch.autograd.grad(loss.sum(), logits)[0], pi, star


def gradient_of(divergence: Callable[[Tensor], Tensor], pi: Tensor) -> Tensor:
    logits = pi.log().requires_grad_()
    return torch.autograd.grad(divergence(logits.softmax(0)), logits)[0]


def check_gradient(found: Tensor, wanted: Tensor) -> None:
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_on_policy_alpha_one_is_reverse_kl(beta):
    found, pi, star = on_policy_gradient(1.0, beta)
    check_gradient(found, beta * gradient_of(lambda p: (p * (p / star).log()).sum(), pi))


def test_on_policy_alpha_zero_is_forward_kl():
    """In units of reward, with beta = 1."""
    found, pi, star = on_policy_gradient(0.0, 1.0)
    check_gradient(found, gradient_of(lambda p: (star * (star / p).log()).sum(), pi))


def test_on_policy_alpha_one_half_is_the_alpha_divergence():
    """4 (1 - sum sqrt(pi pi*)) up to the factor sum sqrt(pi pi*), by which c normalises."""
    found, pi, star = on_policy_gradient(0.5, 1.0)
    affinity = (pi * star).sqrt().sum()
    divergence = gradient_of(lambda p: 4 * (1 - (p * star).sqrt().sum()), pi)
    check_gradient(found * affinity, divergence)


@pytest.mark.parametrize("beta", [0.4, 1.0, 2.0])
@pytest.mark.parametrize("alpha", [0.25, 0.8, 1.25])
def test_on_policy_every_alpha_is_a_renyi_divergence(alpha, beta):
    """Of order 1 - (1 - alpha) beta, times beta over this order."""
    order = 1 - (1 - alpha) * beta
    found, pi, star = on_policy_gradient(alpha, beta)
    renyi = gradient_of(lambda p: (p**order * star ** (1 - order)).sum().log() / (order - 1), pi)
    check_gradient(found, beta / order * renyi)


# A fixed V beside the group's own


def fixed_value(objective: Oapl | TrajectoryBalance) -> float:
    """Return the distance to the target of an objective's optimum on samples of the reference."""
    ref = torch.tensor([SCRIPT.RIGHT, 1 - SCRIPT.RIGHT], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = minimum(lambda z: objective(*counted([21, 29], z, ref, reward))[0], ref.log())
    return total_variation(found, torch.softmax(ref.log() + reward / SCRIPT.BETA, 0))


def test_only_the_live_group_and_the_exact_v_end_at_the_target():
    beta = SCRIPT.BETA
    assert fixed_value(TrajectoryBalance(beta)) < 1e-6
    assert fixed_value(Oapl(beta, value_beta=beta)) < 1e-6  # a group as large as the population
    mean_reward = fixed_value(Oapl(beta, value_beta=float("inf")))
    assert mean_reward == pytest.approx(SCRIPT.distance(SCRIPT.RIGHT), abs=1e-6)


def test_v_from_few_samples_is_low():
    """All groups of four, with their chances: the script's mean is that of the objective's V."""
    groups = torch.cartesian_prod(*[torch.tensor([1.0, 0.0])] * 4)
    chance = torch.where(groups == 1, SCRIPT.RIGHT, 1 - SCRIPT.RIGHT).prod(1)
    mean = (chance * Oapl(SCRIPT.BETA, SCRIPT.BETA).value(groups)).sum().item()
    assert mean == pytest.approx(SCRIPT.mean_estimate(4), abs=1e-6)
    low = [SCRIPT.EXACT - SCRIPT.mean_estimate(k) for k in SCRIPT.SAMPLES]
    assert low == pytest.approx([0.058, 0.012, 0.003], abs=6e-4)


def test_the_page_has_the_figures_of_the_script():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    for name, value in SCRIPT.marked().items():
        low = SCRIPT.EXACT - value
        assert f"| {name} | {low:.3f} | {SCRIPT.distance(value):.3f} |" in page


# Weights and baselines of trajectory balance, over all groups that can be drawn

ANSWERS = 4
BASE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
GROUPS = torch.cartesian_prod(*[torch.arange(ANSWERS)] * 3)
REWARDS = {"right or wrong": [0.0, 1.0, 0.0, 1.0], "graded": [0.0, 1.0, 0.3, 0.6]}
SAMPLERS = {
    "uniform": [0.25, 0.25, 0.25, 0.25],
    "the best answer mostly": [0.04, 0.8, 0.04, 0.12],
    "the worst answer mostly": [0.85, 0.05, 0.05, 0.05],
    "itself": None,
    "itself, 8 steps ago": None,
}


def end(
    objective: TrajectoryBalance | TrajectoryBalanceLearnedZ,
    reward: Tensor,
    sampler: str,
    noise: float = 0.0,
) -> Tensor:
    """Return where steps on the expected loss of a group end; log Z of a head is free.

    With `noise`, log mu is wrong by so many nats, in each group and response by another number.
    """
    logits = torch.tensor([0.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    errors = torch.randn(GROUPS.shape, generator=torch.Generator().manual_seed(0)).double()
    log_z = torch.zeros(1, dtype=torch.float64)
    history = [logits.softmax(0)]
    for _ in range(20_000):
        mu = history[0] if SAMPLERS[sampler] is None else torch.tensor(SAMPLERS[sampler]).double()
        logits.requires_grad_()
        log_z.requires_grad_()
        wrong = (mu.log()[GROUPS] + noise * errors)[..., None]
        logp, batch = grouped(GROUPS, logits, BASE, reward, wrong)
        chance = mu[GROUPS].prod(1)
        own = (log_z.expand(len(GROUPS)),) if objective.head else ()
        loss = (chance * objective(logp, batch, *own)[0]).sum()
        gradient, pull = torch.autograd.grad(loss, (logits, log_z), allow_unused=True)
        logits = (logits - 2 * gradient).detach()
        log_z = (log_z - (0 if pull is None else 2 * pull)).detach()
        history = [*history, logits.softmax(0)][-8 if "ago" in sampler else -1 :]
        if gradient.abs().max() < 1e-8:
            break
    return history[-1]


KINDS = [
    TrajectoryBalance(0.4, taper="none"),
    TrajectoryBalance(0.4, taper="residual"),
    TrajectoryBalance(0.4, taper="reward"),
    TrajectoryBalanceLearnedZ(0.4, taper="none"),
    TrajectoryBalanceLearnedZ(0.4, taper="residual"),
    TrajectoryBalanceLearnedZ(0.4, taper="reward"),
]


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("objective", KINDS, ids=repr)
def test_every_taper_ends_at_the_target_whoever_samples(objective, rewards):
    reward = torch.tensor(REWARDS[rewards]).double()
    star = torch.softmax(BASE.log() + reward / objective.beta, 0)
    for sampler in SAMPLERS:
        assert total_variation(end(objective, reward, sampler), star) < 1e-6, sampler
    assert total_variation(end(objective, reward, "uniform", noise=2.0), star) < 1e-6


def test_a_shift_ends_at_the_target_on_samples_of_the_policy_itself():
    """And elsewhere on those of another policy, at any size."""
    reward = torch.tensor(REWARDS["right or wrong"]).double()
    star = torch.softmax(BASE.log() + reward / 0.4, 0)
    for taper in ("none", "residual", "reward"):
        objective = TrajectoryBalance(0.4, taper=taper, shift=0.5)
        for sampler in ("itself", "itself, 8 steps ago"):
            assert total_variation(end(objective, reward, sampler), star) < 1e-6
        tilted = [
            total_variation(end(replace(objective, shift=shift), reward, "uniform"), star)
            for shift in (0.5, 0.1)
        ]
        assert tilted[0] > tilted[1] > 1e-3
