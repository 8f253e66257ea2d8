"""Packing: a prompt and all of its responses in one row, where each response sees only itself."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tba.models.cache import EVERYONE, NOBODY, positions
from tba.types import TokenBatch


@dataclass(frozen=True)
class Packed:
    """Rows of tokens for one pass through the model, on the CPU."""

    ids: Int[Tensor, "B L"]
    owner: Int[Tensor, "B L"]
    """Response that a token belongs to; EVERYONE for the prompt, NOBODY for padding."""
    position: Int[Tensor, "B L"]
    predicting: Int[Tensor, "2 M"]
    """Row and column of the state that predicts each response token that was sampled."""
    places: Int[Tensor, " M"]
    """Places of the predicted tokens among all B K T."""


def packed_length(batch: TokenBatch) -> int:
    """Return the length L of the longest row. The last token of a response predicts nothing."""
    return batch.prompt_mask.shape[1] + int(batch.present[..., 1:].sum((1, 2)).max())


def packed_padding(batch: TokenBatch) -> tuple[int, int]:
    """Return the numbers of padding tokens, and of all tokens, of the packed rows."""
    run = len(batch) * packed_length(batch)
    return run - int(batch.prompt_mask.sum() + batch.present[..., 1:].sum()), run


def pack(batch: TokenBatch) -> Packed:
    """Put the responses of each group one after the other, behind their prompt."""
    b, width = batch.prompt_mask.shape
    row, sample, offset = batch.present[..., 1:].nonzero(as_tuple=True)  # of all but the last ones
    count = row.bincount(minlength=b)
    column = width + torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    ids = torch.zeros(b, width + int(count.max()), dtype=torch.long)
    ids[:, :width] = batch.prompt_tokens
    ids[row, column] = batch.tokens[row, sample, offset].long()
    owner = torch.full_like(ids, NOBODY)
    owner[:, :width][batch.prompt_mask] = EVERYONE
    owner[row, column] = sample
    position = torch.zeros_like(ids)
    position[:, :width] = positions(batch.prompt_mask)
    position[row, column] = batch.prompt_mask.sum(1)[row] + offset
    followed = batch.mask[row, sample, offset + 1]  # by a token that was sampled
    row, sample, offset, column = (each[followed] for each in (row, sample, offset, column))
    # a prompt's last state predicts the first token of each response
    first, of = batch.mask[..., 0].nonzero(as_tuple=True)
    predicting = torch.stack(
        [torch.cat([first, row]), torch.cat([torch.full_like(first, width - 1), column])]
    )
    k, t = batch.tokens.shape[1:]
    places = torch.cat([(first * k + of) * t, (row * k + sample) * t + offset + 1])
    return Packed(ids, owner, position, predicting, places)
