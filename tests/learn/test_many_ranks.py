"""One rank of many: its shapes, its share of the memory, and what it sends.

PyTorch's fake process group has no peers, and its collectives return at once: sizes are right, and
numbers are not.
"""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build import gradients_of, random_batch, trainer
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from tba.config.plugins import with_defaults
from tba.config.schema import load
from tba.learn import layouts
from tba.learn.micro_batches import Shape
from tba.models.sharding import shard
from tba.setup.machine import planned_machine
from tba.setup.memory import MemoryEstimate

RANKS = 64
RANK = 3
GROUPS = 130
SHAPE: dict[str, Any] = {
    "vocab_size": 192, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
"""Every first dimension is a multiple of 64, so that all ranks have equal parts."""


@pytest.fixture
def alone_of() -> Iterator[Callable[[int], None]]:
    """Function that begins a process group of so many ranks, of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def begin(ranks: int) -> None:
        distributed.init_process_group("fake", rank=RANK, world_size=ranks, store=FakeStore())

    yield begin
    distributed.destroy_process_group()


def saved(tiny_model: Path, folder: Path, shape: dict[str, Any]) -> Path:
    """Save a random model of this shape, with the tokenizer of another."""
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=1)).save_pretrained(folder)
    return folder


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return saved(tiny_model, tmp_path / "model", SHAPE)


def test_a_step_of_one_rank_of_64(model, alone_of):
    alone_of(RANKS)
    t = trainer(model, "policy.attention=sdpa")
    numbers = sum(p.numel() for p in t.policy.parameters())
    shapes = {name: p.shape for name, p in t.policy.named_parameters()}
    shard(t.policy, t.policy.model, "cpu", False, RANKS)
    t = replace(t, rank=RANK, ranks=RANKS)
    batch = random_batch(0, GROUPS, samples=3, longest=8)
    parts = t.micro_batches(batch)
    assert sorted(b for part in parts for own in part.groups for b in own) == [*range(GROUPS)]
    assert all(len(part.groups) == RANKS for part in parts)
    counts = [sum(len(part.groups[rank]) for part in parts) for rank in range(RANKS)]
    assert set(counts) == {2, 3}
    with gradients_of(t) as gradients:
        assert math.isfinite(t.step(batch, 1)["grad_norm"])
    held = {"weights": 0, "gradients": 0, "moments": 0}
    for name, parameter in t.policy.named_parameters():
        gradient = gradients[name]
        assert isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
        state = t.optimizer.state[parameter]
        kinds = {
            "weights": [parameter],
            "gradients": [gradient],
            "moments": [state["exp_avg"], state["exp_avg_sq"]],
        }
        rows, *columns = shapes[name]
        for kind, tensors in kinds.items():
            for tensor in tensors:
                assert tensor.shape == shapes[name]
                assert tensor.to_local().shape == (rows // RANKS, *columns), name
                held[kind] += tensor.to_local().nbytes
    settings = [f"policy.model={model}", "task=toy.Ones", f"trainer.devices={RANKS}"]
    sizes = ("trainer.batch_size=390", "trainer.group_size=3", "sampling.samples=3")
    config = with_defaults(load(None, [*settings, *sizes]))
    needs = MemoryEstimate.of(config, planned_machine("65x80"), prompt=5)
    assert held == needs.state()
    assert sum(held.values()) == 16 * numbers / RANKS


class Messages(TorchDispatchMode):
    """Counts collectives, also where a module runs more than once, unlike `CommDebugMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls the operators of its parts
        name = func.overloadpacket.__name__
        sends = name not in ("wait_tensor", "_wrap_tensor_autograd")
        if func.namespace in ("c10d", "_c10d_functional") and sends:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("passes", "after_forward", "gathers"),
    [(1, True, 49), (1, False, 25), (4, True, 193), (4, False, 97)],
)
def test_messages_of_one_rank_of_eight(
    passes, after_forward, gathers, tiny_model, tmp_path, alone_of, monkeypatch
):
    """Of 24 layers and the rest of the model, which is one more, in a step of one micro-batch.

    It has one packed pass, or one over prompts and three over responses of three lengths. The
    backward pass gathers layers that were freed: after the forward pass, or after a later pass.
    """
    shape = {**SHAPE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 24}
    folder = saved(tiny_model, tmp_path / "model", shape)
    alone_of(8)
    t = trainer(folder, "policy.attention=sdpa")
    shard(t.policy, t.policy.model, "cpu", False, 8, after_forward)
    t = replace(t, rank=RANK, ranks=8)
    batch = random_batch(0, 8, samples=4, longest=6)
    if passes > 1:
        monkeypatch.setattr(layouts, "PACKED_TOKENS", 0)
        monkeypatch.setattr(layouts, "PASS_COST", 0)
    (part,) = t.micro_batches(batch)
    assert part.shapes == (Shape("packed") if passes == 1 else Shape("cached", passes - 1),)
    t.step(batch, 1)
    counts = []
    for call in (lambda: t.step(batch, 1), lambda: t.copy_rows(1, False)):
        with Messages() as sent:
            call()
        counts.append(sent.counts)
        monkeypatch.undo()  # the publication's probe is packed
    step = {"_allgather_base_": gathers, "_reduce_scatter_base_": 24 + 1, "all_reduce": 1}
    assert counts == [step, {"_allgather_base_": 24 + 1}]  # the publication's are of the probe
