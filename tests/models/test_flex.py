"""FlexAttention: its masks are those of SDPA, and so are its log-probs.

It runs without compilation here, and without a backward pass, which it does not have on a CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from build import config, make, random_batch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from tba.config.tables import PolicyTable
from tba.learn.layouts import Layout, plan_of
from tba.learn.policy import Policy
from tba.models import EVERYONE, NOBODY
from tba.models.flex import owned_blocks
from tba.models.forward import packing
from tba.models.lora import set_attention
from tba.setup.machine import planned_machine
from tba.setup.setup import check
from tba.types import Batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.usefixtures("uncompiled"),
]
LAYOUTS: list[Layout] = ["packed", "cached", "plain"]


def policy(attention: str, family: str = "llama", **options: Any) -> Policy:
    model = make(family)
    set_attention(model, PolicyTable(attention=attention), "cpu")
    return Policy(model, 0.7, **options)


def long_batch() -> Batch:
    """Rows of several blocks, with padding: prompts and responses have many lengths."""
    return random_batch(3, groups=3, samples=6, longest=180)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_log_probs_are_those_of_sdpa(family, layout):
    batch = long_batch()
    found, expected = (policy(each, family)(batch, layout) for each in ("flex", "sdpa"))
    torch.testing.assert_close(found[:2], expected[:2], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_bf16_queries_keys_and_values_have_one_dtype(layout):
    """Under autocast, rotary embeddings give queries and keys in fp32."""
    batch = long_batch()
    found, exact = (policy("flex", autocast=each)(batch, layout).logp for each in (True, False))
    assert 0 < (found - exact).abs().mean() < 0.05


def materialised(mask: BlockMask) -> torch.Tensor:
    """Return the scores that are computed, [B 1 Q C]: those of full blocks, and parts of others."""
    rows, columns = mask.seq_lengths
    size = mask.BLOCK_SIZE[0]
    partial = create_mask(mask.mask_mod, len(mask.kv_indices), 1, rows, columns, "cpu")
    computed = torch.zeros_like(partial)
    kinds = (
        (mask.kv_num_blocks, mask.kv_indices, partial),
        (mask.full_kv_num_blocks, mask.full_kv_indices, torch.ones_like(partial)),
    )
    for counts, indices, scores in kinds:
        assert counts is not None and indices is not None
        for b, _, row in counts.nonzero().tolist():
            for column in indices[b, 0, row, : counts[b, 0, row]].tolist():
                lines = slice(row * size, (row + 1) * size)
                area = b, 0, lines, slice(column * size, (column + 1) * size)
                computed[area] = scores[area]
    return computed


def masks_of(own: Policy, batch: Batch, layout: Layout) -> list[Any]:
    """Return the mask of each pass."""
    used: list[Any] = []
    hook = own.model.base_model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, __, named: used.append(named["attention_mask"]), with_kwargs=True
    )
    own(batch, layout)
    hook.remove()
    return used


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_the_dense_mask(layout):
    """SDPA adds 0 to the scores that FlexAttention computes, and -inf to all others."""
    batch = long_batch()
    blocks, dense = (masks_of(policy(each), batch, layout) for each in ("flex", "sdpa"))
    assert len(blocks) == len(dense) and (len(dense) > 1) == (layout == "cached")
    for block, mask in zip(blocks, dense, strict=True):
        assert torch.equal(materialised(block), mask == 0)
        assert torch.equal(materialised(block), mask > -torch.inf)
        assert all(stride % 16 == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize(("first", "length"), [(0, 1000), (300, 1000), (128, 512)])
def test_no_block_is_computed_that_nobody_sees(first, length):
    """The blocks are those that PyTorch finds in the dense mask; a prompt may be in a cache."""
    owners = [NOBODY] * 200 + [EVERYONE] * 90 + [0] * 10 + [2] * 450 + [3] * 150 + [NOBODY] * 100
    columns = torch.tensor([owners, owners[200:900] + [4] * 200 + [NOBODY] * 100])[:, :length]
    found = owned_blocks(columns[:, first:], columns)
    dense = create_block_mask(found.mask_mod, 2, None, length - first, length, "cpu")
    assert found.full_kv_num_blocks is not None and found.full_kv_num_blocks.any()
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(dense, name)), name
    assert torch.equal(found.to_dense(), dense.to_dense())
    assert torch.equal(
        materialised(found), create_mask(found.mask_mod, 2, 1, *dense.seq_lengths, "cpu")
    )


@torch.no_grad()
def test_rows_of_any_length_are_packed():
    """Blocks between responses are skipped; with dense attention, long rows are not packed."""
    batch = random_batch(3, groups=1, samples=30, longest=180)
    flex, sdpa = policy("flex"), policy("sdpa")
    (block,) = masks_of(flex, batch, "packed")
    plans = [plan_of(batch, True, packing(each.model)).layout for each in (flex, sdpa)]
    assert plans == ["packed", "cached"] and block.sparsity() > 75  # 47 if causal alone


def test_a_cpu_cannot_train_with_it(tiny_model: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"policy\.attention = 'flex' trains on a GPU only"):
        check(config(tiny_model, tmp_path, "policy.attention=flex"))
    compiled = config(tiny_model, tmp_path, "policy.attention=flex", "trainer.compile=true")
    with pytest.raises(ValueError, match=r"trainer\.compile"):
        check(compiled, planned=planned_machine("1x80"))
