"""The real paths on a GPU, beside the same on the CPU: steps, engine, whole runs, memory.

`make test-gpu` runs them. TBA_TEST_DEVICE=cpu compares the CPU with itself, to try the tests.
"""

import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from build import (
    conserved,
    gradients_of,
    group,
    newest_files,
    random_batch,
    run_and_keep,
    setup_of,
    trajectory,
)
from safetensors.torch import load
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tba.cli import _config
from tba.config.plugins import names
from tba.config.schema import load as load_config
from tba.learn import layouts
from tba.learn.trainer import SingleTrainer
from tba.models import model_path
from tba.open import run
from tba.runs import checkpoint
from tba.runs.folder import METRICS, read
from tba.runtime.placement import device_here, take_gpu
from tba.setup.machine import this_machine
from tba.setup.memory import MemoryEstimate
from tba.setup.setup import check
from tba.types import Batch, collate

DEVICE = os.environ.get("TBA_TEST_DEVICE", "cuda")
MODEL = "bundled:arithmetic"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="PyTorch finds no GPU"
    ),
]
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has waits and memory of its own")
EXACT = {"logp": 1e-3, "mean logp": 1e-4, "loss": 1e-3, "gradient": 3e-3, "norm": 1e-3}
"""Largest differences in fp32: of log-probs in nats, and relative ones."""
ROUNDED = {"logp": 2.0, "mean logp": 0.05, "loss": 0.1, "gradient": 0.5, "norm": 0.4}
"""The same of bf16 beside fp32, for random and unlikely responses."""
LORA = ("policy.lora.r=4", "policy.lora.alpha=8")
OPTIONS = {"vineppo": ("objective.step_tokens=1",)}
KINDS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "fp32": ((), EXACT),
    "checkpointing": (("policy.gradient_checkpointing=true",), EXACT),
    "pieces": (("trainer.token_budget=60",), EXACT),
    "lora": (LORA, EXACT),
    "autocast": (("policy.autocast=bf16",), ROUNDED),
    "lora, autocast": ((*LORA, "policy.autocast=bf16"), ROUNDED),
    "bf16 weights": (("policy.autocast=bf16", "trainer.weights=bf16"), ROUNDED),
}
"""Settings and tolerances."""


def trainer(device: str, *settings: str) -> SingleTrainer:
    fp32 = "policy.autocast=off"
    return setup_of(MODEL, fp32, "sampling.max_tokens=32", *settings).trainer(device)


@cache
def batch() -> Batch:
    """Return three groups of twelve, of a policy and a reference near the first one."""
    drawn = random_batch(0, groups=3, samples=12, longest=20)
    with torch.no_grad():
        logp = trainer("cpu").policy.logp(drawn)
    rng = torch.Generator().manual_seed(0)

    def near() -> Tensor:
        noise = torch.randn(logp.shape, generator=rng)
        return ((logp + 0.1 * noise).clamp(max=-1e-3) * drawn.mask).detach()

    value = torch.rand(drawn.value.shape, generator=rng)
    return replace(drawn, behavior_logp=near(), ref_logp=near(), value=value)


Stepped = tuple[Tensor, dict[str, float], Tensor]


def stepped(own: SingleTrainer) -> Stepped:
    """Return log-probs, the metrics of a step, and its gradient."""
    with torch.no_grad():
        logp = own.policy.logp(batch()).float().cpu()
    with gradients_of(own) as slopes:
        metrics = own.step(batch(), 1)
    return logp, metrics, torch.cat([s.float().cpu().flatten() for s in slopes.values()])


def apart(expected: Stepped, found: Stepped) -> dict[str, float]:
    """Return the differences between two steps, print them, and what is expected."""
    logp, metrics, gradient = expected
    other, measured, slope = found
    off = {
        "logp": (other - logp).abs().max().item(),
        "mean logp": (other - logp).abs().mean().item(),
        "loss": abs(measured["loss"] - metrics["loss"]) / max(abs(metrics["loss"]), 0.1),
        "gradient": ((slope - gradient).norm() / gradient.norm()).item(),
        "norm": abs(measured["grad_norm"] / metrics["grad_norm"] - 1),
    }
    print({name: f"{value:.2g}" for name, value in off.items()}, end=" ")
    print(f"loss {metrics['loss']:.5g}, gradient norm {metrics['grad_norm']:.5g}")
    assert metrics["grad_norm"] > 0
    return off


def check_below(off: dict[str, float], limits: dict[str, float]) -> None:
    assert not {name: value for name, value in off.items() if not value <= limits[name]}, off


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["packed", "cached", "plain"])
def test_a_step_is_that_of_the_cpu(layout, kind, monkeypatch):
    in_layout = ("policy.share_prompt=false",) if layout == "plain" else ()
    if layout == "cached":
        monkeypatch.setattr(layouts, "PACKED_TOKENS", 0)
    settings, limits = KINDS[kind]
    assert layouts.plan_of(batch(), layout != "plain", packing="short").layout == layout
    settings = (*in_layout, *settings)
    found = stepped(trainer(DEVICE, *settings))
    if limits is EXACT:
        check_below(apart(stepped(trainer("cpu", *settings)), found), limits)
        return
    # bf16 rounds: no two devices alike, but none farther from fp32 than the other
    exact = stepped(trainer("cpu", *in_layout, *(LORA if "lora" in kind else ())))
    on_cpu = apart(exact, stepped(trainer("cpu", *settings)))
    check_below(apart(exact, found), {n: max(limits[n], 1.5 * on_cpu[n]) for n in limits})


@pytest.mark.parametrize("layout", ["packed", "cached", "plain"])
def test_a_step_with_flex_attention_is_that_of_sdpa(layout, monkeypatch):
    """Forward and backward; a CPU has only the forward pass (tests/models/test_flex.py)."""
    shared = f"policy.share_prompt={'false' if layout == 'plain' else 'true'}"
    if layout == "cached":
        monkeypatch.setattr(layouts, "PACKED_PADDING", -1)
    ways = [trainer(DEVICE, shared, f"policy.attention={name}") for name in ("sdpa", "flex")]
    sdpa, flex = map(stepped, ways)
    check_below(apart(sdpa, flex), EXACT)


@pytest.mark.parametrize("objective", sorted(names("objectives")))
def test_each_objective_has_the_step_of_the_cpu(objective):
    settings = (f"objective={objective}", *OPTIONS.get(objective, ()))
    one, other = (stepped(trainer(device, *settings)) for device in ("cpu", DEVICE))
    check_below(apart(one, other), EXACT)


ARITHMETIC = (
    f"policy.model={MODEL}", "task=arithmetic", "sampling.max_tokens=6", "sampling.samples=8",
    "trainer.batch_size=64", "trainer.group_size=8", "log.console=off", "log.report_to=[]",
)  # fmt: skip


@pytest.mark.parametrize("autocast", ["off", "bf16"])
def test_the_engine_samples_with_the_log_probs_of_the_trainer(autocast, tmp_path):
    """Mean and largest difference in nats, over the tokens of 64 prompts."""
    settings = (*ARITHMETIC, "runtime.use=local", "run.steps=1", f"policy.autocast={autocast}")
    own = (f"run.folder={tmp_path / 'run'}", "eval.prompts=0", "checkpoint.every=0")
    ended = run_and_keep(load_config(None, [*settings, *own, "trainer.learning_rate=1e-9"]))
    found = ended.buffer.groups()  # without copies, and so of unequal sizes
    drawn = collate([replace(g, trajectories=(t,)) for g in found for t in g.trajectories])
    assert ended.trainer.policy.device.type == DEVICE
    with torch.no_grad():
        again = ended.trainer.policy.logp(drawn).float().cpu()
    for name, logp in {"sampled": drawn.behavior_logp, "reference": drawn.ref_logp}.items():
        off = (again - logp).abs()[drawn.mask]
        print(f"{name}: mean {off.mean():.2g}, largest {off.max():.2g} of {len(off)} tokens")
        mean, largest = (0.02, 0.5) if autocast == "bf16" else (1e-4, 1e-2)
        assert off.mean() < mean and off.max() < largest


def test_a_local_run_ends_and_resumes(tmp_path):
    """With stop strings, top-p and evaluations. How equal the resumed run is, is printed."""
    settings = (
        *ARITHMETIC, "runtime.use=local", "run.steps=8", "sampling.top_p=0.9", "checkpoint.every=4",
        "eval.prompts=16", "eval.every=4", 'sampling.stop=["7"]',
    )  # fmt: skip
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder in (whole, part):
        assert run(load_config(None, [*settings, f"run.folder={folder}"])).finished
    again = differences(whole, part)
    shutil.rmtree(checkpoint.newest(part / "checkpoints"))  # as if killed after step 4
    assert run(_config([], part), part).finished
    resumed = differences(whole, part)
    print(f"the same run twice: {again}; resumed: {resumed}")
    rows = read(part / METRICS)
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 9))
    assert [r["step"] for r in rows if "eval/greedy_pass@1" in r] == [0, 4, 8]


def differences(one: Path, other: Path) -> str:
    """Return how far the last weights of two runs are apart."""
    both = []
    for folder in (one, other):
        tensors = {}
        for name, content in newest_files(folder).items():
            if name.startswith("model/") and name.endswith(".safetensors"):
                tensors |= load(content)
        both.append(tensors)
    off = [(both[0][name].float() - both[1][name].float()).abs().max().item() for name in both[0]]
    return f"{sum(x == 0 for x in off)} of {len(off)} tensors equal, largest difference {max(off)}"


@pytest.mark.timeout(240)
def test_an_asynchronous_run_learns_on_one_gpu(tmp_path):
    """The run of `make demo`: trainer and searcher share the GPU, and nothing is lost."""
    steps = () if DEVICE == "cuda" else ("run.steps=6", "eval.prompts=8", "checkpoint.every=0")
    own = (f"run.folder={tmp_path / 'run'}", "log.console=off", "log.report_to=[]")
    ended = run_and_keep(load_config(None, [*own, *steps]))
    rows = read(tmp_path / "run" / METRICS)
    greedy = [row["eval/greedy_pass@1"] for row in rows if "eval/greedy_pass@1" in row]
    times = [row["time"] for row in rows if "loss" in row]
    print(f"greedy {greedy}; {times[-1] - times[0]:.1f} s for {len(times)} steps")
    assert ended.trainer.policy.device.type == DEVICE
    assert conserved(ended.buffer), ended.buffer.counts
    counts = ended.buffer.counts
    assert counts["added"] <= ended.searchers.stats.counts["samples_generated"], counts
    assert DEVICE == "cpu" or greedy[-1] >= 0.9


@contextmanager
def counting(waits: Counter[str]) -> Iterator[None]:
    """Count what waits for the GPU, by line."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for each in told:
        if "synchronizing" in str(each.message):
            waits[f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}"] += 1


@ON_GPU
@pytest.mark.parametrize("layout", ["packed", "cached"])
def test_waits_of_the_host_in_a_step(layout, monkeypatch):
    """Printed, for one micro-batch."""
    if layout == "cached":
        monkeypatch.setattr(layouts, "PACKED_TOKENS", 0)
    own = trainer(DEVICE, "trainer.token_budget=100000")
    own.step(batch(), 1)
    waits: Counter[str] = Counter()
    with counting(waits):
        own.step(batch(), 2)
    print(f"{layout}: {waits.total()} waits", *waits.most_common(), sep="\n  ")
    assert 0 < waits.total() < 200


@ON_GPU
def test_memory_segments_expand(monkeypatch):
    """After the process has taken its GPU, also if it has used it before."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    torch.zeros(1, device=DEVICE)
    take_gpu(device_here())
    kept = torch.zeros(2**26, device=DEVICE)
    expandable = [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    assert len(kept) and any(expandable)


@ON_GPU
@pytest.mark.parametrize("autocast", ["off", "bf16"])
def test_peak_memory_of_a_step(autocast, tmp_path):
    """Beside the calculated one, in a model of 135M parameters; without the CUDA context."""
    own = measured_trainer(tmp_path, autocast)
    drawn = long_batch()
    own.step(drawn, 1)
    torch.cuda.reset_peak_memory_stats()
    own.step(drawn, 2)
    peak = torch.cuda.max_memory_allocated()
    config = own.setup.config
    parts = MemoryEstimate.of(config, this_machine(), 2).processes[0].parts
    expected = sum(n for name, n in parts.items() if name != "CUDA")
    print(f"{peak / 1e9:.2f} GB, calculated {expected / 1e9:.2f}: ratio {peak / expected:.3f}")
    assert 0.3 < peak / expected < 1.5, parts


def measured_trainer(folder: Path, autocast: str) -> SingleTrainer:
    """Return the trainer of a random model whose responses have 256 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_path(MODEL))
    wide = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.device(DEVICE):
        LlamaForCausalLM(wide).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = (
        f"policy.model={folder}", "task=toy.Ones", "sampling.max_tokens=256", "runtime.use=local",
        "trainer.batch_size=64", "trainer.group_size=8", "trainer.token_budget=100000",
    )  # fmt: skip
    return check(load_config(None, [*settings, f"policy.autocast={autocast}"])).trainer(DEVICE)


def long_batch() -> Batch:
    """Return 8 groups of 8 responses of 256 tokens, after prompts of 2."""
    rng = np.random.default_rng(0)
    groups = []
    for g in range(8):
        drawn = [rng.integers(2, 14, 256).tolist() for _ in range(8)]
        own = [trajectory(*tokens, reward=float(rng.random())) for tokens in drawn]
        groups.append(group(str(g), *own))
    return collate(groups)
