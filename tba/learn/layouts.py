"""Layouts of a forward pass: how the responses of a batch become rows of the model's input."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tba.models import EVERYONE, NOBODY, Packing
from tba.types import TokenBatch, positions

Layout = Literal["packed", "cached", "plain"]
"""packed: a prompt and its responses in one row; cached: the prompt first, then the responses with
its cache; plain: a row per response, or per context, with the prompt before the first context."""

PASS_COST = 96
"""Approximate cost of one more pass through the model, in tokens."""

PACKED_TOKENS = 256
"""Maximum length of a packed row, where attention is computed between all of its responses."""
PACKED_PADDING = 0.25
"""Maximum share of padding in packed rows."""


@dataclass(frozen=True)
class Plan:
    """Division of a batch into passes of the model."""

    layout: Layout
    batch: TokenBatch
    """The batch without duplicates: of equal responses, only the first has tokens."""
    alike: Int[Tensor, "B K"]
    """For each response, the first one in its group with equal tokens and masks."""
    passes: Sequence[Sequence[int]]
    """If cached: the responses of each pass, numbered from 0 to B K - 1."""
    tokens: int
    """Tokens that the model processes."""
    padding: int
    """Padding among these tokens."""


def plan_of(
    batch: TokenBatch,
    share_prompt: bool,
    packing: Packing,
    layout: Layout | None = None,
    passes_to_make: int = 0,
) -> Plan:
    """Return the plan of a batch, by default in the fastest possible layout.

    Empty passes are added until there are `passes_to_make`.
    """
    if batch.restarts.any() or not batch.prompt_mask.any():  # no prompt tokens to share
        layout = "plain"
    alike = first_alike(batch)
    is_first = alike == torch.arange(batch.samples)
    distinct = replace(batch, mask=batch.mask & is_first[..., None])
    # a response of T tokens has T - 1 inputs: the last token predicts nothing
    lengths = distinct.present[..., 1:].sum(-1)
    real = int(batch.prompt_mask.sum() + lengths.sum())
    packed = len(batch) * (batch.prompt_mask.shape[1] + int(lengths.sum(1).max()))
    if layout is None:
        limit = {"none": 0, "short": PACKED_TOKENS * len(batch), "any": packed}[packing]
        fits = packed <= limit and packed - real <= PACKED_PADDING * packed
        shared: Layout = "packed" if fits else "cached"
        layout = shared if share_prompt else "plain"
    passes: list[list[int]] = []
    tokens = packed
    if layout == "cached":
        passes = _passes(lengths.flatten().numpy())
        longest = [len(rows) * int(lengths.flatten()[rows].max()) for rows in passes]
        tokens = batch.prompt_mask.numel() + sum(longest)
        passes += [[]] * (passes_to_make - len(passes))
    elif layout == "plain":
        contexts = cut(distinct)
        tokens = contexts.ids.numel()
        real = int(contexts.real.sum())
    return Plan(
        layout=layout,
        batch=distinct,
        alike=alike,
        passes=passes,
        tokens=tokens,
        padding=tokens - real,
    )


def first_alike(batch: TokenBatch) -> Int[Tensor, "B K"]:
    """Return, for each response, the first one in its group with equal tokens and masks."""
    coded = (4 * batch.tokens + 2 * batch.restarts + batch.mask).masked_fill(~batch.present, -1)
    alike = (coded[:, :, None] == coded[:, None]).all(-1)
    return alike.int().argmax(-1)


def _passes(lengths: Int[np.ndarray, " N"]) -> list[list[int]]:
    """Divide responses into passes, given the number of input tokens of each.

    Responses of similar length run together, to avoid padding. The division minimises the total
    number of tokens, where each pass costs PASS_COST more.
    """
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    longest = lengths[order]
    tokens = np.zeros(1)  # the best division of the first n of `order`, for each n
    starts = [0]
    for n in range(1, len(order) + 1):
        with_last = tokens + PASS_COST + (n - np.arange(n)) * longest[:n]
        starts.append(int(with_last.argmin()))
        tokens = np.append(tokens, with_last.min())
    parts: list[list[int]] = []
    end = len(order)
    while end:
        parts.append(order[starts[end] : end].tolist())
        end = starts[end]
    return parts[::-1]


@dataclass(frozen=True)
class Rows:
    """Rows for one pass, on the CPU."""

    ids: Int[Tensor, "N L"]
    predicting: Int[Tensor, "2 M"]
    """Row and column of the state that predicts each response token that was sampled."""
    places: Int[Tensor, " M"]
    """Places of the predicted tokens among all B K T."""


@dataclass(frozen=True)
class PackedRows(Rows):
    """A row for each prompt, with all of its responses."""

    owner: Int[Tensor, "N L"]
    """Response that a token belongs to; EVERYONE for the prompt, NOBODY for padding."""
    position: Int[Tensor, "N L"]


def pack(batch: TokenBatch) -> PackedRows:
    """Concatenate each prompt and all of its responses."""
    b, width = batch.prompt_mask.shape
    row, sample, offset = batch.present[..., 1:].nonzero(as_tuple=True)  # not the last tokens
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
    followed = batch.mask[row, sample, offset + 1]  # by a sampled token
    row, sample, offset, column = (each[followed] for each in (row, sample, offset, column))
    # a prompt's last state predicts the first token of each response
    first, of = batch.mask[..., 0].nonzero(as_tuple=True)
    predicting = torch.stack(
        [torch.cat([first, row]), torch.cat([torch.full_like(first, width - 1), column])]
    )
    k, t = batch.tokens.shape[1:]
    places = torch.cat([(first * k + of) * t, (row * k + sample) * t + offset + 1])
    return PackedRows(ids, predicting, places, owner, position)


@dataclass(frozen=True)
class Contexts(Rows):
    """A row for each of the B prompts alone, then one for each context of each response."""

    real: Bool[Tensor, "N L"]


def cut(batch: TokenBatch) -> Contexts:
    """Divide responses into contexts. The first context of each response follows the prompt.

    Contexts without a sampled token are dropped: nothing depends on them.
    """
    k, t = batch.tokens.shape[1:]
    pairs = zip(batch.prompt_tokens, batch.prompt_mask, strict=True)
    prompts = [tokens[mask] for tokens, mask in pairs]
    rows: list[Tensor] = []
    predicting: list[Tensor] = []
    places: list[Tensor] = []
    for b, j in torch.cartesian_prod(torch.arange(len(batch)), torch.arange(k)).tolist():
        length = int(batch.present[b, j].sum())
        begins = batch.restarts[b, j, :length].nonzero().squeeze(1).tolist()
        bounds = [0, *begins, length]
        for number, (start, end) in enumerate(pairwise(bounds)):
            sampled = batch.mask[b, j, start:end].nonzero().squeeze(1)
            if not len(sampled):
                continue
            before = prompts[b] if number == 0 else prompts[b][:0]
            columns = len(before) + sampled - 1
            predicting.append(torch.stack([torch.full_like(columns, len(rows)), columns]))
            places.append((b * k + j) * t + start + sampled)
            rows.append(torch.cat([before, batch.tokens[b, j, start:end].long()]))
    width = max(batch.prompt_mask.shape[1], *map(len, rows))
    ids = torch.zeros(len(batch) + len(rows), width, dtype=torch.long)
    real = torch.zeros_like(ids, dtype=torch.bool)
    ids[: len(batch), : batch.prompt_mask.shape[1]] = batch.prompt_tokens
    real[: len(batch), : batch.prompt_mask.shape[1]] = batch.prompt_mask
    for number, row in enumerate(rows, start=len(batch)):
        ids[number, : len(row)] = row
        real[number, : len(row)] = True
    row, column = torch.cat(predicting, 1)
    predicted_by = torch.stack([row + len(batch), column])
    return Contexts(ids, predicted_by, torch.cat(places), real)
