"""Reference log-probs are computed from tokens, and their version travels on the group."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build import pack, setup_of
from exact import completed, toy_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tba.config.schema import load
from tba.config.tables import PolicyTable
from tba.learn import publish
from tba.learn.policy import Policy
from tba.models.lora import load_frozen
from tba.models.pretrained import load_model
from tba.prompt import Prompt
from tba.search.reference import Reference
from tba.search.searcher import Searcher
from tba.setup.setup import check
from tba.types import Group, collate, collate_tokens
from tba.weights import Direct, Weights, load_weights

PROMPTS = [np.array(p, np.int32) for p in ([3, 4], [5], [6, 7, 8])]
RESPONSES = [
    completed([2, 3, 1], [4]),
    completed([7, 1], [3, 3, 3, 3], [1]),
    completed([5, 1], [2]),
]
"""Groups of two, three and two responses."""


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    return Policy(load_model(PolicyTable(model=str(tiny_model)), torch.float32), 0.7)


def other_weights(policy: Policy, version: int) -> Weights:
    weights = pack(policy.model, version, bf16=False)
    return Weights(version, {name: 1.5 * array for name, array in weights.arrays.items()})


@pytest.mark.parametrize("token_budget", [1, 6, 9, 1000])
def test_logp_is_that_of_each_response_alone(policy, token_budget):
    logp, version = Reference(policy, token_budget).logp(PROMPTS, RESPONSES)
    assert version == 0
    assert [[row.shape for row in rows] for rows in logp] == [
        [c.tokens.shape for c in group] for group in RESPONSES
    ]
    for prompt, group, rows in zip(PROMPTS, RESPONSES, logp, strict=True):
        for c, row in zip(group, rows, strict=True):
            tokens = c.tokens
            ids = torch.tensor(np.concatenate([prompt, tokens]))[None].long()
            with torch.no_grad():
                every = torch.log_softmax(policy.model(ids).logits[0] / 0.7, -1)
            places = torch.arange(len(tokens))
            alone = every[len(prompt) - 1 + places, torch.tensor(tokens).long()]
            np.testing.assert_allclose(row, alone, atol=1e-5)


@pytest.mark.parametrize(("token_budget", "own"), [("77", 77), ("auto", 16_384), ("50000", 16_384)])
def test_a_pass_has_no_more_tokens_than_the_budget_and_16384(tiny_model, token_budget, own):
    settings = ["task=toy.Ones", "sampling.max_tokens=8", f"trainer.token_budget={token_budget}"]
    setup = check(load(None, [f"policy.model={tiny_model}", *settings])).search_setup()
    assert setup.reference("cpu", bf16=False)._token_budget == own


def test_no_groups_have_no_logp(policy):
    assert Reference(policy, 100).logp([], []) == ([], 0)


def test_loaded_weights_give_other_logp_and_their_version(policy):
    reference = Reference(policy, 100)
    before, _ = reference.logp(PROMPTS, RESPONSES)
    reference.load_weights(other_weights(policy, version=12))
    after, version = reference.logp(PROMPTS, RESPONSES)
    assert reference.version == version == 12
    assert np.abs(before[0][0] - after[0][0]).min() > 1e-4


def test_weights_that_do_not_fit_leave_the_reference_as_it_was(policy):
    reference = Reference(policy, 100)
    with pytest.raises(ValueError, match="weights are of a different model"):
        reference.load_weights(Weights(3, {}))
    assert reference.version == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["packed", "cached", "plain"])
def test_linear_layers_in_bf16_give_the_same_bits(layout, tied, make_model):
    """Under autocast, which converts them to bf16 at every use; also after other weights."""
    table = PolicyTable(model=str(make_model(tied=tied)))
    batch = collate_tokens(PROMPTS[:2], [[c.tokens for c in group[:2]] for group in RESPONSES[:2]])
    converted = Policy(load_model(table, torch.float32), 0.7, autocast=True)
    held = Policy(load_frozen(table, "cpu", bf16=True), 0.7, autocast=True)
    converted.model.set_attn_implementation("eager")
    layers = [m for m in held.model.modules() if isinstance(m, torch.nn.Linear)]
    in_bf16 = [m for m in layers if m.weight.dtype == torch.bfloat16]
    assert len(in_bf16) == len(layers) - tied
    for weights in (None, other_weights(converted, version=12)):
        if weights is not None:
            load_weights(converted.model, weights)
            load_weights(held.model, weights)
        with torch.inference_mode():
            logps = [policy(batch, layout=layout).logp for policy in (converted, held)]
        assert torch.equal(*logps)
    copy = publish.Copy(converted, bf16=True)
    copy.fill(converted)
    asked = publish.probe_tokens(PROMPTS, context=32)
    weights = copy.send(1, asked, Direct(), []).payload
    np.testing.assert_array_equal(weights.probe.logp, publish.answer(converted, asked, 1).logp)
    expected = pack(converted.model, 1, bf16=True).arrays
    assert all(np.array_equal(weights.arrays[name], array) for name, array in expected.items())


class NewMatrices(TorchDispatchMode):
    """Keeps the memory of matrices that are made, other than views of these tensors."""

    def __init__(self, old: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._old = {t.untyped_storage()._cdata for t in old}
        self._made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor) and each.ndim == 2:
                storage = each.untyped_storage()
                if storage._cdata not in self._old:
                    self._made[storage._cdata] = storage
        return result

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._made.values())


def test_the_first_copy_makes_no_linear_layer_in_fp32(make_model):
    """Not even for a moment: the trainer's GPU may have no room for it."""
    table = PolicyTable(model=str(make_model(tied=False)))
    policy = Policy(load_model(table, torch.float32), 0.7, autocast=True)
    linear = [m.weight for m in policy.modules() if isinstance(m, torch.nn.Linear)]
    embeddings = policy.model.get_input_embeddings().weight
    with NewMatrices(policy.parameters()) as made:
        publish.Copy(policy, bf16=True)
    assert made.nbytes == 4 * embeddings.numel() + 2 * sum(w.numel() for w in linear)


def searcher(model: Path, folder: Path) -> tuple[Searcher, list[Group]]:
    parts = check(toy_config(model, folder))
    one = parts.search_setup().build("cpu", False)
    return one, one.search(parts.prompts[:3], seed=0).groups


def test_a_group_has_the_version_of_its_reference(toy_model, tmp_path):
    one, groups = searcher(toy_model, tmp_path)
    assert [g.reference for g in groups] == [0, 0, 0]
    one.reference.load_weights(other_weights(one.reference.policy, version=7))
    again = one.search([g.prompt for g in groups], seed=0).groups
    assert [g.reference for g in again] == [7, 7, 7]
    before, after = collate(groups), collate(again)
    assert torch.equal(before.tokens, after.tokens)  # only the reference is another
    assert not torch.equal(before.ref_logp, after.ref_logp)
    torch.testing.assert_close(after.ref_logp, one.reference.policy.logp(after).detach())


@pytest.mark.parametrize("lora", [(), ("policy.lora.r=4",)])
def test_the_reference_shares_prompts_only_if_the_policy_does(lora, tiny_model):
    if lora:
        pytest.importorskip("peft")
    for shared in (True, False):
        setting = f"policy.share_prompt={str(shared).lower()}"
        setup = setup_of(tiny_model, setting, "reward.isolate=none", *lora).search_setup()
        for reference in (setup.reference("cpu", False), setup.build("cpu", False).reference):
            assert reference.policy.share_prompt == shared


def test_an_engine_that_is_its_own_reference_loads_no_model(toy_model, tmp_path, monkeypatch):
    settings = ("engine=scripted", "engine.answers=['1', '', '2']", "engine.own_reference=true")
    setup = check(toy_config(toy_model, tmp_path, *settings)).search_setup()
    monkeypatch.setattr("tba.search.searcher.load_frozen", None)
    searcher = setup.build("cpu", False)
    (group, *_) = searcher.search([Prompt("0", "1+")], 0).groups
    for trajectory in group.trajectories:
        np.testing.assert_array_equal(trajectory.ref_logp, trajectory.behavior_logp)
    searcher.reference.load_weights(Weights(7, {}))
    assert searcher.search([Prompt("0", "1+")], 0).groups[0].reference == 7
