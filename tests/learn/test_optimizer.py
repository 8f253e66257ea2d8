"""AdamW in 8 bits, and weights in bf16."""

from pathlib import Path

import pytest
import torch
from build import resumes_exactly, trainer
from safetensors.torch import load_file

import tba.learn.optimizer
from tba.config.schema import load
from tba.learn.optimizer import RoundedAdamW
from tba.runs.checks import check_resumed
from tba.runs.generations import generations
from tba.runs.setup import check

BUNDLED = Path("bundled:arithmetic")
QUANTISED = "bitsandbytes is not installed (the extra `quantised`)"


def test_a_rounded_step_is_adamws_step_in_fp32():
    rng = torch.Generator().manual_seed(0)
    first = torch.randn(5, 7, generator=rng).bfloat16()
    exact = torch.nn.Parameter(first.float())
    rounded = torch.nn.Parameter(first.clone())
    in_fp32 = torch.nn.Parameter(first.float())
    settings = {"betas": (0.8, 0.9), "weight_decay": 0.1}
    one = torch.optim.AdamW([exact], 1e-2, **settings, fused=True)
    two = RoundedAdamW([rounded, in_fp32], 1e-2, **settings)
    for step in range(3):
        gradient = torch.randn(5, 7, generator=rng).bfloat16()
        exact.grad = gradient.float()
        rounded.grad = gradient
        in_fp32.grad = gradient.float()
        one.step()
        two.step()
        if step == 0:  # later ones begin at what was rounded
            torch.testing.assert_close(rounded.data, exact.data.bfloat16(), atol=0, rtol=0)
    torch.testing.assert_close(in_fp32, exact, atol=0, rtol=0)
    moments = [two.state[rounded][name] for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.dtype for moment in moments} == {torch.float32}
    torch.testing.assert_close(moments[0], one.state[exact]["exp_avg"], atol=0, rtol=0)


@pytest.mark.parametrize(("rate", "moves"), [(1e-3, False), (1e-2, True)])
def test_bf16_loses_changes_below_half_its_distance_to_the_next_number(rate, moves):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = RoundedAdamW([weight], rate, weight_decay=0.0)
    for _ in range(5):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (weight < 1).tolist() == [moves] * 3


def test_searchers_of_a_trainer_in_bf16_compute_and_receive_bf16(batch):
    own = trainer(BUNDLED, "trainer.weights=bf16")
    assert own.computes_in_bf16
    assert own.send(1).nbytes == own.sizes.trained_bytes == own.sizes.published_bytes


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
    assert kinds == {"step", *parts}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.optimizer=adamw_8bit", "trainer.devices=2"], "works with one device only"),
        (["trainer.weights=bf16", "trainer.devices=2"], "works with one device only"),
        (["trainer.weights=bf16", "policy.autocast=off"], "which computes in bf16"),
        (["trainer.weights=bf16", "policy.autocast=auto"], "which computes in bf16"),
        (["trainer.weights=bf16", "policy.lora.r=4"], "trains adapters"),
        (["trainer.weights=fp16"], "trainer.weights"),
        (["trainer.optimizer=sgd"], "trainer.optimizer"),
    ],
)
def test_what_does_not_work_together_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check(load(None, settings))


def test_8_bits_without_bitsandbytes_are_refused_before_the_start(monkeypatch):
    monkeypatch.setattr(tba.learn.optimizer, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs bitsandbytes: pip install 'tba\[quantised\]'"):
        check(load(None, ["trainer.optimizer=adamw_8bit"]))


@pytest.mark.parametrize("key", ["optimizer=adamw_8bit", "weights=bf16"])
def test_a_run_keeps_its_optimizer_and_precision(key):
    with pytest.raises(ValueError, match=rf"trainer\.{key.replace('=', ' = ')}, but the run has"):
        check_resumed(load(None, [f"trainer.{key}"]), load(None))
