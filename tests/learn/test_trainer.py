"""Optimizer steps, the weights that go to searchers, and the state that is saved."""

import shutil
from dataclasses import dataclass, replace
from itertools import chain
from math import e
from typing import Any

import numpy as np
import pytest
import torch
from build import WIDE, pack, parameters, trainer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

import tba.learn.policy
import tba.setup.setup
from tba.config.plugins import Plugin
from tba.config.schema import load
from tba.errors import StepError, WrongReference
from tba.learn import layouts, micro_batches
from tba.learn.checks import check_lengths
from tba.models.forward import attention_mask, select
from tba.objectives import Objective, group_metrics
from tba.runs.warn import Warnings
from tba.setup.setup import check
from tba.types import Batch, TokenBatch, collate, collate_tokens
from tba.weights import as_tensor, load_weights


@pytest.mark.parametrize("budget", [9, 40, 1000])
def test_kl_and_entropy_are_means_over_tokens_and_the_share_of_equal_rewards_is_that_of_trl(
    tiny_model, batch, budget
):
    """However the batch is divided. `kl` is log(pi / ref), `kl/k3` the estimate of TRL's `kl`."""
    equal = batch.reward.clone()
    equal[1] = 0.5
    own = trainer(tiny_model, f"trainer.token_budget={budget}")
    with torch.no_grad():
        output = own.policy(batch)
        difference = (batch.ref_logp - output.logp)[batch.mask]
    metrics = own.step(replace(batch, reward=equal), 0)
    assert metrics["kl"] == pytest.approx(-difference.mean().item(), rel=1e-4)
    k3 = (difference.exp() - difference - 1).clamp(max=10)
    assert metrics["kl/k3"] == pytest.approx(k3.mean().item(), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(output.entropy[batch.mask].mean().item(), rel=1e-6)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("moved", "k3"), [(-25.0, 10.0), (-3.0, 10.0), (-1.0, e - 2), (40.0, 10.0)]
)
def test_a_token_far_from_the_reference_cannot_decide_the_kl(batch, moved, k3):
    """All tokens are at the reference but one, which moved by so many nats."""
    first = torch.zeros_like(batch.ref_logp)
    first[:, 0, 0] = moved
    tokens = batch.mask.sum().item() / len(batch)
    found = group_metrics(batch.ref_logp + first, torch.zeros_like(first), batch, tokens)
    for name, value in {"kl": moved, "kl/k3": k3}.items():
        expected = torch.full((len(batch),), value / tokens)
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)


def test_the_kl_of_samples_of_the_policy_is_that_of_its_distribution():
    """Exact KL of random logits, by a sum over all tokens, and both estimates of 60,000 samples."""
    rng = torch.Generator().manual_seed(0)
    pi, ref = torch.randn(2, 7, generator=rng).log_softmax(1)
    exact = (pi.exp() * (pi - ref)).sum().item()
    drawn = pi.exp().multinomial(60_000, True, generator=rng).reshape(1, 600, 100)
    zeros = torch.zeros(drawn.shape)
    prompt = torch.ones(1, 1).long()
    tokens = TokenBatch(prompt, prompt.bool(), drawn, zeros == 0, zeros != 0)
    own = Batch(**tokens.tensors(), behavior_logp=pi[drawn], ref_logp=ref[drawn],
                reward=zeros[..., 0], value=zeros)  # fmt: skip
    found = group_metrics(pi[drawn], zeros, own, float(drawn.numel()))
    for name in ("kl", "kl/k3"):
        assert found[name].item() == pytest.approx(exact, rel=0.03), name


@pytest.mark.parametrize("shared", [True, False])
def test_chunks_are_whole_groups_and_pieces_keep_the_budget(batch, shared):
    for budget in (1, 20, 35, 1000):
        chunks = [batch.groups(part) for part in micro_batches.chunks(batch, budget, shared)]
        assert sum(len(c) for c in chunks) == len(batch)
        assert sum(int(c.mask.sum()) for c in chunks) == int(batch.mask.sum())
        assert all(
            len(c) == 1 or micro_batches.cost(c, range(len(c)), shared) <= budget for c in chunks
        )
        pieces = [list(c.pieces(budget, shared)) for c in chunks]
        assert all(sum(p.samples for p in cut) == batch.samples for cut in pieces)
        for piece in chain(*pieces):
            planned = layouts.plan_of(piece, shared, packing="none")
            assert piece.samples == 1 or planned.tokens - planned.padding <= budget


@pytest.mark.parametrize("groups", [1, 6])
def test_little_is_padding_where_lengths_are_log_normal(groups):
    """K = 16, mean 150, sigma .6: less than a tenth of the tokens, where one pass has over half."""
    rng = np.random.default_rng(0)
    padding, tokens, longest = 0, 0, 0
    for _ in range(20):
        lengths = rng.lognormal(np.log(150) - 0.6**2 / 2, 0.6, (groups, 16)).astype(int) + 1
        responses = [[rng.integers(9, size=n, dtype=np.int32) for n in group] for group in lengths]
        drawn = collate_tokens([np.zeros(100, np.int32)] * groups, responses)
        planned = layouts.plan_of(drawn, share_prompt=True, packing="none")
        assert sorted(chain(*planned.passes)) == list(range(16 * groups))
        padding += planned.padding
        tokens += planned.tokens
        longest += drawn.mask.numel()
    assert padding / tokens < 0.1
    assert 1 - (tokens - padding) / longest > 0.5


@pytest.mark.parametrize("broken", ["cached", "packed", None])
def test_log_probs_that_depend_on_the_batch_are_refused(tiny_model, broken, monkeypatch):
    def misplaced(cache: Any, rows: torch.Tensor) -> Any:
        selected = select(cache, rows)
        for layer in selected.layers:
            layer.values = layer.values.roll(1, 2)
        return selected

    def open_to_all(model: Any, owner: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return attention_mask(model, owner.clamp(max=0), columns.clamp(max=0))

    policy = trainer(tiny_model).policy
    for weights in policy.model.parameters():
        weights.data *= 8  # else a random model attends to everything alike
    prompts = [np.array([3, 4, 13], np.int32), np.arange(2, 14, dtype=np.int32)]
    if broken == "cached":
        monkeypatch.setattr(tba.learn.policy, "select", misplaced)
        monkeypatch.setattr(layouts, "PACKED_TOKENS", 0)
    elif broken == "packed":
        monkeypatch.setattr(tba.learn.policy, "attention_mask", open_to_all)
    if broken is None:
        check_lengths(policy, prompts, 20, samples=True)
        return
    alone = r"nats a token from those of each sequence alone"
    with pytest.raises(ValueError, match=rf"{alone}.*set policy\.share_prompt=false"):
        check_lengths(policy, prompts, 20, samples=True)
    policy.share_prompt = False
    check_lengths(policy, prompts, 20, samples=broken == "packed")
    if broken == "cached":
        with pytest.raises(ValueError, match=rf"{alone}.*would sample wrongly; use another"):
            check_lengths(policy, prompts, 20, samples=True)


def test_the_first_step_needs_the_reference_to_be_the_policy(tiny_model, batch):
    t = trainer(tiny_model)
    t.setup = replace(t.setup, checks_reference=True)
    before = {name: p.clone() for name, p in t.policy.model.named_parameters()}
    with pytest.raises(WrongReference, match=r"step 1: .* nats a token .* missing"):
        t.step(batch, 0)
    for name, p in t.policy.model.named_parameters():
        assert torch.equal(p, before[name])
    t.step(batch, 1)  # of a resumed run: it has moved
    same = replace(batch, ref_logp=t.policy.logp(batch).detach())
    t.step(same, 0)


@dataclass(frozen=True)
class Wrong(Objective):
    """Returns what an objective must not."""

    kind: str

    def __call__(self, logp: torch.Tensor, batch: Batch) -> Any:
        loss = logp.sum(-1)
        return {
            "right": (loss.mean(1), {}),
            "a loss of each response": (loss, {}),
            "a single loss": (loss.mean(), {}),
            "no metrics": loss.mean(1),
            "a metric of each response": (loss.mean(1), {"mine": loss}),
            "a number": (loss.mean(1), {"mine": 0.5}),
            "the run's reward": (loss.mean(1), {"reward": loss.mean(1)}),
            "the run's step": (loss.mean(1), {"step": loss.mean(1)}),
            "an evaluation": (loss.mean(1), {"eval/sampled_reward": loss.mean(1)}),
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("a loss of each response", r"loss has shape \(3, 4\); .* \(3,\), a number for each group"),
        ("a single loss", r"loss has shape \(\); it must be a tensor \(3,\)"),
        ("no metrics", r"returned Tensor; it must return \(loss, metrics\)"),
        ("a metric of each response", r"mine has shape \(3, 4\)"),
        ("a number", r"mine is 0.5; it must be a tensor \(3,\)"),
        ("the run's reward", "reward is already a metric of the run; return it as x/reward"),
        ("the run's step", "step is already a metric of the run"),
        ("an evaluation", "eval/sampled_reward is already a metric of the run"),
    ],
)
def test_an_objective_that_would_be_averaged_wrongly_is_refused(tiny_model, batch, kind, told):
    t = trainer(tiny_model)
    t.setup = replace(t.setup, objective=Plugin(Wrong, {"kind": kind}))
    with pytest.raises(StepError, match=f"step 1: objective Wrong.*{told}"):
        t.step(batch, 0)


@dataclass(frozen=True)
class Failing(Objective):
    """Raises an error of its own, or of the device, or gives a metric that is not finite."""

    kind: str

    def __call__(self, logp: torch.Tensor, batch: Batch) -> Any:
        loss = logp.sum((1, 2))
        if self.kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more.")
        return loss[99] if self.kind == "index" else loss, {"mine": loss.detach() / 0}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("index", r"IndexError: index 99 is out of bounds.* \(.*test_trainer\.py, line \d+\)$"),
        (
            "memory",
            r"2 GiB\.; lower trainer\.token_budget, or set policy\.gradient_ch.* line \d+\)$",
        ),
        ("metric", r"mine -?inf, and no weight has changed; lower trainer\.learning_rate"),
    ],
)
def test_a_step_that_fails_changes_no_weight_and_says_where(tiny_model, batch, kind, told):
    t = trainer(tiny_model)
    before = parameters(t)
    t.setup = replace(t.setup, objective=Plugin(Failing, {"kind": kind}))
    with pytest.raises(StepError, match=rf"^step 3: .*{told}"):
        t.step(batch, 2)
    assert all(map(torch.equal, before, parameters(t)))


@dataclass(frozen=True)
class InPlace(Objective):
    """Changes its arguments, as code with PyTorch often does."""

    def __call__(self, logp: torch.Tensor, batch: Batch) -> Any:
        logp *= 2
        batch.reward.sub_(batch.reward.mean(1, keepdim=True))
        return (batch.reward * logp.sum(-1)).mean(1), {}


def test_an_objective_that_changes_its_arguments_does_not_change_the_metrics(tiny_model, batch):
    metrics = []
    for cls in (Wrong, InPlace):
        t = trainer(tiny_model)
        options = {"kind": "right"} if cls is Wrong else {}
        t.setup = replace(t.setup, objective=Plugin(cls, options))
        metrics.append(t.step(batch, 1))
    for name in ("reward", "kl", "log_ratio", "off_policy/ess"):
        assert metrics[0][name] == metrics[1][name]


def test_a_batch_needs_groups_of_one_size(groups):
    short = replace(groups[0], trajectories=groups[0].trajectories[:2])
    with pytest.raises(ValueError, match="unequal size"):
        collate([short, *groups[1:]])


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_no_gradient_is_kept_after_a_step(tiny_model, batch, weights):
    """An engine on the same device has their memory until the next step."""
    own = trainer(tiny_model, f"trainer.weights={weights}", "objective=ppo", "policy.autocast=bf16")
    own.step(batch, 1)
    assert own.policy.readout is not None and not own.sums.parts
    assert all(p.grad is None for p in own.policy.parameters())


def test_learning_rates_follow_their_schedule(tiny_model, batch):
    def rates(*settings: str) -> list[float]:
        t = trainer(tiny_model, "run.steps=10", *settings)
        return [t.step(batch, step)["learning_rate"] * 100 for step in range(10)]

    assert rates() == pytest.approx([1.0] * 10)  # of a helper without warm-up
    assert rates("trainer.warmup_steps=") == pytest.approx([0, *[1.0] * 9])  # a tenth of the run
    linear = rates("trainer.schedule=linear", "trainer.warmup_steps=2")
    assert linear == pytest.approx([0, 0.5, *(n / 8 for n in range(8, 0, -1))])
    own = ("trainer.warmup_steps=2", "trainer.decay_steps=4")
    stable = rates("trainer.schedule=warmup_stable_decay", *own)
    assert stable[:6] == pytest.approx([0, 0.5, *[1.0] * 4])  # warm-up begins at 0
    assert 0 < stable[-1] < stable[-2] < 1
    cosine = rates("trainer.schedule=cosine")
    assert cosine[0] == pytest.approx(1.0)
    assert cosine == sorted(cosine, reverse=True)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (40, 4), (99, 9), (300, 10)])
def test_the_default_warm_up_is_ten_steps_or_a_tenth_of_a_short_run(steps, warmup):
    config = load(None, [f"run.steps={steps}"])
    assert config.trainer.warmup(steps) == warmup
    assert Warnings(config).start() == []


def test_a_decay_of_a_tenth_must_fit_as_well():
    own = ["run.steps=100", "trainer.schedule=warmup_stable_decay"]
    load(None, [*own, "trainer.warmup_steps=90"])
    with pytest.raises(ValueError, match=r"with decay_steps = 10 needs run\.steps=101"):
        load(None, [*own, "trainer.warmup_steps=91"])


def test_beta_schedule_reaches_the_objective(tiny_model, batch):
    """With beta falling, the same policy's loss changes as the formula says."""

    def losses(beta: str, steps: int) -> list[float]:
        t = trainer(tiny_model, f"objective.beta={beta}", "trainer.learning_rate=1e-30")
        return [t.step(batch, step)["loss"] for step in range(steps)]

    falling = losses("{start=1.0, end=0.2, steps=4, cut_step=3, cut_to=0.05}", 4)
    fixed = [losses(beta, 1)[0] for beta in ("1.0", "0.8", "0.6", "0.05")]
    assert falling == pytest.approx(fixed, rel=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_arrive_whole(tiny_model, batch, bf16):
    """An engine has the trainer's log-probs of the probe after it has loaded the weights."""
    t = trainer(tiny_model)
    sampled = ("task=toy.Ones", "sampling.max_tokens=6", "reward.isolate=none")
    parts = check(load(None, [f"policy.model={tiny_model}", *sampled]))
    engine = parts.search_setup().build("cpu", False).engine
    for step in range(5):
        t.step(batch, step)
    weights = t.send(version=5).payload
    assert weights.probe is not None
    stale = replace(weights, arrays=pack(engine.model, 0, False).arrays)
    assert engine.load_weights(stale) > 1e-2
    t.bf16_weights = bf16
    gap = engine.load_weights(t.send(version=5).payload)
    assert gap < (0.05 if bf16 else 1e-5)
    assert engine.version == 5


class Copies(TorchDispatchMode):
    """Count the operations that copy a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        self.count += name in ("_to_copy", "clone", "copy_", "contiguous")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_are_converted_and_loaded_once(tiny_model, bf16):
    """Arrays from another process are read-only views of shared memory."""
    model = trainer(tiny_model).policy.model
    parameters = dict(model.named_parameters())
    with Copies() as packing:
        weights = pack(model, 1, bf16)
    assert packing.count == bf16 * len(parameters)  # a transport copies them, too
    assert weights.nbytes == sum(p.numel() for p in parameters.values()) * (2 if bf16 else 4)
    for name, array in weights.arrays.items():
        array.flags.writeable = False
        assert not np.shares_memory(array, parameters[name].detach().numpy())
        bits = as_tensor(array).view(torch.int16 if bf16 else torch.int32)
        assert np.shares_memory(array, bits.numpy())
    with Copies() as loading:
        load_weights(model, weights)
    assert loading.count == len(parameters)


def test_a_save_holds_the_state_at_its_beginning(tiny_model, batch, tmp_path):
    """Files are written after three more steps; the loaded trainer repeats these exactly."""
    settings = ("objective=tb_learned_z", "trainer.schedule=linear")
    t = trainer(tiny_model, *settings)
    t.step(batch, 0)
    write = t.save(tmp_path)
    assert not list(tmp_path.iterdir())
    metrics = [t.step(batch, step) for step in (1, 2, 3)]
    write()
    loaded = trainer(tiny_model, *settings)
    loaded.load(tmp_path)
    for step, expected in zip((1, 2, 3), metrics, strict=True):
        again = loaded.step(batch, step)
        assert {**again, "step_time": 0} == {**expected, "step_time": 0}
    assert all(torch.equal(p, q) for p, q in zip(parameters(t), parameters(loaded), strict=True))


def test_attention_is_chosen_by_device_and_length(tiny_model, monkeypatch):
    """Nothing is timed, so a resumed run computes the same bits. Prompts have 4 to 6 tokens."""
    monkeypatch.setattr(tba.setup.setup, "EAGER_TOKENS", 12)

    def chosen(*settings: str) -> str:
        policy: Any = trainer(tiny_model, *settings).policy
        return policy.model.config._attn_implementation

    assert chosen() == "eager"
    assert chosen("sampling.max_tokens=7") == "sdpa"
    assert chosen("sampling.max_tokens=7", "policy.attention=eager") == "eager"
    assert chosen("policy.attention=sdpa") == "sdpa"


def test_a_model_without_sdpa_keeps_eager_attention(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(tba.setup.setup, "EAGER_TOKENS", 12)
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = Gemma2Config(**WIDE, num_key_value_heads=2, head_dim=8)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    policy: Any = trainer(tmp_path, "sampling.max_tokens=7").policy
    assert policy.model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"no SDPA for a Gemma2ForCausalLM; set policy\.attention"):
        trainer(tmp_path, "policy.attention=sdpa")


def test_the_state_of_another_model_is_refused_whole(tiny_model, toy_model, batch, tmp_path):
    """A model of other shapes, and one of the same shapes; a copy elsewhere is the same model."""
    t = trainer(tiny_model)
    t.step(batch, 0)
    t.save(tmp_path / "state")()
    retrained = tmp_path / "retrained"
    shutil.copytree(tiny_model, retrained)
    shutil.copytree(tmp_path / "state" / "model", retrained, dirs_exist_ok=True)
    errors = {toy_model: "holds a different model from policy.model"}
    errors[retrained] = r"policy\.model is not the one that this run began with"
    for other, error in errors.items():
        wrong = trainer(other)
        before = parameters(wrong)
        with pytest.raises(ValueError, match=error):
            wrong.load(tmp_path / "state")
        assert all(torch.equal(p, q) for p, q in zip(before, parameters(wrong), strict=True))
    moved = trainer(shutil.copytree(tiny_model, tmp_path / "moved"))
    moved.load(tmp_path / "state")
    assert all(torch.equal(p, q) for p, q in zip(parameters(t), parameters(moved), strict=True))
