"""The draws that strategies share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tba.types import Shelf, Stored, Trajectory


def newest(shelves: Sequence[Shelf], groups: int, window: int, now: int) -> Sequence[Shelf]:
    """The shelves with arrivals in the last `window` steps; at least the newest `groups` (shelves come oldest first)."""
    fresh = sum(now - s.arrived < window for s in reversed(shelves))
    return shelves[-max(fresh, groups) :]


def pick(shelves: Sequence[Shelf], groups: int, rng: np.random.Generator) -> list[Shelf]:
    """Prompts without replacement; where there are too few (one-prompt tasks), every prompt as evenly as possible."""
    rounds, rest = divmod(groups, len(shelves))
    order = list(range(len(shelves))) * rounds + rng.permutation(len(shelves))[:rest].tolist()
    return [shelves[i] for i in order]


def by_count(stored: Sequence[Stored], size: int, rng: np.random.Generator) -> list[Trajectory]:
    """`size` of the samples without replacement, a response counting as often as it was sampled; repeats if short."""
    samples = np.repeat(np.arange(len(stored)), [s.count for s in stored])
    rounds, rest = divmod(size, len(samples))
    order = np.concatenate([*[samples] * rounds, rng.permutation(samples)[:rest]])
    return [stored[i].trajectory for i in order]


def by_weight(
    stored: Sequence[Stored], log_weight: np.ndarray, size: int, rng: np.random.Generator
) -> list[Trajectory]:
    """`size` distinct ones with odds exp(log_weight), without replacement; if there are too few, all, and the rest by the same odds.

    The largest of log_weight + Gumbel noise: such weights cannot underflow, as softmax followed by a draw does.
    """
    first = np.argsort(-(log_weight + rng.gumbel(size=len(stored))))[:size]
    rest = (log_weight + rng.gumbel(size=(size - len(first), len(stored)))).argmax(1)
    return [stored[i].trajectory for i in [*first, *rest]]
