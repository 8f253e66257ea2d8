"""FlexAttention: attention that skips blocks of 128 x 128 scores that a mask hides.

It trains on a GPU only: it has no backward pass on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    or_masks,
    padding_mask_function,
)

from tba.models import EVERYONE, FLEX, NOBODY

SIZE = 128
"""Queries and keys in a block."""
Sees = Callable[..., Any]
"""Returns whether a query sees a key, given batch, head, query and key as indices."""


def register() -> None:
    """Make this attention known to transformers, which has one that compiles every mask."""
    AttentionInterface.register(FLEX, _attend)
    AttentionMaskInterface.register(FLEX, causal_blocks)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend in one dtype: autocast does not reach FlexAttention, and leaves keys in fp32."""
    kind = query.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else value.dtype
    query, key, value = (states.to(dtype) for states in (query, key, value))
    return flex_attention_forward(module, query, key, value, mask, **options)


def owned_blocks(owner: Int[Tensor, "B Q"], columns: Int[Tensor, "B C"]) -> BlockMask:
    """Return the mask of `forward.attention_mask` as blocks, without computing [B Q C].

    The tokens of an owner are contiguous, so the owners of two blocks overlap where their ranges
    do.
    """
    lengths = owner.shape[1], columns.shape[1]
    before = lengths[1] - lengths[0]

    def sees(b: Any, _: Any, query: Any, key: Any) -> Any:
        column = columns[b, key]
        return ((column == EVERYONE) | (column == owner[b, query])) & (key <= query + before)

    first, last = _ranges(owner, -1)
    first_seen, last_seen = _ranges(columns, -2)
    query = SIZE * torch.arange(first.shape[2], device=owner.device)[:, None] + before
    key = SIZE * torch.arange(first_seen.shape[3], device=owner.device)
    overlap = (first_seen <= last) & (first <= last_seen)
    some = (overlap | (first_seen == EVERYONE)) & (key < query + SIZE)
    only_everyone = last_seen == EVERYONE
    one_owner = (first == last) & (first_seen == last_seen) & (first == first_seen)
    every = (only_everyone | one_owner) & (key + SIZE <= query + 1)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), SIZE, sees, seq_lengths=lengths
    )


def _ranges(owner: Int[Tensor, "B L"], dim: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last owner in each block, with one more dimension after `dim`.

    Padding is the last owner, and the unfilled part of the last block comes after it.
    """
    end = 2**30
    ordered = owner.masked_fill(owner == NOBODY, end - 1)
    missing = -owner.shape[1] % SIZE
    blocks = torch.nn.functional.pad(ordered, (0, missing), value=end).unflatten(1, (-1, SIZE))
    first, last = blocks.aminmax(dim=-1)
    return first[:, None].unsqueeze(dim), last[:, None].unsqueeze(dim)


def _listed(blocks: Bool[Tensor, "B 1 N M"]) -> tuple[Tensor, Tensor]:
    """Return the number of columns of each row of blocks, and these columns, followed by others."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), columns.int()


def causal_blocks(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Sees = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **_: Any,
) -> BlockMask:
    """Return the mask that transformers asks for. Padding sees itself, so that no row is empty."""
    if attention_mask is not None:
        real = padding_mask_function(attention_mask)
        mask_function = or_masks(and_masks(mask_function, real), _itself)
    placed = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    return create_block_mask(placed, batch_size, None, q_length, kv_length, str(device))


def _itself(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
    return query == key
