"""Search with rounded weights: what the engine samples, and where objectives end."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from build import counted, pack
from torch import Tensor

from studies.off_policy.quantised import Quantised, rounded
from tba.config.tables import PolicyTable
from tba.engines.transformers import Transformers
from tba.models.pretrained import load_text
from tba.objectives.rloo import Rloo
from tba.objectives.tb import TrajectoryBalance
from tba.types import Completion, Sampling
from tba.weights import Weights

SEARCH = Sampling(4, 1.0, 5)
EVALUATION = Sampling(2, 1.0, 5)
REF = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
REWARD = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64)
BETA = 0.4
STAR = torch.softmax(REF.log() + REWARD / BETA, 0)


def test_a_weight_is_one_of_fifteen_values_per_output():
    weight = torch.tensor([[0.7, -0.34, 0.06, 0.04], [7.0, 0.4, -7.0, 0.6]])
    expected = torch.tensor([[0.7, -0.3, 0.1, 0.0], [7.0, 0.0, -7.0, 1.0]])
    torch.testing.assert_close(rounded(weight, 4), expected)
    assert (rounded(weight, 8) - weight).abs().max() < 7 / 254 + 1e-6
    assert torch.equal(rounded(torch.zeros(1, 3), 4), torch.zeros(1, 3))


def plain(model: Path, version: int, bits: int | None = None) -> Transformers:
    """Return an engine with some version of the weights, rounded by hand."""
    policy = PolicyTable(model=str(model))
    engine = Transformers(policy, load_text(policy), "cpu", False, SEARCH)
    if version:
        engine.load_weights(newer(model))
    for layer in engine.model.base_model.modules():
        if isinstance(layer, torch.nn.Linear) and bits:
            layer.weight.data = rounded(layer.weight.data, bits)
    return engine


def newer(model: Path) -> Weights:
    policy = PolicyTable(model=str(model))
    engine = Transformers(policy, load_text(policy), "cpu", False, SEARCH)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.5)
    return pack(engine.model, 1, bf16=False)


@pytest.mark.parametrize("bits", [4, 8])
def test_searches_are_of_rounded_weights_and_evaluations_of_exact_ones(tiny_model, bits):
    """Also after newer weights came; the log-probs are those of the policy that sampled."""
    policy = PolicyTable(model=str(tiny_model))
    engine = Quantised(policy, load_text(policy), "cpu", False, SEARCH, bits=bits)
    prompts = [np.array([3, 4, 12])]
    for version in (0, 1):
        if version:
            engine.load_weights(newer(tiny_model))
        of_rounded = plain(tiny_model, version, bits).generate(prompts, SEARCH, 1)[0]
        of_exact = plain(tiny_model, version).generate(prompts, SEARCH, 1)[0]
        searched = engine.generate(prompts, SEARCH, 1)[0]
        assert same(searched, of_rounded) and not same(searched, of_exact)
        assert [completion.version for completion in searched] == [version] * 4
        evaluated = plain(tiny_model, version).generate(prompts, EVALUATION, 1)[0]
        assert same(engine.generate(prompts, EVALUATION, 1)[0], evaluated)


def same(one: Sequence[Completion], other: Sequence[Completion]) -> bool:
    """Return whether two groups have the same tokens, and log-probs but for rounding."""
    return all(
        np.array_equal(a.tokens, b.tokens) and np.allclose(a.logp, b.logp, atol=1e-6)
        for a, b in zip(one, other, strict=True)
    )


# Three answers of one token, whose logits the searches round to even numbers


def sampled(logits: Tensor) -> list[int]:
    """Return how often each of 1000 answers of the rounded policy is which."""
    policy = torch.softmax(2 * (logits / 2).round(), 0)
    return [max(1, round(1000 * share)) for share in policy.tolist()]


def gradient(objective: TrajectoryBalance | Rloo, logits: Tensor) -> Tensor:
    """Return the expected gradient in the logits, of answers of the rounded policy."""
    loss, _ = objective(*counted(sampled(logits.detach()), logits, REF, REWARD))
    return torch.autograd.grad(loss.sum(), logits)[0]


def end_of(objective: TrajectoryBalance | Rloo) -> Tensor:
    """Return the policy after many gradient steps whose answers are of the rounded policy."""
    logits = REF.log().requires_grad_()
    for _ in range(3000):
        logits = (logits - 0.5 * gradient(objective, logits)).detach().requires_grad_()
    return logits.detach().softmax(0)


def total_variation(p: Tensor, q: Tensor) -> float:
    return 0.5 * (p - q).abs().sum().item()


@pytest.mark.usefixtures("unchecked_shapes")
def test_the_optimum_of_tb_is_the_target_whatever_searched():
    mu = torch.tensor(sampled(STAR.log())) / 1000
    assert total_variation(mu, STAR) > 0.02  # the rounded policy is another one
    assert total_variation(end_of(TrajectoryBalance(BETA)), STAR) < 1e-6


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_policy_gradient_without_weights_ends_elsewhere():
    """RLOO has the log-probs of the rounded policy in its reward: its mean is not at the target."""
    target = STAR.log().requires_grad_()
    assert gradient(Rloo(BETA), target).abs().max() > 1e-3
    assert gradient(TrajectoryBalance(BETA), target).abs().max() < 1e-12
    assert total_variation(end_of(Rloo(BETA)), STAR) > 0.01
