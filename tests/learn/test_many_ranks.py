"""One rank of many: its shapes, its share of the memory, and what it sends.

PyTorch's fake process group has no peers, and its collectives return at once: sizes are right, and
numbers are not.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build import gradients_of, random_batch, trainer
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tba.config.plugins import with_defaults
from tba.config.schema import load
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
def alone() -> Iterator[None]:
    """A process group of 64 ranks, of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield
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


def test_a_step_of_one_rank_of_64(model, alone):
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


@pytest.mark.filterwarnings("ignore:.*[Bb]ackward hook")  # of a model that returns no tensor
@pytest.mark.parametrize("after_forward", [True, False])
def test_messages_of_one_rank_of_eight(tiny_model, tmp_path, after_forward):
    """Of 24 layers and the rest of the model, which is one more, in a step of one micro-batch."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shape = {**SHAPE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 24}
    folder = saved(tiny_model, tmp_path / "model", shape)
    distributed.init_process_group("fake", rank=RANK, world_size=8, store=FakeStore())
    t = trainer(folder, "policy.attention=sdpa")
    shard(t.policy, t.policy.model, "cpu", False, 8, after_forward)
    t = replace(t, rank=RANK, ranks=8)
    batch = random_batch(0, 8, samples=3, longest=6)
    t.step(batch, 1)
    counts = []
    for call in (lambda: t.step(batch, 1), lambda: t.copy_rows(1, False)):
        with CommDebugMode() as sent:
            call()
        counts.append({str(name).rpartition(".")[2]: n for name, n in sent.comm_counts.items()})
    distributed.destroy_process_group()
    gathers = 24 + 24 * after_forward + 1  # the backward pass gathers layers that were freed
    step = {"_allgather_base_": gathers, "_reduce_scatter_base_": 24 + 1, "all_reduce": 1}
    assert counts == [step, {"_allgather_base_": 24 + 1}]  # the publication's are of the probe
