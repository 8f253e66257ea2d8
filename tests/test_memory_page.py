"""docs/memory.md says what trainers, their passes and their checkpoints need."""

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from build import gradients_of, trainer
from safetensors.numpy import load_file
from torch import nn

import tba
from tba.config.schema import load
from tba.config.tables import PolicyTable
from tba.learn.optimizer import REST
from tba.learn.policy import Policy
from tba.models.lora import load_placed
from tba.runs.generations import generations
from tba.setup.sizes import group, kept, sizes_of
from tba.types import TokenBatch, collate_tokens
from tba.weights import trained

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "memory.md").read_text()
RESULTS = ROOT / "benchmarks" / "results.json"
MODEL = Path("bundled:arithmetic")
LORA = ("policy.lora.r=16", "policy.lora.alpha=32")

IN_MEMORY = {name: int(n) for name, n in re.findall(r"^\| (.+?) \| (\d+) \| .+ \|$", PAGE, re.M)}
ON_DISK = {n: int(b) for n, b in re.findall(r"^\| `(.+?)` \| (\d+) per trained", PAGE, re.M)}
SHAPES: dict[str, tuple[int, ...]] = {
    "SmolLM2-135M": (49_152, 576, 1_536, 30, 192, 0),
    "Qwen2.5-0.5B": (151_936, 896, 4_864, 24, 128, 1),
    "Qwen2.5-1.5B": (151_936, 1_536, 8_960, 28, 256, 1),
    "Qwen2.5-7B": (152_064, 3_584, 18_944, 28, 512, 1),
}
"""Vocabulary, width, that of the MLP, layers, width of keys, and whether q, k, v have a bias."""


class Sizes:
    """Numbers of parameters of a model, by its shape."""

    def __init__(self, name: str, rank: int = 16):
        vocabulary, self.hidden, self.inner, self.layers, keys, bias = SHAPES[name]
        tied = name != "Qwen2.5-7B"
        d, f = self.hidden, self.inner
        self.embeddings = vocabulary * d
        self.matrices = self.layers * (2 * d * d + 2 * d * keys + 3 * d * f) + self.embeddings
        small = self.layers * (2 * d + bias * (d + 2 * keys)) + d
        self.all = self.matrices + small + (0 if tied else self.embeddings)
        self.adapters = self.layers * rank * (2 * (d + d) + 2 * (d + keys) + 3 * (d + f))
        self.frozen = 2 * self.matrices + 4 * (self.embeddings + small)  # bytes in bf16
        # bytes with linear layers in bf16; a tied head stays in fp32
        self.held = 4 * self.all - 2 * (self.matrices - (self.embeddings if tied else 0))


def linear(model: nn.Module) -> int:
    """Number of weights in linear layers, the LM head aside."""
    modules = dict(model.named_modules())
    return sum(
        m.weight.numel()
        for name, m in modules.items()
        if isinstance(m, nn.Linear) and ".lora_" not in name and name != "lm_head"
    )


def test_the_page_has_the_formulas_of_the_package():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert code == f"{inspect.getsource(kept)}\n\n{inspect.getsource(group)}"


def test_weights_gradients_moments_and_copies(batch):
    own = trainer(MODEL)
    with gradients_of(own) as gradients:
        own.step(batch, 0)
    parameters = list(own.policy.parameters())
    assert all(p.grad is None for p in parameters)  # their memory is free between steps
    count = sum(p.numel() for p in parameters)
    states = own.optimizer.state.values()
    held = {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(gradient.nbytes for gradient in gradients.values()),
        "AdamW's moments": sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in states),
        "copy for publishing": own.send(1).payload.nbytes,  # in fp32, what is sent is the copy
    }
    assert held == {name: IN_MEMORY[name] * count for name in held}
    halved = trainer(MODEL, "policy.autocast=bf16").send(1).payload
    assert halved.nbytes == IN_MEMORY["weights as they are sent"] * count


def test_adapters_and_frozen_weights():
    pytest.importorskip("peft", reason="an extra: see pyproject.toml")
    model = trainer(MODEL, *LORA, "policy.autocast=bf16").policy.model
    own = trained(model)
    config = model.config
    per_layer = 16 * (4 * 2 * config.hidden_size + 3 * (config.hidden_size + 384))
    assert sum(p.numel() for p in own.values()) == config.num_hidden_layers * per_layer
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    embeddings = model.get_input_embeddings().weight.numel()
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    head = 2 * embeddings  # tied to the embeddings, which stay in fp32
    expected = 2 * linear(model) + 4 * (embeddings + norms) + head
    assert sum(p.nbytes for p in frozen.values()) == expected
    policy = load(None, [f"policy.model={MODEL}", *LORA]).policy
    sizes = sizes_of(policy, bf16=True)
    assert (sizes.frozen, sizes.trained) == (expected, sum(p.numel() for p in own.values()))


def bytes_kept(policy: Policy, batch: TokenBatch) -> int:
    """Run forward and backward, and return the bytes that were kept between them."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logp = policy.logp(batch)
    logp.sum().backward()
    return sum(size for storage, size in kept.items() if storage not in weights)


@pytest.mark.parametrize("shape", [(18, 8, 8), (60, 4, 64)], ids=["packed", "cached"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_a_pass_keeps(attention, bf16, shape):
    """Counted by the hooks of PyTorch."""
    table = PolicyTable.model_validate({"model": str(MODEL), "attention": attention})
    model = load_placed(table, "cpu", bf16=False)
    prompt, responses, length = shape
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 14, (responses, length)).astype(np.int32)
    batch = collate_tokens([rng.integers(2, 14, prompt).astype(np.int32)], [list(tokens)])
    seen, keys, scores = group(*shape)
    z = sizes_of(table, bf16)
    matrices = linear(model) + model.lm_head.weight.numel()
    if attention == "sdpa":
        scores = 0
    shape = z.layers, z.hidden, z.inner, z.heads
    expected = kept(*shape, seen, keys, scores, matrices, bf16)
    assert bytes_kept(Policy(model, 1.0, bf16), batch) == pytest.approx(expected, rel=0.1)


def test_a_checkpoint_on_disk(tmp_path):
    small = [
        "run.steps=1", "runtime.use=local", "task.train_size=20", "sampling.samples=4",
        "trainer.batch_size=8", "trainer.group_size=4", "eval.prompts=0", "log.console=off",
        "log.report_to=[]", f"run.folder={tmp_path / 'run'}",
    ]  # fmt: skip
    result = tba.train(load(None, small))
    folder = generations(result.folder / "checkpoints")[-1]
    count = sum(p.numel() for p in result.model().parameters())
    for name in ("model/", "optimizer.safetensors", "search_weights.safetensors"):
        file = folder / (name + "model.safetensors" if name.endswith("/") else name)
        assert file.stat().st_size == pytest.approx(ON_DISK[name] * count, rel=0.01)
    (found,) = re.findall(r"^\| `replay/` \| (\d+) per token and (\d+) per response", PAGE, re.M)
    per_token, per_response = map(int, found)
    columns = load_file(folder / "replay" / "columns.safetensors")
    contents = (folder / "replay" / "contents.bin").stat().st_size
    assert contents == per_token * columns["length"].sum()
    assert sum(a.nbytes for a in columns.values()) == per_response * len(columns["reward"])


@pytest.mark.parametrize("name", SHAPES)
def test_the_examples(name):
    own = Sizes(name)
    (row,) = re.findall(rf"^\| {re.escape(name)} \| ([\d.]+) billion \| (.+) \|$", PAGE, re.M)
    assert float(row[0]) == pytest.approx(own.all / 1e9, rel=0.005)
    layer = kept(1, own.hidden, own.inner, 0, 1000, 0, 0)
    expected = [
        16 * own.all + own.held + 2 * own.matrices, own.frozen + 20 * own.adapters,
        own.layers * layer, own.layers * 4 * own.hidden * 1000, 2 * own.all + own.held,
        12 * own.all,
    ]  # fmt: skip
    shown = [float(cell) for cell in row[1].split(" | ")]
    assert shown == pytest.approx([n / 1e9 for n in expected], rel=0.02, abs=0.051)


def test_the_sums_beside_measurements():
    """The sum is below the peak of a process, and by a quarter at most."""
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text())}
    own, heads = Sizes("SmolLM2-135M"), 9
    one = group(100, 16, 64)
    shape = own.layers, own.hidden, own.inner, heads
    four = kept(*shape, *(4 * n for n in one))
    base, copies = 0.9e9, 2 * own.matrices  # the LM head and the process; bf16 copies
    lora = rows["LoRA peak memory"]
    expected = {
        "full fine-tuning, one pass": (16 * own.all + four + copies + base, lora["peer"] * 1e9),
        "LoRA, one pass": (own.frozen + 16 * own.adapters + four + base, lora["value"] * 1e9),
        "full fine-tuning, two groups in a pass": (
            16 * own.all + kept(*shape, *(2 * n for n in one)) + copies + base,
            rows["training step, peak memory"]["value"] * 1e9,
        ),
    }
    found = re.findall(r"^\| (.+?) \| ([\d.]+) GB \| ([\d.]+) GB \|$", PAGE, re.M)
    shown = {name: (float(total), float(measured)) for name, total, measured in found}
    assert shown.keys() == expected.keys()
    for name, (total, measured) in expected.items():
        assert shown[name] == pytest.approx((total / 1e9, measured / 1e9), rel=0.03)
        assert 0.75 < total / measured < 1
    assert rows["LoRA published bytes"]["value"] == 2 * own.adapters


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_smaller_weights_and_moments(weights, optimizer, batch):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="an extra: see pyproject.toml")
    own = trainer(MODEL, f"trainer.weights={weights}", f"trainer.optimizer={optimizer}")
    with gradients_of(own) as gradients:
        own.step(batch, 0)
    large = [p for p in own.policy.parameters() if p.numel() >= 4096]
    count = sum(p.numel() for p in large)
    moments = 0
    rest = 0  # of the weights
    for parameter in large:
        parts = own.optimizer.state[parameter]
        rest += parts[REST].nbytes if weights == "bf16" else 0
        shared = ("step", "qmap1", "qmap2", REST)
        moments += sum(part.nbytes for name, part in parts.items() if name not in shared)
    row = rf"^\| `{weights}` \| `{optimizer}` \| (.+) \|$"
    expected = [float(cell) for cell in re.findall(row, PAGE, re.M)[0].split(" | ")]
    of_weights = (sum(p.nbytes for p in large) + rest) / count
    of_gradients = sum(g.nbytes for g in gradients.values() if g.numel() >= 4096) / count
    of_moments = moments / count
    total = of_weights + of_gradients + of_moments
    shown = [of_weights, of_gradients, of_moments, total, of_weights + of_moments]
    assert shown == pytest.approx(expected, rel=0.002)
