"""Contract of strategies, which choose what to replay. Each other file is one strategy."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, SupportsIndex

import numpy as np
from jaxtyping import Float64, Int, Int32


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
