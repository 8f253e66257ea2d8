"""Contract of strategies, which choose what to replay, and the draws that they share.

Each other file is one strategy. All draws are exact, even for prompts with 100,000 responses.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, SupportsIndex

import numpy as np
from jaxtyping import Float, Float64, Int, Int32

LARGE = 10_000
"""Number of choices beyond which a draw does not examine each of them."""


@dataclass(frozen=True)
class Columns:
    """Read-only view of the replay buffer: one row for each distinct response.

    Take prompts from `prompts` and their rows from `rows`; all other rows are empty.
    """

    prompts: Int32[np.ndarray, " P"]
    """Numbers of the prompts, ordered by latest arrival, oldest first."""
    rows: Callable[[SupportsIndex], Int32[np.ndarray, " N"]]
    """Return the rows of a prompt, oldest arrival first."""
    latest: Int32[np.ndarray, " _"]
    """By prompt number: the trainer's step at the prompt's latest arrival."""
    prompt: Int32[np.ndarray, " R"]
    """By row, like all fields below: the prompt's number."""
    reward: Float64[np.ndarray, " R"]
    version: Int32[np.ndarray, " R"]
    """Version of the weights that sampled the first token."""
    arrived: Int32[np.ndarray, " R"]
    """The trainer's step when the response last arrived."""
    count: Int32[np.ndarray, " R"]
    """Number of samples of this response, over all its arrivals."""
    arrived_count: Int32[np.ndarray, " R"]
    """Number of samples of this response that arrived at step `arrived`."""
    length: Int32[np.ndarray, " R"]
    """Tokens of the response."""
    arrived_since: Callable[[np.ndarray, int], Int32[np.ndarray, " N"]]
    """Return the number of samples of each row's response that arrived at this step or later."""

    def latest_rows(
        self, prompt: SupportsIndex, since: int | None = None
    ) -> Int32[np.ndarray, " M"]:
        """Return the rows of the prompt's latest arrival, and those of step `since` or later."""
        rows = self.rows(prompt)
        latest = int(self.latest[prompt])
        first = latest if since is None else min(since, latest)
        return rows[bisect_left(rows, first, key=self.arrived.__getitem__) :]


class Strategy(Protocol):
    """Chooses the groups of a batch from the replay buffer."""

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> Int[np.ndarray, "{groups} {size}"]:
        """Return the rows of `groups` groups of `size` responses, each group from one prompt.

        If there are fewer than `size` responses for a group, it is padded with -1. The buffer then
        repeats the responses in turn, and counts the group in `short_groups`. There is at least one
        prompt. `now` is the trainer's step: `now - columns.arrived` is 0 for the newest responses.
        """


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
