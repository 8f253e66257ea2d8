from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from tba.config.tables import Positive
from tba.prompt import passes
from tba.strategies import Columns, by_count, pick

SEARCHED = 8
"""Groups that a draw examines for unequal rewards, as a multiple of the groups it needs."""


@dataclass(frozen=True)
class Recent:
    """Draws prompts that arrived in the last `window` steps, or the newest if those are too few.

    Each group consists of samples that arrived in these steps, or else of the prompt's latest
    arrival. Unless `filter_equal` is set, a prompt gets several groups before older prompts are
    drawn, and with a window of one step and as many new samples per step as in a batch, this is
    on-policy training: each sample that has just arrived is drawn exactly once.
    """

    window: Positive = 1
    """Number of latest steps that count as recent."""
    filter_equal: bool = False
    """Draw groups whose rewards are all equal only if there are too few others.

    Such groups carry no information about the reward. DAPO (arXiv 2503.14476, section 3.2)
    generates others in their place. Here, older groups are drawn again, from the newest 8 x B.
    """

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> Int[np.ndarray, "{groups} {size}"]:
        start = now - self.window + 1  # the first step of the window
        first = bisect_left(columns.prompts, start, key=columns.latest.__getitem__)
        newest = columns.prompts[first:]
        if self.filter_equal:  # prompts with unequal rewards, and others if there are too few
            least = max(len(newest), groups)
            unequal: list[int] = []
            equal: list[int] = []
            for place, prompt in enumerate(columns.prompts[-max(least, SEARCHED * groups) :][::-1]):
                if place >= least and len(unequal) >= groups:
                    break
                rewards = columns.reward[columns.latest_rows(prompt, start)]
                is_equal = passes(rewards.min(), rewards.max())
                (equal if is_equal else unequal).append(int(prompt))
            missing = max(0, groups - len(unequal))
            newest = np.array(unequal + equal[:missing], columns.prompts.dtype)
        elif len(newest) < groups:  # a prompt may have arrived several times
            arrived = [columns.arrived_since(columns.latest_rows(p, start), start) for p in newest]
            several = [max(1, int(samples.sum()) // size) for samples in arrived]
            newest = np.repeat(newest, np.array(several, int))
            missing = max(0, groups - len(newest))
            newest = np.concatenate([columns.prompts[max(0, first - missing) : first], newest])
        drawn = []
        for prompt, times in pick(newest, groups, rng).items():
            rows = columns.latest_rows(prompt, start)
            since = min(start, int(columns.latest[prompt]))
            chosen = by_count(columns.arrived_since(rows, since), times, size, rng)
            drawn.append(np.where(chosen < 0, -1, rows[chosen]))
        return np.concatenate(drawn)
