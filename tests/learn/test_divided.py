"""Ranks of a trainer: one plan for all of them, and the gradients of one process."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from build import make, random_batch, setup_of, trainer
from pair import (
    STILL,
    Pair,
    beginning,
    divided_gradients,
    gradients,
    loaded_by_three,
    logp_of,
    open_pair,
    saved_again,
    sent,
    state_of,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tba.learn import layouts, micro_batches, state
from tba.learn.host import HostCopy
from tba.types import collate_tokens
from tba.weights import as_view, joined_rows


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_response_runs_once_and_all_ranks_make_the_same_passes(ranks):
    rng = np.random.default_rng(ranks)
    for seed in range(17):
        groups, samples = int(rng.integers(1, 10)), int(rng.integers(2, 33))
        batch = random_batch(seed, groups, samples, int(rng.integers(1, 301)))
        budget = int(rng.integers(50, 3000))
        parts = micro_batches.split_batch(batch, budget, ranks, share_prompt=True, packing="short")
        assert sorted(b for p in parts for own in p.groups for b in own) == [*range(groups)]
        for part in parts:
            assert len(part.groups) == ranks
            for own in part.groups:
                pieces = list(batch.groups(own).pieces(budget, True)) if own else []
                assert not own or sum(piece.samples for piece in pieces) == samples
                pieces += [micro_batches.filler(batch)] * (len(part.shapes) - len(pieces))
                for piece, shape in zip(pieces, part.shapes, strict=True):
                    made = layouts.plan_of(piece, True, "short", shape.layout, shape.passes)
                    assert len(made.passes) == shape.passes


def test_a_rank_without_a_group_makes_no_pass_that_others_do_not_make():
    """A piece of one-token responses needs a pass over its prompt only."""
    prompts = [np.arange(2, 12), np.arange(2, 4), np.arange(2, 4)]
    responses = [[np.array([5])] * 3, [np.arange(2, 8)] * 3, [np.arange(3, 9)] * 3]
    batch = collate_tokens(prompts, responses)
    parts = micro_batches.split_batch(batch, 1, 2, share_prompt=True, packing="none")
    alone = [shape for part in parts if not all(part.groups) for shape in part.shapes]
    assert ("cached", 0) in alone
    for each in (batch, collate_tokens([np.arange(0), *prompts[1:]], responses)):
        made = layouts.plan_of(micro_batches.filler(each), True, "none", "cached", 2)
        assert made.passes == [[], []]


def test_the_longest_groups_go_to_the_least_loaded_ranks():
    batch = random_batch(0, groups=7, samples=4, longest=100)
    parts = micro_batches.split_batch(batch, 10**6, 2, share_prompt=True, packing="short")
    (part,) = parts
    loads = [micro_batches.cost(batch, own, True) for own in part.groups]
    assert micro_batches.imbalance(batch, parts, True) == pytest.approx(
        max(loads) / np.mean(loads) - 1
    )
    most = max(micro_batches.cost(batch, [b], True) for b in range(7))
    assert max(loads) - min(loads) <= most


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    with open_pair() as opened:
        yield opened


SIZES = [(1, 7, 4, 12), (2, 5, 3, 40), (3, 3, 8, 60), (4, 1, 4, 30), (5, 9, 2, 10), (6, 2, 6, 40)]
BUDGETS = [60, 100, 50, 40, 10_000, 30]
"""Groups run together, alone, and in pieces; ranks have as many passes, fewer, and no group."""

CASES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "tied": (True, ()),
    "untied": (False, ()),
    "head on tokens": (True, ("objective=ppo",)),
    "head on prompts": (True, ("objective=tb_learned_z",)),
    "adapter": (True, ("policy.lora.r=4",)),
    "checkpointed": (False, ("policy.gradient_checkpointing=true",)),
    "prompts are not shared": (True, ("policy.share_prompt=false",)),
}
SIBLINGS = ("head on prompts", "prompts are not shared")
GRADIENTS = [
    pytest.param(*case, id=name, marks=pytest.mark.slow if name in SIBLINGS else ())
    for name, case in CASES.items()
]


@pytest.mark.parametrize(("tied", "settings"), GRADIENTS)
def test_gradients_are_those_of_one_process(tied, settings, make_model, pair):
    if "policy.lora.r=4" in settings:
        pytest.importorskip("peft")
    model = make_model(context=256, tied=tied)
    some = (1, 3, 4) if settings else range(len(SIZES))
    batches = [random_batch(*SIZES[i]) for i in some]
    budgets = [BUDGETS[i] for i in some]
    divided, _ = pair(divided_gradients, model, settings, batches, budgets)
    alone = gradients(trainer(model, *settings, STILL), batches, budgets)
    for (metrics, own), (expected, exact) in zip(divided, alone, strict=True):
        assert own.keys() == exact.keys()
        for name, gradient in exact.items():
            near = 1e-5 * float(gradient.norm()) + 1e-12  # an adapter begins with zeros
            torch.testing.assert_close(own[name], gradient, rtol=0, atol=near)
        for name in expected.keys() - {"step_time", "batch/padding"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


ALIKE = [(), ("policy.lora.r=4",), ("trainer.weights=bf16",), ("policy.share_prompt=false",)]


@pytest.mark.parametrize("settings", ALIKE)
def test_in_bf16_the_reference_computes_as_ranks_do(settings, make_model, pair):
    """FSDP rounds embeddings and norms to bf16, too."""
    if "policy.lora.r=4" in settings:
        pytest.importorskip("peft")
    model = make_model(context=256, tied=False)
    settings = ("policy.autocast=bf16", "reward.isolate=none", *settings)
    batch = random_batch(2, 5, 3, 40)
    for logp in pair(logp_of, model, settings, batch):
        ranks = setup_of(model, *settings, "runtime.use=ray", "trainer.devices=2")
        with closing(ranks.search_setup().build("cpu", True)) as searcher:
            assert torch.equal(logp, searcher.reference.policy.logp(batch))


@pytest.mark.parametrize("kind", ["tied", "llama", "gpt2", "gpt_neox"])
def test_ranks_begin_with_the_model_in_its_files(kind, make_model, pair):
    """They read their part of each tensor, and compute what files do not have."""
    model = make_model()
    if kind != "tied":
        make(kind).save_pretrained(model)
    policy = trainer(model, STILL, "objective=ppo").policy
    expected = dict([*policy.named_parameters(), *policy.named_buffers()])
    for found in pair(beginning, model, ("objective=ppo",)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


SENT = [["engine.dtype=fp32"], ["engine.dtype=bf16"], ["trainer.weights=bf16", "objective=ppo"]]


@pytest.mark.parametrize("settings", SENT)
def test_joined_rows_of_the_ranks_are_the_weights_at_the_time_of_the_copy(
    settings, make_model, pair
):
    """Bit for bit, although the weights change before the copies are sent."""
    model = make_model(tied=False)
    near = 0.05 if "trainer.weights=bf16" in settings else 1e-6
    batch = random_batch(1, 3, 4, 6)
    parts = pair(sent, model, tuple(settings), batch)
    own = trainer(model, *settings, STILL)
    gradients(own, [batch], [10_000])
    expected = [own.send(2).payload, own.reference(2).payload] * 2
    for rows, exact in zip(zip(*parts, strict=True), expected, strict=True):
        found = {name: as_view(tensor) for name, tensor in joined_rows(rows)}
        assert found.keys() == exact.arrays.keys()
        for name, array in exact.arrays.items():
            np.testing.assert_array_equal(found[name], array)
        for each in rows:
            if exact.probe is None:
                assert each.probe is None
            else:
                np.testing.assert_allclose(each.probe.logp, exact.probe.logp, atol=near)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, in whatever files they are, but for a random state."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.rglob("*.safetensors"):
        kind = file.name.split("-")[0].split(".")[0]
        own = {f"{kind}/{name}": tensor for name, tensor in load_file(file).items()}
        assert not found.keys() & own.keys()
        found |= own
    del found["optimizer/torch_rng"]
    return found


def same(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = tensors(folder)
    equal = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return found.keys() == expected.keys() and equal


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("objective=tb", "untied"),
        ("objective=tb", "mixtral"),
        ("objective=ppo", "tied"),
        ("policy.lora.r=4", "tied"),
        ("trainer.weights=bf16", "tied"),
    ],
)
def test_a_checkpoint_is_the_same_for_any_number_of_ranks(
    setting, kind, make_model, pair, tmp_path
):
    """One process saves, two load and save, two again, one and three: every tensor is equal."""
    if setting == "policy.lora.r=4":
        pytest.importorskip("peft")
    model = make_model(tied=kind == "tied")
    if kind == "mixtral":
        make(kind).save_pretrained(model)
    folders = [tmp_path / name for name in ("one", "two", "two_again", "again")]
    for folder in folders:
        folder.mkdir()
    one, two, two_again, again = folders
    first = trainer(model, setting)
    batch = random_batch(1, 3, 4, 6)
    for step in range(2):
        first.step(batch, step)
    first.save(one)()
    pair(saved_again, model, (setting,), one, two)
    pair(saved_again, model, (setting,), two, two_again)
    last = trainer(model, setting)
    last.load(two_again)
    last.save(again)()
    expected = tensors(one)
    assert any("exp_avg" in name for name in expected)
    assert all(same(folder, expected) for folder in folders)
    by_three = loaded_by_three(model, (setting,), two)
    loaded = state_of(last)
    assert by_three.keys() == loaded.keys()
    assert all(torch.equal(by_three[name], tensor) for name, tensor in loaded.items())
    one_more = [first.step(batch, 2), last.step(batch, 2)]
    assert one_more[0]["loss"] == one_more[1]["loss"]
    assert not [p for p in two.rglob("*") if p.name.startswith(".")]
    if setting != "policy.lora.r=4":
        models = [AutoModelForCausalLM.from_pretrained(f / "model") for f in (one, two)]
        pairs = zip(*(model.parameters() for model in models), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        sizes = [file.stat().st_size for file in sorted((two / "model").glob("*.safetensors"))]
        assert kind == "mixtral" or (len(sizes) == 2 and max(sizes) < 0.7 * sum(sizes))


def test_each_tensor_is_written_by_the_rank_with_the_fewest_bytes():
    sizes = {"a": 6, "b": 4, "c": 1, "d": 2, "e": 9}
    parts = [state.CheckpointShard(rank, 2, HostCopy()) for rank in range(2)]
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    taken = [part.take(tensors) for part in parts]
    assert taken[0][1] == taken[1][1] == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 0}
    assert [[*own] for own, _ in taken] == [["a", "e"], ["b", "c", "d"]]
