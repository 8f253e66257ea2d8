"""AdamW in 8 bits, and weights in bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from build import gradients_of, resumes_exactly, trainer
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tba.config.schema import load
from tba.learn.optimizer import REST, Split, SplitAdamW, Sums, _divide, _joined, _random_rest
from tba.runs.generations import generations
from tba.setup.checks import check_resumed
from tba.setup.setup import check
from tba.types import collate

BUNDLED = Path("bundled:arithmetic")
QUANTISED = "bitsandbytes is not installed (the extra `quantised`)"


SETTINGS = {"betas": (0.8, 0.9), "weight_decay": 0.1}


def whole_of(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return a weight in fp32, from bf16 and what the optimizer keeps of it."""
    return _joined(weight, optimizer.state[weight][REST])


def in_both(kind: type[torch.optim.Optimizer], split: type[Split], **settings: Any) -> None:
    """Steps with weights in fp32, and in bf16, are equal bit for bit; a head is in fp32."""
    rng = torch.Generator().manual_seed(0)
    first = torch.randn(50, 97, generator=rng).bfloat16()
    exact = torch.nn.Parameter(first.float())
    rounded = torch.nn.Parameter(first.clone())
    head = torch.nn.Parameter(first.float())
    one = kind([exact], 1e-4, **SETTINGS, **settings)
    two = split([rounded, head], 1e-4, **SETTINGS, **settings)
    two.state[rounded] = {REST: torch.zeros_like(first, dtype=torch.int16)}
    for _ in range(5):
        gradient = torch.randn(50, 97, generator=rng).bfloat16()
        exact.grad = gradient.float()
        rounded.grad = gradient
        head.grad = gradient.float()
        one.step()
        two.step()
        assert torch.equal(whole_of(rounded, two), exact)
        assert torch.equal(rounded, exact.bfloat16())
        assert torch.equal(head, exact)
    states = [two.state[rounded], two.state[head], one.state[exact]]
    assert states[0].pop(REST).dtype == torch.int16
    for name, expected in states[2].items():
        assert all(torch.equal(*map(torch.as_tensor, (s[name], expected))) for s in states[:2])


def test_steps_of_weights_in_bf16_are_those_in_fp32():
    in_both(torch.optim.AdamW, SplitAdamW, fused=True)


def test_steps_with_moments_in_8_bits_as_well():
    optim = pytest.importorskip("bitsandbytes.optim", reason=QUANTISED)
    in_both(optim.AdamW8bit, type("SplitAdamW8bit", (Split, optim.AdamW8bit), {}))


def test_changes_that_bf16_cannot_hold_add_up():
    """Each is 1e-4, and the number of bf16 below 1 is 0.996."""
    assert torch.tensor(1 - 1e-4).bfloat16() == 1
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = SplitAdamW([weight], 1e-4, weight_decay=0.0, fused=True)
    optimizer.state[weight] = {REST: torch.zeros(3, dtype=torch.int16)}
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    torch.testing.assert_close(whole_of(weight, optimizer), torch.full((3,), 0.99))
    assert torch.equal(weight, torch.full((3,), 0.99).bfloat16())


def test_the_first_change_already_moves_the_mean_of_weights_in_bf16():
    """It is a thousandth of the distance to the next number, or less; zeros stay exact."""
    rng = torch.Generator().manual_seed(0)
    first = torch.cat([torch.rand(10**6, generator=rng) + 0.5, torch.zeros(9)]).bfloat16()
    weight = torch.nn.Parameter(first.clone())
    optimizer = SplitAdamW([weight], 4e-6, weight_decay=0.0, fused=True)
    rounded = torch.empty_like(first)
    _divide(_joined(first, _random_rest(first)), rounded)
    assert torch.equal(rounded, first)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moved = (weight.double() - first).detach()
    assert moved[:-9].mean() == pytest.approx(-4e-6, rel=0.1)
    assert 1e-4 < (moved[:-9] != 0).double().mean() < 2e-3
    torch.testing.assert_close(moved[-9:], torch.full((9,), -4e-6).double(), rtol=0.01, atol=0)


def test_two_halves_are_the_number():
    """Whatever it is: random bits, and numbers halfway between two of bf16."""
    rng = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (10_000,), generator=rng).int()
    halves = (bits & -0x10000) + 0x8000
    exact = torch.cat([bits, halves, torch.tensor([0, -(2**31)]).int()]).view(torch.float32)
    exact = exact[exact.bfloat16().isfinite()]
    rounded = torch.empty_like(exact, dtype=torch.bfloat16)
    rest = _divide(exact, rounded)
    assert torch.equal(_joined(rounded, rest), exact)
    off = [(each.double() - exact).abs() for each in (rounded, exact.bfloat16())]
    assert torch.equal(*off)


def test_a_rank_steps_as_if_it_were_alone():
    """A part of a tensor becomes what the same rows of the whole become."""
    distributed.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (3,))
        rng = torch.Generator().manual_seed(0)
        first, *gradients = torch.randn(4, 5, 7, generator=rng).bfloat16()
        part = torch.nn.Parameter(DTensor.from_local(first.clone(), mesh, [Shard(0)]))
        alone = torch.nn.Parameter(first.clone())
        optimizer = SplitAdamW([part, alone], 1e-3, fused=True)
        rest = torch.randint(-100, 100, first.shape, generator=rng).short()
        optimizer.state[part] = {REST: DTensor.from_local(rest, mesh, [Shard(0)])}
        optimizer.state[alone] = {REST: rest}
        for gradient in gradients:
            part.grad = DTensor.from_local(gradient, mesh, [Shard(0)])
            alone.grad = gradient
            optimizer.step()
        states = [optimizer.state[each] for each in (part, alone)]
        assert torch.equal(part.to_local(), alone)
        for name in (REST, "exp_avg", "exp_avg_sq"):
            assert torch.equal(states[0][name].to_local(), states[1][name])
    finally:
        distributed.destroy_process_group()


def test_gradients_of_many_micro_batches_add_up_in_more_than_bf16():
    """And their norm is that in fp64; what is clipped has the norm that it is clipped to."""
    rng = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(300, n, dtype=torch.bfloat16)) for n in (7, 40)]
    weights.append(torch.nn.Parameter(torch.zeros(9)))
    exact = [torch.zeros(weight.shape, dtype=torch.float64) for weight in weights]
    sums = Sums(weights)
    for limit in (float("inf"), 1.0):
        for total in exact:
            total.zero_()
        for _ in range(150):
            for weight, total in zip(weights, exact, strict=True):
                gradient = 0.05 + 0.3 * torch.randn(weight.shape, generator=rng)
                (weight * gradient.to(weight.dtype)).sum().backward()
                total += gradient.to(weight.dtype)
        norm = torch.cat([total.flatten() for total in exact]).norm()
        assert sums.clip(weights, limit) == pytest.approx(norm.item(), rel=1e-4)
        for weight, total in zip(weights, exact, strict=True):
            assert weight.grad is not None
            wanted = total * min(1.0, limit / norm.item())
            assert (weight.grad - wanted).norm() < 2e-3 * wanted.norm()
            weight.grad = None
        assert not sums.parts


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_in_one_micro_batch_stays_so(wrong):
    weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    sums = Sums([weight])
    for factor in (1.0, wrong, -1.0):
        (weight * factor).sum().backward()
    assert not torch.tensor(sums.clip([weight], 1.0)).isfinite()


@pytest.mark.parametrize("budget", [16, 16_384])
def test_the_gradient_norm_in_bf16_is_that_of_the_gradient(budget, groups):
    """Also of many micro-batches, and clipped to the limit."""
    settings = (f"trainer.token_budget={budget}", "trainer.max_grad_norm=0.01")
    own = trainer(BUNDLED, "trainer.weights=bf16", "objective=dr_grpo", *settings)
    with gradients_of(own) as gradients:
        assert own.step(collate(groups), 0)["grad_norm"] > 0.01
    squares = [gradient.double().square().sum() for gradient in gradients.values()]
    assert torch.stack(squares).sum().sqrt().item() == pytest.approx(0.01, rel=1e-4)


def test_searchers_of_a_trainer_in_bf16_compute_and_receive_bf16(batch):
    own = trainer(BUNDLED, "trainer.weights=bf16")
    assert own.computes_in_bf16
    assert own.send(1).nbytes == own.sizes.published_bytes == 2 * own.sizes.trained


def test_a_head_is_trained_in_fp32_beside_weights_in_bf16(batch):
    own = trainer(BUNDLED, "trainer.weights=bf16", "objective=tb_learned_z")
    readout = own.policy.readout
    assert readout is not None and readout.weight.dtype == torch.float32
    own.step(batch, 0)
    assert bool(readout.bias != 0)


def test_a_resumed_run_in_bf16_equals_the_uninterrupted_one(toy_model, tmp_path):
    resumes_exactly(toy_model, tmp_path, "trainer.weights=bf16")


def test_a_resumed_run_with_moments_in_8_bits_equals_the_uninterrupted_one(tmp_path):
    """The checkpoint has codes, scales and maps of both moments by the name of the parameter."""
    pytest.importorskip("bitsandbytes", reason=QUANTISED)
    resumes_exactly(BUNDLED, tmp_path, "trainer.optimizer=adamw_8bit", "trainer.weights=bf16")
    newest = generations(tmp_path / "part" / "checkpoints")[-1]
    tensors = load_file(newest / "optimizer.safetensors")
    kinds = {key.rpartition(":")[2] for key in tensors if key != "torch_rng"}
    parts = {f"{part}{i}" for part in ("state", "qmap", "absmax") for i in (1, 2)}
    assert kinds == {"step", REST, *parts}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.optimizer=adamw_8bit", "trainer.devices=2"], "needs trainer.optimizer=adamw"),
        (["trainer.reshard_after_forward=false"], "needs trainer.devices=2 or more"),
        (["trainer.weights=bf16", "policy.autocast=off"], "needs policy.autocast=bf16"),
        (["trainer.weights=bf16", "policy.autocast=auto"], "needs policy.autocast=bf16"),
        (["trainer.weights=fp16"], "trainer.weights"),
        (["trainer.optimizer=sgd"], "trainer.optimizer"),
    ],
)
def test_what_does_not_work_together_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check(load(None, settings))


def test_8_bits_without_bitsandbytes_are_refused_before_the_start(monkeypatch):
    monkeypatch.setattr("tba.setup.setup.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"need bitsandbytes: type pip install -e '\.\[quantised\]'"
    ):
        check(load(None, ["trainer.optimizer=adamw_8bit"]))


@pytest.mark.parametrize("key", ["optimizer=adamw_8bit", "weights=bf16"])
def test_a_run_keeps_its_optimizer_and_precision(key):
    with pytest.raises(ValueError, match=rf"trainer\.{key.replace('=', ' = ')}, but the run has"):
        check_resumed(load(None, [f"trainer.{key}"]), load(None))
