"""One rank of 64: its shapes and its share of the memory.

PyTorch's fake process group has no peers, and its collectives return at once: sizes are right, and
numbers are not.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from build import gradients_of, random_batch, trainer
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tba.config.plugins import with_defaults
from tba.config.schema import load
from tba.config.tables import FsdpTable
from tba.models.sharding import shard
from tba.runs.memory import Needs, planned_machine

RANKS = 64
RANK = 3
GROUPS = 130
SHAPE = {
    "vocab_size": 192, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
"""Every first dimension is a multiple of 64, so that all ranks have equal parts."""


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of 64 ranks, of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=1)).save_pretrained(folder)
    return folder


def test_a_step_of_one_rank_of_64(model, alone):
    t = trainer(model, "policy.attention=sdpa")
    numbers = sum(p.numel() for p in t.policy.parameters())
    shapes = {name: p.shape for name, p in t.policy.named_parameters()}
    shard(t.policy, t.policy.model, "cpu", False, RANKS, FsdpTable())
    t = replace(t, rank=RANK, ranks=RANKS)
    batch = random_batch(0, GROUPS, samples=3, longest=8)
    slots = t.slots(batch)
    assert sorted(b for slot in slots for own in slot.groups for b in own) == [*range(GROUPS)]
    assert all(len(slot.groups) == RANKS for slot in slots)
    counts = [sum(len(slot.groups[rank]) for slot in slots) for rank in range(RANKS)]
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
    needs = Needs.of(config, planned_machine("65x80"), prompt=5)
    assert held == needs.state()
    assert sum(held.values()) == 16 * numbers / RANKS
