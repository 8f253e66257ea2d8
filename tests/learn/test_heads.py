"""Heads of objectives: their input, their gradients, and independence of micro-batches."""

from typing import Any

import numpy as np
import pytest
import torch
from build import FAMILIES, gradients_of, make
from transformers import OPTConfig, OPTForCausalLM

from tba.config.plugins import Plugin, names, resolve
from tba.config.schema import Config
from tba.learn.policy import Policy
from tba.learn.trainer import SingleTrainer, TrainerSetup
from tba.models.forward import enable_gradient_checkpointing
from tba.objectives import Head
from tba.objectives.tb import TrajectoryBalance
from tba.types import Batch

RESPONSE, PROMPT = Head("response", 0.01), Head("prompt", 0.01)


def with_head(model: Any, head: Head | None, share_prompt: bool = True) -> Policy:
    """Return a policy with a head that has already learned something, the same each time."""
    policy = Policy(model, 0.7, share_prompt=share_prompt, head=head)
    if policy.readout is not None:
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.readout.parameters():
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def gradients(policy: Policy, batch: Batch) -> dict[str, torch.Tensor]:
    """Return gradients of a weighted sum of the head's output, for parameters that it reaches."""
    policy.model.zero_grad()
    assert policy.readout is not None
    policy.readout.zero_grad()
    out = policy(batch).head
    assert out is not None
    (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def test_a_head_says_nothing_at_first(batch):
    sizes = {"word_embed_proj_dim": 16, "do_layer_norm_before": False, "vocab_size": 14}
    narrow = OPTForCausalLM(OPTConfig(hidden_size=32, num_attention_heads=2, **sizes)).eval()
    assert Policy(make("llama"), 1.0)(batch).head is None
    for head, shape in ((RESPONSE, (3, 4, 5)), (PROMPT, (3,))):
        for model in (make("llama"), narrow):  # whose states are half as wide as its layers
            out = Policy(model, 1.0, head=head)(batch).head
            assert out is not None and out.shape == shape and not out.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_reads_the_states_it_should(family, batch):
    """The state before each token, or the prompt's mean state, over the root of its width.

    Compared with the model itself on one response at a time, without padding.
    """
    model, root = make(family), 32**0.5
    on_response, on_prompt = with_head(model, RESPONSE), with_head(model, PROMPT)
    of_response, of_prompt = on_response(batch).head, on_prompt(batch).head
    assert of_response is not None and on_response.readout is not None
    assert of_prompt is not None and on_prompt.readout is not None
    for b in range(len(batch)):
        prompt = batch.prompt_tokens[b][batch.prompt_mask[b]]
        mean = model.base_model(input_ids=prompt[None]).last_hidden_state[0].mean(0) / root
        torch.testing.assert_close(of_prompt[b], on_prompt.readout(mean)[0], atol=1e-5, rtol=1e-5)
        for k in range(batch.samples):
            answer = batch.tokens[b, k][batch.mask[b, k]]
            whole = model.base_model(input_ids=torch.cat([prompt, answer])[None]).last_hidden_state
            expected = on_response.readout(whole[0, len(prompt) - 1 : -1] / root)[:, 0]
            found = of_response[b, k, : len(answer)]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not of_response[~batch.mask].any()


def test_a_head_leaves_log_probs_alone(batch):
    model = make("llama")
    for head in (RESPONSE, PROMPT):
        assert torch.equal(with_head(model, head).logp(batch), Policy(model, 0.7).logp(batch))


def test_the_policy_learns_from_a_head_on_the_response_alone(batch):
    model = make("llama")
    own = {"readout.weight", "readout.bias"}
    assert set(gradients(with_head(model, PROMPT), batch)) == own
    reached = gradients(with_head(model, RESPONSE), batch)
    inner = ("embed_tokens", "layers.0.mlp.up_proj", "norm")
    assert own | {f"model.model.{name}.weight" for name in inner} <= set(reached)
    assert "model.lm_head.weight" not in reached  # it reads states, not logits
    assert all(gradient.abs().sum() > 0 for gradient in reached.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", [RESPONSE, PROMPT], ids=lambda head: head.on)
@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "plain"])
def test_plain_prompts_and_gradient_checkpointing_change_nothing(family, head, share_prompt, batch):
    shared = with_head(make(family), head)
    model = make(family)
    enable_gradient_checkpointing(model)
    plain = with_head(model, head, share_prompt=share_prompt)
    torch.testing.assert_close(shared(batch).head, plain(batch).head, atol=1e-5, rtol=1e-5)
    a, b = gradients(shared, batch), gradients(plain, batch)
    assert a.keys() == b.keys()
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def trainer(
    objective: str, options: dict[str, Any] | None = None, **settings: Any
) -> SingleTrainer:
    """Return a trainer of a small model, the same each time; gradients are not clipped."""
    plugin = resolve("objectives", "objective", objective, options or {})
    first = plugin.at(0)
    policy = with_head(make("llama"), first.head)
    return wrapped(policy, plugin, 10, learning_rate=1e-3, **settings)


def wrapped(policy: Policy, objective: Plugin, steps: int, **settings: Any) -> SingleTrainer:
    prompt = np.ones(1, np.int32)
    tables = {"run": {"steps": steps}, "engine": {"use": "scripted"}}
    tables["trainer"] = {"max_grad_norm": float("inf"), "warmup_steps": 0, **settings}
    config = Config(**tables, sampling={"temperature": 0.7, "max_tokens": 1})
    setup = TrainerSetup(
        config, objective, context=32, extremes=(prompt, prompt), probe_prompt=1,
        checks_reference=False,
    )  # fmt: skip
    return SingleTrainer(setup, policy)


@pytest.fixture(scope="module")
def in_one_pass() -> dict[str, Any]:
    """For each objective the gradients and metrics of one step on the whole batch."""
    return {}


SPLIT = [(name, 1) for name in names("objectives")]
SPLIT += [(name, budget) for name in ("tb", "ppo", "tb_learned_z") for budget in (20, 70)]
"""Objectives and budgets of tokens; heads on nothing, on tokens and on prompts have all of them."""


@pytest.mark.parametrize(("objective", "budget"), SPLIT)
def test_any_micro_batching_gives_the_same_gradients(objective, budget, batch, in_one_pass):
    """Policy and head; from one pass down to single trajectories, with groups cut in pieces."""
    # else it masks every token: the policy of these responses is far away
    options = {"threshold": 100.0} if objective == "m2po" else {}
    if objective not in in_one_pass:
        whole = trainer(objective, options)
        with gradients_of(whole) as one:
            in_one_pass[objective] = one, whole.step(batch, 0)
    one, said = in_one_pass[objective]
    parts = trainer(objective, options, token_budget=budget)
    with gradients_of(parts) as other:
        told = parts.step(batch, 0)
    told |= {name: said[name] for name in ("step_time", "batch/padding")}
    assert told == pytest.approx(said, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert len(one) == len([*parts.policy.parameters()])
    assert all(gradient.any() for gradient in one.values())


def test_a_head_learns_at_its_own_rate_on_the_policys_schedule(batch):
    """AdamW first moves a parameter by its learning rate: .03 for the head, .001 for the policy."""
    t = trainer("tb_learned_z", {"head_learning_rate": 0.03}, schedule="linear")
    for step in range(3):
        before = {n: p.detach().clone() for n, p in t.policy.named_parameters()}
        t.step(batch, step)
        moved = {n: (p - before[n]).abs().max().item() for n, p in t.policy.named_parameters()}
        if step == 0:
            both = moved["readout.bias"], moved["model.model.norm.weight"]
            assert both == pytest.approx((0.03, 0.001), rel=1e-3)
        rates = [1e-3 * (9 - step) / 10, 0.03 * (9 - step) / 10]
        assert [g["lr"] for g in t.optimizer.param_groups] == pytest.approx(rates)


def test_a_learned_log_z_finds_the_groups_own(batch):
    """With a fixed policy, the head of `tb_learned_z` ends at VarGrad's log Z of each prompt."""
    plugin = resolve("objectives", "objective", "tb_learned_z", {"taper": "none"})
    policy = Policy(make("llama"), 0.7, head=Head("prompt", 1.0))
    t = wrapped(policy, plugin, 150, learning_rate=1e-30, schedule="linear")
    own = by_vargrad(batch, policy)
    assert own.abs().min() > 2
    for step in range(150):
        t.step(batch, step)
    torch.testing.assert_close(policy(batch).head.double(), own, atol=0.1, rtol=0)


def by_vargrad(batch: Batch, policy: Policy) -> torch.Tensor:
    """Return log Z of each group by its own mean."""
    log_z: torch.Tensor = TrajectoryBalance()(policy.logp(batch).detach(), batch)[1]["tb/log_z"]
    return log_z


def test_a_head_does_not_disturb_what_is_random():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    Policy(make("llama"), 1.0, head=RESPONSE)
    assert torch.equal(torch.get_rng_state(), state)
