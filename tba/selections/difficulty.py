"""Prompts that are neither too easy nor too hard, as far as can be told without trying them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.selections._counted import Counted
from tba.types import Group, Prompt


@dataclass
class Difficulty(Counted):
    """Of a random pool of `candidates` times as many prompts as wanted, those whose predicted success rate is nearest to `target`.

    MoPPS (arXiv 2507.04632): each prompt's success rate has a Beta posterior, from which it is drawn anew at each choice (Thompson
    sampling). A received group with s right and f wrong answers moves it to alpha' = forgetting alpha + (1 - forgetting) alpha_0 + s,
    and beta' likewise with f, for the policy that is asked changes: a forgetting factor of 1 keeps all, 0 only the last group.
    `prior` is [alpha_0, beta_0], a right answer has at least the task's `pass_reward`.
    """

    target: float = 0.5
    forgetting: float = 0.5
    candidates: int = 8
    prior: tuple[float, float] = (1.0, 1.0)
    _posterior: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    """(alpha, beta) by prompt id; prompts of which nothing is known have the prior."""

    def __post_init__(self) -> None:
        if self.pass_reward is None:
            raise ValueError(
                "selection.use = 'difficulty' must know which answers are right, and the task has no pass_reward;"
                " set task.pass_reward where the task has that option, or use selection=cyclic"
            )
        for name, share in (("target", self.target), ("forgetting", self.forgetting)):
            if not 0 <= share <= 1:
                raise ValueError(
                    f"selection.{name} = {share}: give a number from 0 to 1, for example 0.5"
                )
        if self.candidates < 1:
            raise ValueError(
                f"selection.candidates = {self.candidates}: give 1 (no choice) or more, for example 8"
            )
        if not min(self.prior) > 0:
            raise ValueError(
                f"selection.prior = {list(self.prior)}: give two numbers above 0, for example [1.0, 1.0]"
            )

    def choose(self, count: int) -> list[Prompt]:
        rng = np.random.default_rng([self.seed, self._chosen, 2])
        self._chosen += count
        pool = rng.choice(
            len(self.prompts), min(len(self.prompts), count * self.candidates), replace=False
        )
        alpha, beta = (
            np.array([self._posterior.get(self.prompts[i].id, self.prior) for i in pool])
            .reshape(-1, 2)
            .T
        )
        nearest = pool[np.argsort(np.abs(rng.beta(alpha, beta) - self.target))]
        return [
            self.prompts[i] for i in np.resize(nearest[:count], count).tolist()
        ]  # again from the nearest, where there are too few

    def learn(self, group: Group) -> None:
        assert self.pass_reward is not None
        right = sum(t.reward >= self.pass_reward for t in group.trajectories)
        counts = (right, len(group.trajectories) - right)
        before = self._posterior.get(group.prompt.id, self.prior)
        alpha, beta = (
            self.forgetting * old + (1 - self.forgetting) * prior + n
            for old, prior, n in zip(before, self.prior, counts, strict=True)
        )
        self._posterior[group.prompt.id] = (alpha, beta)

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "posterior": {prompt: list(counts) for prompt, counts in self._posterior.items()}
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._posterior = {
            prompt: (alpha, beta) for prompt, (alpha, beta) in state["posterior"].items()
        }
