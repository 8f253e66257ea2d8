"""Compiled layers: the same numbers, or a clear refusal."""

import sysconfig
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build import FAMILIES, make, resumes_exactly
from peft import LoraConfig, inject_adapter_in_model

import tba.learn.layouts
import tba.setup.setup
from tba.config.schema import load
from tba.learn.checks import warm_up
from tba.learn.policy import Policy
from tba.models.forward import compile_layers, enable_gradient_checkpointing
from tba.setup.setup import check
from tba.types import TokenBatch, collate_tokens


def gradients(policy: Policy, batch: TokenBatch) -> dict[str, torch.Tensor]:
    """Return gradients of a weighted mean of the log-probs."""
    policy.zero_grad()
    slope = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    (policy.logp(batch) * slope).mean().backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def refusal(model: Path, *settings: str) -> str:
    """Return the error of a config with these settings, which is found before a run begins."""
    with pytest.raises(ValueError) as error:
        check(load(None, [f"policy.model={model}", "sampling.max_tokens=8", *settings]))
    return str(error.value)


def test_compilation_needs_a_compiler_and_headers(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-compiler")
    assert "a C++ compiler (no-compiler)" in refusal(tiny_model, "trainer.compile=true")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    said = refusal(tiny_model, "trainer.compile=true")
    assert "Python.h): apt install" in said and "trainer.compile=false" in said


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forget all programs before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.compiler.set_stance("default")


def programs() -> int:
    """Return the number of programs that were compiled since the last reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def adapted() -> Any:
    """Return a model with adapters that already change its log-probs."""
    model = make("llama")
    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return inject_adapter_in_model(settings, model)


def groups(*lengths: tuple[int, ...]) -> TokenBatch:
    """Return groups of random responses with these lengths, after unequal prompts."""
    rng = np.random.default_rng(1)

    def text(length: int) -> np.ndarray:
        return rng.integers(2, 14, length).astype(np.int32)

    prompts = [text(3 + b) for b in range(len(lengths))]
    return collate_tokens(prompts, [[text(n) for n in group] for group in lengths])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # PyTorch accesses .grad of tensors that have none
@pytest.mark.parametrize(
    "kind", ["llama", "bf16", "gpt2", "gpt_neox", "lora", "checkpointing", "plain"]
)
def test_compiled_layers_compute_the_same(kind, compiler, monkeypatch):
    """Log-probs and gradients, also for batches of other sizes than those of the warm-up.

    Most kinds stop before code is generated, which takes the longest.
    """
    if kind not in ("llama", "bf16"):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    family = kind if kind in FAMILIES else "llama"
    build = adapted if kind == "lora" else lambda: make(family)
    model = build()
    compile_layers(model)
    if kind == "checkpointing":
        enable_gradient_checkpointing(model)
    policy = Policy(model, 0.7, kind == "bf16", share_prompt=kind != "plain")
    torch._dynamo.utils.counters.clear()
    warm_up(policy, context=32)
    assert all(p.grad is None for p in policy.parameters())
    most = {"plain": 2, "lora": 8}  # those with and without a mask; inputs of the first LoRA layer
    compiled = programs()
    assert 1 <= compiled <= most.get(kind, 4), "all layers share their programs"
    plain = Policy(build(), 0.7, kind == "bf16", share_prompt=kind != "plain")
    near = {"atol": 0.05, "rtol": 0.05} if kind == "bf16" else {"atol": 1e-5, "rtol": 1e-5}
    for packed_tokens in (256, 0):
        monkeypatch.setattr(tba.learn.layouts, "PACKED_TOKENS", packed_tokens)
        for lengths in (((5, 3, 4), (2, 6, 3)), ((4, 4), (4, 3), (7, 2)), ((5, 1, 3),)):
            batch = groups(*lengths)
            torch.compiler.set_stance(
                "fail_on_recompile" if len(batch) > 1 else "eager_on_recompile"
            )
            torch.testing.assert_close(policy.logp(batch), plain.logp(batch), **near)
            if kind != "bf16":
                a, b = gradients(policy, batch), gradients(plain, batch)
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert programs() == compiled
    copy = deepcopy(policy)  # as publications are made: eager, with its own weights
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        torch.testing.assert_close(copy.logp(batch), plain.logp(batch), **near)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # PyTorch accesses .grad of tensors that have none
def test_a_resumed_run_compiles_the_same_programs(tiny_model, tmp_path, compiler, monkeypatch):
    """Bit for bit; each run begins without programs, and every step runs those of its start."""

    def from_scratch(policy: Policy, context: int) -> None:
        torch._dynamo.reset()
        warm_up(policy, context)
        torch.compiler.set_stance("fail_on_recompile")

    monkeypatch.setattr(tba.setup.setup, "warm_up", from_scratch)
    resumes_exactly(tiny_model, tmp_path, "trainer.compile=true")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # PyTorch accesses .grad of tensors that have none
def test_layers_that_cannot_be_compiled_are_refused(compiler, monkeypatch):
    model = make("llama")
    compile_layers(model)
    break_here = torch._dynamo.graph_break
    monkeypatch.setattr(
        type(model.model.layers[0].mlp), "forward", lambda self, x: break_here() or x
    )
    with pytest.raises(ValueError, match=r"cannot be compiled .*set trainer.compile=false"):
        warm_up(Policy(model, 1.0), context=32)
