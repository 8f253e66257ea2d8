"""The plan of a forward pass: how a batch is divided, and the layout in which the model runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tba.models.cache import EVERYONE, NOBODY, positions
from tba.types import AnyBatch, TokenBatch

Layout = Literal["packed", "cached", "plain"]
"""Packed: prompt and responses in one row; cached: the prompt once before them; plain: K times."""

PASS_TOKENS = 96
"""Approximate cost of one more pass through the model, in tokens."""

PACKED_TOKENS = 256
"""Longest row to pack: attention compares all of its responses."""
PACKED_PADDING = 0.25
"""Largest share of packed rows that may be padding."""


@dataclass(frozen=True)
class Plan:
    """Division of a batch into a pass of the model."""

    layout: Layout
    batch: TokenBatch
    """The batch with only the first of the responses that are alike; the others have no tokens."""
    alike: Int[Tensor, "B K"]
    """For each response, the first one in its group with equal tokens and mask."""
    passes: Sequence[Sequence[int]]
    """If cached: the responses, numbered from 0 to B K - 1, that run together."""
    tokens: int
    """Tokens that the model runs over."""
    padding: int
    """Tokens of these that are padding."""


def chunks(batch: AnyBatch, token_budget: int) -> Iterator[AnyBatch]:
    """Yield batches of one group or more, each of at most `token_budget` tokens if possible."""
    part: list[int] = []
    # groups of similar length together: less padding
    for b in torch.argsort(batch.present.sum(-1).amax(1), stable=True).tolist():
        if part and cost(batch, [*part, b]) > token_budget:
            yield batch.groups(part)
            part = []
        part.append(b)
    yield batch.groups(part)


def pieces(batch: AnyBatch, token_budget: int) -> Iterator[AnyBatch]:
    """Yield pieces of a batch along K, each of at most `token_budget` tokens if possible."""
    prompts = len(batch) * int(batch.prompt_mask.sum(-1).max())
    start = 0
    tokens = 0
    for k, added in enumerate(batch.present.sum((0, 2)).tolist()):
        if k > start and prompts + tokens + added > token_budget:
            yield batch.slice(slice(start, k))
            start = k
            tokens = 0
        tokens += added
    yield batch.slice(slice(start, batch.samples))


def cost(batch: TokenBatch, groups: Sequence[int]) -> int:
    """Return the tokens that the policy runs over for these groups, each prompt once."""
    prompts = batch.prompt_mask[list(groups)].sum(-1)
    return len(groups) * int(prompts.max()) + int(batch.present[list(groups)].sum())


def plan_of(
    batch: TokenBatch, share_prompt: bool, can_pack: bool, layout: Layout | None = None
) -> Plan:
    """Return the plan of a batch, in the fastest layout that is possible unless one is given."""
    alike = first_alike(batch)
    is_first = alike == torch.arange(batch.samples)
    distinct = replace(batch, mask=batch.mask & is_first[..., None])
    # a response of T tokens runs over T - 1: the last one predicts nothing
    lengths = distinct.present[..., 1:].sum(-1)
    real = int(batch.prompt_mask.sum() + lengths.sum())
    packed = len(batch) * (batch.prompt_mask.shape[1] + int(lengths.sum(1).max()))
    if layout is None:
        fits = packed <= PACKED_TOKENS * len(batch) and packed - real <= PACKED_PADDING * packed
        shared: Layout = "packed" if can_pack and fits else "cached"
        layout = shared if share_prompt else "plain"
    passes: list[list[int]] = []
    tokens = packed
    if layout == "cached":
        passes = _passes(lengths.flatten().numpy())
        longest = [len(rows) * int(lengths.flatten()[rows].max()) for rows in passes]
        tokens = batch.prompt_mask.numel() + sum(longest)
    elif layout == "plain":
        tokens = batch.samples * batch.prompt_mask.numel() + batch.mask.numel()
        real = int(batch.samples * batch.prompt_mask.sum() + distinct.present.sum())
    return Plan(
        layout=layout,
        batch=distinct,
        alike=alike,
        passes=passes,
        tokens=tokens,
        padding=tokens - real,
    )


def first_alike(batch: TokenBatch) -> Int[Tensor, "B K"]:
    """Return for each response the first one in its group with equal tokens and mask."""
    coded = (2 * batch.tokens + batch.mask).masked_fill(~batch.present, -1)
    alike = (coded[:, :, None] == coded[:, None]).all(-1)
    return alike.int().argmax(-1)


def _passes(lengths: Int[np.ndarray, " N"]) -> list[list[int]]:
    """Divide responses into those that run together, by the tokens that each runs over.

    Responses of similar length do, so that few tokens are padding. This is the division with the
    fewest tokens if each pass counts as PASS_TOKENS more.
    """
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    longest = lengths[order]
    tokens = np.zeros(1)  # the best division of the first n of `order`, for each n
    starts = [0]
    for n in range(1, len(order) + 1):
        with_last = tokens + PASS_TOKENS + (n - np.arange(n)) * longest[:n]
        starts.append(int(with_last.argmin()))
        tokens = np.append(tokens, with_last.min())
    parts: list[list[int]] = []
    end = len(order)
    while end:
        parts.append(order[starts[end] : end].tolist())
        end = starts[end]
    return parts[::-1]


@dataclass(frozen=True)
class Packed:
    """Rows for one pass, each a prompt and all of its responses, on the CPU."""

    ids: Int[Tensor, "B L"]
    owner: Int[Tensor, "B L"]
    """Response that a token belongs to; EVERYONE for the prompt, NOBODY for padding."""
    position: Int[Tensor, "B L"]
    predicting: Int[Tensor, "2 M"]
    """Row and column of the state that predicts each response token that was sampled."""
    places: Int[Tensor, " M"]
    """Places of the predicted tokens among all B K T."""


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
