"""Micro-batches of a step: whole groups, or pieces of one, that each rank runs in a pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from tba.learn.layouts import Layout, plan_of
from tba.models import Packing
from tba.types import AnyBatch, TokenBatch


class Shape(NamedTuple):
    """Passes over one piece of a micro-batch that all ranks run together."""

    layout: Layout | None = None
    """None: the fastest one, if there is a single rank."""
    passes: int = 0
    """Passes over responses, after the one over prompts, if the layout is `cached`; else 0."""


@dataclass(frozen=True)
class MicroBatch:
    """Groups that all ranks run at the same time; every rank takes part in every collective."""

    groups: tuple[tuple[int, ...], ...]
    """Groups of the batch that each rank runs; a rank with none runs a filler."""
    shapes: tuple[Shape, ...]
    """Shape of each piece of the groups' responses, in order."""


def split_batch(
    batch: TokenBatch, token_budget: int, ranks: int, share_prompt: bool, packing: Packing
) -> list[MicroBatch]:
    """Divide a batch into micro-batches of whole groups, for each rank.

    Ranks whose layers are sharded must run the same passes in the same order, or they deadlock: a
    rank with fewer pieces or passes than another one runs empty ones.
    """

    def pieces(groups: Sequence[int]) -> list[TokenBatch]:
        return list(batch.groups(groups).pieces(token_budget, share_prompt))

    if ranks == 1:
        parts = chunks(batch, token_budget, share_prompt)
        return [MicroBatch((tuple(part),), (Shape(),) * len(pieces(part))) for part in parts]
    # the longest groups first, each to the rank with the fewest tokens
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    costs = [cost(batch, [b], share_prompt) for b in range(len(batch))]
    for b in sorted(range(len(batch)), key=lambda b: -costs[b]):
        rank = tokens.index(min(tokens))
        shares[rank].append(b)
        tokens[rank] += costs[b]
    # micro-batches of about the same size run at the same time, so that no rank waits for long
    queues: list[list[tuple[int, ...]]] = []
    for own in shares:
        parts = chunks(batch.groups(own), token_budget, share_prompt) if own else iter(())
        queue = [tuple(own[b] for b in part) for part in parts]
        queue.sort(key=lambda g: (len(pieces(g)), cost(batch, g, share_prompt)), reverse=True)
        queues.append(queue)
    aligned = []
    for number in range(max(map(len, queues))):
        groups = tuple(queue[number] if number < len(queue) else () for queue in queues)
        divided = [pieces(own) for own in groups if own]
        shapes = []
        for place in range(max(map(len, divided))):
            # a shape that fits all ranks: packed only if each of them is
            at_once = [own[place] for own in divided if place < len(own)]
            layouts = {plan_of(own, share_prompt, packing).layout for own in at_once}
            if layouts == {"packed"} or "plain" in layouts:
                shapes.append(Shape("plain" if "plain" in layouts else "packed"))
                continue
            cached = [plan_of(own, True, "none", "cached") for own in at_once]
            shapes.append(Shape("cached", max(len(plan.passes) for plan in cached)))
        aligned.append(MicroBatch(groups, tuple(shapes)))
    return aligned


def imbalance(batch: TokenBatch, parts: Sequence[MicroBatch], share_prompt: bool) -> float:
    """Return the excess of the most loaded rank's tokens over the mean, relative to the mean."""
    tokens = np.zeros(len(parts[0].groups))
    for part in parts:
        tokens += [cost(batch, own, share_prompt) if own else 0 for own in part.groups]
    return float(tokens.max() / tokens.mean() - 1)


def chunks(batch: TokenBatch, token_budget: int, share_prompt: bool) -> Iterator[list[int]]:
    """Yield the groups of each micro-batch, with at most `token_budget` tokens if possible."""
    part: list[int] = []
    # groups of similar length together: less padding
    for b in torch.argsort(batch.present.sum(-1).amax(1), stable=True).tolist():
        if part and cost(batch, [*part, b], share_prompt) > token_budget:
            yield part
            part = []
        part.append(b)
    yield part


def filler(batch: AnyBatch) -> AnyBatch:
    """Return the shortest prompt with one token of a response, for ranks without a group.

    It needs no pass over responses, so that other ranks need not make one for it.
    """
    tokens = batch.prompt_mask.sum(-1)
    tokens[tokens == 0] = batch.prompt_mask.shape[1] + 1  # a batch without prompts cannot be cached
    group = batch.groups([int(tokens.argmin())]).slice(slice(0, 1))
    short = {name: t[..., :1] for name, t in group.tensors().items() if t.ndim == 3}
    real = torch.ones_like(short["mask"])
    return replace(group, **{**short, "mask": real, "restarts": ~real})


def cost(batch: TokenBatch, groups: Sequence[int], share_prompt: bool) -> int:
    """Return the number of tokens that the policy processes for these groups.

    Each prompt counts once, and once more for each response if responses have separate rows.
    """
    longest = int(batch.prompt_mask[list(groups)].sum(-1).max())
    apart = not share_prompt or bool(batch.restarts[list(groups)].any())
    times = 1 + batch.samples * apart
    return len(groups) * times * longest + int(batch.present[list(groups)].sum())
