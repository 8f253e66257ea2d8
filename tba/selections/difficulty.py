from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tba.config.tables import Share
from tba.prompt import Prompt, passes
from tba.selections import CountedSelection

if TYPE_CHECKING:
    from tba.types import Group

CANDIDATES = 8
"""Size of the pool, as a multiple of the number of prompts to choose."""
PRIOR = (1.0, 1.0)
"""alpha and beta of the Beta prior, which is uniform."""


@dataclass
class Difficulty(CountedSelection):
    """Prompts with a predicted success rate near `target`, from a random pool.

    MoPPS (arXiv 2507.04632): the success rate of each prompt has a Beta posterior, from which it is
    sampled at each choice (Thompson sampling). After a group with s right and f wrong answers,
    alpha' = forgetting alpha + (1 - forgetting) + s, and likewise beta' with f.
    An answer is right if its reward is at least the task's `pass_reward`.
    """

    target: Share = 0.5
    """Success rate to look for."""
    forgetting: Share = 0.5
    """Share of the earlier evidence to keep at each update: 1 keeps all, 0 only the last group."""
    _posterior: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    """(alpha, beta) by prompt id; other prompts have the prior."""

    def __post_init__(self) -> None:
        if self.pass_reward is None:
            raise ValueError(
                "selection.use = 'difficulty', but the task has no pass_reward;"
                " set task.pass_reward if it has that option, or use selection=cyclic"
            )

    def choose(self, count: int) -> list[Prompt]:
        rng = np.random.default_rng([self.seed, self._chosen])
        self._chosen += count
        size = min(len(self.prompts), count * CANDIDATES)
        pool = rng.choice(len(self.prompts), size, replace=False)
        posteriors = [self._posterior.get(self.prompts[i].id, PRIOR) for i in pool]
        alpha, beta = np.array(posteriors).reshape(-1, 2).T
        distance = np.abs(rng.beta(alpha, beta) - self.target)
        nearest = np.resize(pool[np.argsort(distance)], count)  # repeats them if they are too few
        return [self.prompts[i] for i in nearest.tolist()]

    def learn(self, group: "Group") -> None:
        assert self.pass_reward is not None
        right = sum(passes(t.reward, self.pass_reward) for t in group.trajectories)
        wrong = len(group.trajectories) - right
        old = self._posterior.get(group.prompt.id, PRIOR)
        kept = self.forgetting * np.array(old) + (1 - self.forgetting) * np.array(PRIOR)
        alpha, beta = kept.tolist()
        self._posterior[group.prompt.id] = (alpha + right, beta + wrong)

    def state(self) -> dict[str, Any]:
        posterior = {prompt: list(counts) for prompt, counts in self._posterior.items()}
        return super().state() | {"posterior": posterior}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._posterior = {prompt: (a, b) for prompt, (a, b) in state["posterior"].items()}
