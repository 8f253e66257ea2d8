"""Monte-Carlo values: what the states in the middle of a response are worth, by sampling new endings from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol, runtime_checkable

import numpy as np

from tba.models.pretrained import Text
from tba.objectives import ValueRollouts
from tba.search.rewards import Guard, Rejected, Verdict
from tba.types import Answer, Completion, Group, Sampling, Trajectory

State = tuple[int, bytes]
"""A prompt, by its place, and the tokens that followed it so far."""


@runtime_checkable
class Generates(Protocol):
    """What is needed of an engine."""

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]: ...


@dataclass(frozen=True)
class Rollouts:
    """Values of the states before every `request.step_tokens`-th token, of the weights that the engine has."""

    engine: Generates
    text: Text
    guard: Guard
    sampling: Sampling
    request: ValueRollouts

    def estimate(self, groups: list[Group], seed: int) -> tuple[list[Group], list[Verdict]]:
        """The groups with values, and the verdict on each rollout. A state that several responses share is rolled out once.

        The first state's value is the mean reward of the prompt's other responses. A response with a state none of whose
        rollouts could be scored is left out.
        """
        values: dict[State, float] = {}
        verdicts: list[Verdict] = []
        for start, states in self._states(groups).items():
            for state, found in zip(
                states, self._rolled_out(groups, start, states, seed), strict=True
            ):
                verdicts += found
                values[state] = _mean([v for v in found if not isinstance(v, Rejected)])
        valued = [
            (g, [self._valued(g, i, t, values) for t in g.trajectories])
            for i, g in enumerate(groups)
        ]
        kept = [
            (g, tuple(t for t in ts if t.value is not None and np.isfinite(t.value).all()))
            for g, ts in valued
        ]
        return [replace(g, trajectories=ts) for g, ts in kept if ts], verdicts

    def _states(self, groups: Sequence[Group]) -> dict[int, list[State]]:
        """The distinct states to roll out, by how many tokens lead to them."""
        step = self.request.step_tokens
        all_of = [
            (n, (i, t.tokens[:n].tobytes()))
            for i, g in enumerate(groups)
            for t in g.trajectories
            for n in range(step, len(t.tokens), step)
        ]
        found: dict[int, dict[State, None]] = {n: {} for n in sorted({n for n, _ in all_of})}
        for n, state in all_of:
            found[n][state] = None
        return {n: list(states) for n, states in found.items()}

    def _rolled_out(
        self, groups: Sequence[Group], start: int, states: Sequence[State], seed: int
    ) -> list[list[Verdict]]:
        """`request.rollouts` verdicts for each state, all of which are `start` tokens into their response."""
        n = self.request.rollouts
        heads = [np.frombuffer(head, np.int32) for _, head in states]
        contexts = [
            np.concatenate([groups[i].prompt_tokens, head])
            for (i, _), head in zip(states, heads, strict=True)
        ]
        left = replace(self.sampling, samples=n, max_tokens=self.sampling.max_tokens - start)
        endings = self.engine.generate(contexts, left, seed + start)
        answers = [
            Answer(self.text.decode(np.concatenate([head, c.tokens])), c.finished)
            for head, cs in zip(heads, endings, strict=True)
            for c in cs
        ]
        verdicts = self.guard.in_parts(
            [groups[i].prompt for i, _ in states for _ in range(n)], answers
        )
        return [verdicts[i : i + n] for i in range(0, len(verdicts), n)]

    def _valued(
        self, group: Group, place: int, trajectory: Trajectory, values: dict[State, float]
    ) -> Trajectory:
        others = [t.reward for t in group.trajectories if t is not trajectory] or [
            trajectory.reward
        ]
        step = self.request.step_tokens
        steps = [
            values[place, trajectory.tokens[:n].tobytes()]
            for n in range(step, len(trajectory.tokens), step)
        ]
        at_each = np.repeat(np.array([fmean(others), *steps], np.float32), step)
        return replace(trajectory, value=at_each[: len(trajectory.tokens)])


def _mean(rewards: Sequence[float]) -> float:
    return fmean(rewards) if rewards else float("nan")
