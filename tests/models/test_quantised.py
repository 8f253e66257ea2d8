"""LoRA over a frozen model in 4 bits (QLoRA)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from build import LORA_SMALL, resumes_exactly, trainer
from torch import Tensor

from tba.config.schema import load
from tba.engines.vllm import VLLM
from tba.learn.trainer import SingleTrainer
from tba.setup.setup import check
from tba.types import Batch, collate

BUNDLED = Path("bundled:arithmetic")
QLORA = ("policy.lora.r=4", "policy.lora.load_in_4bit=true")
PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
needs_bitsandbytes = pytest.mark.usefixtures("bitsandbytes")


@pytest.fixture
def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes", reason="an extra: see pyproject.toml")


def layers_in_4_bits(own: SingleTrainer) -> Iterator[tuple[str, Any]]:
    from bitsandbytes.nn import Linear4bit

    for name, module in own.policy.model.named_modules():
        if isinstance(module, Linear4bit) and "lora_" not in name:
            yield name, module


@needs_bitsandbytes
@pytest.mark.parametrize("precision", ["off", "bf16"])
def test_engine_reference_and_trainer_agree(precision, tmp_path):
    settings = (*QLORA, f"policy.autocast={precision}", "reward.isolate=none", "task=toy.Ones")
    small = ("sampling.max_tokens=6", "sampling.samples=4", "trainer.batch_size=12")
    rate = ("trainer.group_size=4", "trainer.learning_rate=1e-2")
    parts = check(load(None, [*settings, *small, *rate]))
    own = parts.trainer("cpu")
    searcher = parts.search_setup().build("cpu", own.computes_in_bf16)
    groups = searcher.search(parts.prompts[:3], 0).groups
    batch = collate(groups)
    with torch.no_grad():
        logp = own.policy.logp(batch)
    sampled = batch.mask
    for other in (batch.behavior_logp, batch.ref_logp):
        assert (logp - other)[sampled].abs().max() <= 1e-4
    rewards = torch.arange(12.0).reshape(3, 4)
    own.step(Batch(**{**batch.tensors(), "reward": rewards}), 1)
    gap = searcher.load_weights(own.send(1).payload)
    assert gap is not None and gap <= 1e-4
    again = collate(searcher.search(parts.prompts[:3], 0).groups)
    with torch.no_grad():
        moved = own.policy.logp(again)
    assert (moved - again.behavior_logp)[again.mask].abs().max() <= 1e-4
    assert (moved - again.ref_logp)[again.mask].abs().max() > 1e-3
    searcher.close()


@needs_bitsandbytes
def test_gradients_are_those_of_the_rounded_weights(batch):
    """Those of adapters over a model in fp32, whose weights are what the 4 bits stand for."""
    from bitsandbytes.functional import dequantize_4bit

    own = trainer(BUNDLED, *QLORA, "policy.autocast=off")
    plain = trainer(BUNDLED, "policy.lora.r=4", "policy.autocast=off")
    matrices = dict(plain.policy.model.named_modules())
    with torch.no_grad():
        for name, module in layers_in_4_bits(own):
            matrices[name].weight.copy_(dequantize_4bit(module.weight, module.weight.quant_state))
    generator = torch.Generator().manual_seed(0)
    for (name, one), two in zip(
        own.policy.model.named_parameters(), plain.policy.model.parameters(), strict=True
    ):
        if ".lora_B." in name:  # 0 at first, so that the other matrix would have no gradient
            one.data.normal_(0, 0.1, generator=generator)
            two.data.copy_(one.data)
    gradients = []
    for each in (own, plain):
        each.policy.logp(batch).sum().backward()
        found: dict[str, Tensor] = {}
        for name, parameter in each.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 56
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-5)


@needs_bitsandbytes
def test_bytes_of_the_frozen_model():
    own = trainer(BUNDLED, *QLORA, "policy.autocast=off")
    used = 0
    count = 0
    for _, module in layers_in_4_bits(own):
        state = module.weight.quant_state
        parts = (module.weight, state.absmax, state.state2.absmax)
        used += sum(part.nbytes for part in parts)
        count += state.shape.numel()
    (shown,) = re.findall(r"With `load_in_4bit`, they need ([\d.]+) bytes", PAGE.read_text())
    assert used / count == pytest.approx(float(shown), rel=0.01)


@needs_bitsandbytes
def test_a_resumed_run_equals_the_uninterrupted_one(toy_model, tmp_path):
    resumes_exactly(toy_model, tmp_path, *LORA_SMALL, *QLORA, "run.steps=8")


@pytest.mark.parametrize(
    ("setting", "needed"),
    [("trainer.devices=2", "devices=1"), ("trainer.compile=true", "compile=false")],
)
def test_several_devices_and_compiled_layers_are_refused(setting, needed):
    with pytest.raises(ValueError, match=rf"load_in_4bit needs trainer\.{needed}"):
        check(load(None, [*QLORA, setting]))


def test_vllm_is_refused(monkeypatch):
    monkeypatch.setattr("tba.engines.vllm._check_installed", lambda config: None)
    with pytest.raises(ValueError, match=r"not the trainer's; set engine=transformers"):
        VLLM.check(load(None, [*QLORA, "engine=vllm"]))


def test_4_bits_without_bitsandbytes_are_refused(monkeypatch):
    monkeypatch.setattr("tba.setup.setup.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"load_in_4bit need bitsandbytes: type pip install"):
        check(load(None, QLORA))
