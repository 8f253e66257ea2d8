"""Draws that strategies share. All are exact, even for prompts with 100,000 responses."""

from collections import Counter

import numpy as np
from jaxtyping import Float, Int

LARGE = 10_000
"""Number of choices beyond which a draw does not examine each of them."""


def pick(prompts: Int[np.ndarray, " P"], groups: int, rng: np.random.Generator) -> Counter[int]:
    """Return random prompts, as evenly as possible, with the number of groups for each."""
    rounds, rest = divmod(groups, len(prompts))
    drawn = prompts[distinct(len(prompts), rest, rng)]
    return Counter(np.concatenate([*[prompts] * rounds, drawn]).tolist())


def by_count(
    count: Int[np.ndarray, " N"], groups: int, size: int, rng: np.random.Generator
) -> Int[np.ndarray, "{groups} {size}"]:
    """Return `size` samples for each group; response i has `count[i]`. Short groups end with -1.

    No sample is in two groups if there are enough samples for all groups.
    """
    ends = np.cumsum(count)
    if groups * size <= ends[-1]:
        samples = distinct(int(ends[-1]), groups * size, rng)
        return np.searchsorted(ends, samples, side="right").reshape(groups, size)
    drawn = np.full((groups, size), -1)
    for group in drawn:
        samples = distinct(int(ends[-1]), size, rng)
        group[: len(samples)] = np.searchsorted(ends, samples, side="right")
    return drawn


def by_weight(
    log_weight: Float[np.ndarray, " N"], groups: int, size: int, rng: np.random.Generator
) -> Int[np.ndarray, "{groups} {size}"]:
    """Return `size` distinct responses for each group, with odds exp(log_weight); -1 if fewer.

    The largest values of log_weight + Gumbel noise are a draw without replacement. If there are
    many responses, draws with replacement, minus repeats, come first: equivalent but cheaper.
    """
    drawn = np.full((groups, size), -1)
    guesses = np.zeros((groups, 0), int)
    if len(log_weight) > LARGE:
        ends = np.cumsum(np.exp(log_weight - log_weight.max()))
        places = rng.random((groups, 2 * size)) * ends[-1]
        guesses = np.searchsorted(ends[:-1], places, side="right")
    for group, guess in zip(drawn, guesses, strict=True):
        first = list(dict.fromkeys(guess.tolist()))[:size]
        group[: len(first)] = first
        missing = min(size, len(log_weight)) - len(first)
        if missing > 0:
            noisy = log_weight + rng.gumbel(size=len(log_weight))
            noisy[first] = -np.inf
            largest = np.argpartition(-noisy, missing - 1)[:missing]
            group[len(first) : len(first) + missing] = largest[np.argsort(-noisy[largest])]
    return drawn


def distinct(choices: int, size: int, rng: np.random.Generator) -> Int[np.ndarray, " n"]:
    """Return `size` of the numbers below `choices` in random order; all if there are fewer."""
    if choices <= LARGE:
        return rng.permutation(choices)[:size]
    return rng.choice(choices, min(size, choices), replace=False)
