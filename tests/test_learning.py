"""Every objective learns on policy, in the real local loop, and ends at its target if it has one.

All answers of the toy can be enumerated, so that expected rewards and distances are exact.
"""

from pathlib import Path
from statistics import fmean

import pytest
import torch
from build import first_policy, run_and_keep
from exact import BETA, Enumerated, enumerate_answers, toy_config

from tba.config.plugins import names

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

KL_IN_THE_REWARD = ("tb_learned_z", "tba_prime", "rloo", "ppo")
"""Their target is ref(y) exp(r(y) / beta) / Z; test_exactness.py shows the same for `tb`."""
EXACT = ("tba_prime", "rloo")
"""Those whose gradient tests/objectives compares with the exact one, or with that of `tb`."""
OPTIONS = {"vineppo": ("objective.step_tokens=1",)}
"""Options of objectives whose default steps are longer than an answer of the toy."""
SMALL = (
    "strategy=recent", "sampling.samples=16", "trainer.batch_size=48", "trainer.group_size=16",
    "log.sample_every=0",
)  # fmt: skip


def learned(model: Path, folder: Path, *settings: str, max_tokens: int = 2) -> list[Enumerated]:
    """Return the distribution at which the policy of a run ends, for each prompt."""
    config = toy_config(
        model, folder / "run", *SMALL, *settings, f"sampling.max_tokens={max_tokens}"
    )
    run = run_and_keep(config)
    return enumerate_answers(run.trainer.policy, first_policy(config), run.parts.text, max_tokens)


ENDING = [pytest.param(n, marks=pytest.mark.slow if n in EXACT else ()) for n in KL_IN_THE_REWARD]


@pytest.mark.parametrize("objective", ENDING)
def test_kl_in_the_reward_ends_at_the_tilted_reference(objective, shallow_toy_model, tmp_path):
    """The total variation falls from .24 and more to below .07."""
    settings = (f"objective={objective}", f"objective.beta={BETA}", "run.steps=100")
    for found in learned(shallow_toy_model, tmp_path, *settings):
        target = found.target(BETA)
        assert 0.5 * (found.reference - target).abs().sum() > 0.1
        assert found.distance(target) < 0.07
        assert found.expected_reward == pytest.approx(
            (target * found.reward).sum().item(), abs=0.04
        )


OTHERS = sorted({*names("objectives")} - {"tb", *KL_IN_THE_REWARD})
SIBLINGS = ("asymre", "cispo", "gspo", "m2po", "oapl", "proximal_rloo", "topr", "vespo")
"""They differ from others in a weight or a clip, whose losses and curves are tested elsewhere."""
RISING = [pytest.param(n, marks=pytest.mark.slow if n in SIBLINGS else ()) for n in OTHERS]


@pytest.mark.parametrize("objective", RISING)
def test_the_expected_reward_rises(objective, shallow_toy_model, tmp_path):
    """Default options lead from 0 to more than .45; the best answer has .6.

    The other objectives end at their targets, as the test above shows.
    """
    settings = (f"objective={objective}", *OPTIONS.get(objective, ()), "run.steps=40")
    found = learned(shallow_toy_model, tmp_path, *settings)
    assert fmean((one.reference * one.reward).sum().item() for one in found) == pytest.approx(
        0.0, abs=0.01
    )
    assert fmean(one.expected_reward for one in found) > 0.45


def test_dr_grpo_with_kl_ends_where_its_own_gradient_is_zero(shallow_toy_model, tmp_path):
    """Answers of one token: p (c (E[r] - r) + beta) = beta ref, c = (K - 1) / K.

    That is not the tilted reference, and the difference is visible.
    """
    settings = ("objective=dr_grpo", "objective.beta=0.3", "run.steps=100")
    for found in learned(shallow_toy_model, tmp_path, *settings, max_tokens=1):
        target = at_rest(found, 0.3, 15 / 16)
        assert found.distance(target) < 0.03
        assert found.distance(found.target(0.3)) > 0.05


def at_rest(found: Enumerated, beta: float, c: float) -> torch.Tensor:
    """Return beta ref / (beta + c (E - r)) with the mean reward E, which makes it sum to one."""
    low, high = found.reward.max().item() - beta / c, found.reward.max().item()
    for _ in range(60):
        mean = (low + high) / 2
        p = beta * found.reference / (beta + c * (mean - found.reward))
        low, high = (mean, high) if p.sum() > 1 else (low, mean)
    return p
