"""Monte-Carlo values: the expected reward of states within a response, from sampled endings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from jaxtyping import Float32

from tba.engines import Engine
from tba.models.pretrained import Tokenizer
from tba.objectives import ValueRollouts
from tba.prompt import Answer
from tba.search.result import Rejected, Verdict
from tba.search.rewards import Guard
from tba.search.verdicts import judged_before
from tba.streams import Use, seed_of
from tba.types import Completion, Group, Sampling, Trajectory

State = tuple[int, bytes]
"""Index of a group, and the response tokens so far."""


@dataclass(frozen=True)
class Rollouts:
    """Estimates the values of the states before every `request.step_tokens`-th token."""

    engine: Engine
    text: Tokenizer
    guard: Guard
    sampling: Sampling
    request: ValueRollouts

    def estimate(self, groups: Sequence[Group], seed: int) -> tuple[list[Group], list[Verdict]]:
        """Return the groups with values, and the verdict on each rollout.

        A state that several responses share is rolled out once. The first state's value is the
        mean reward of the prompt's other responses. A response is left out if no rollout of one
        of its states has a reward.
        """
        values: dict[State, float] = {}
        verdicts: list[Verdict] = []
        for start, states in self._states(groups).items():
            endings = self._roll_out(groups, start, states, seed)
            for state, judged in zip(states, endings, strict=True):
                rewards = [v for v in judged if not isinstance(v, Rejected)]
                values[state] = fmean(rewards) if rewards else float("nan")
                verdicts += judged
        valued = []
        for i, group in enumerate(groups):
            kept = []
            for trajectory in group.trajectories:
                value = self._value(group, i, trajectory, values)
                if np.isfinite(value).all():
                    kept.append(replace(trajectory, value=value))
            if kept:
                valued.append(replace(group, trajectories=tuple(kept)))
        return valued, verdicts

    def _states(self, groups: Sequence[Group]) -> dict[int, list[State]]:
        """Return the distinct states to roll out, by the number of tokens that lead to them."""
        by_length: dict[int, dict[State, None]] = {}
        for i, group in enumerate(groups):
            for t in group.trajectories:
                for n in self._starts(t.tokens):
                    by_length.setdefault(n, {})[i, t.tokens[:n].tobytes()] = None
        return {n: list(by_length[n]) for n in sorted(by_length)}

    def _roll_out(
        self, groups: Sequence[Group], start: int, states: Sequence[State], seed: int
    ) -> list[list[Verdict]]:
        """Return `request.rollouts` verdicts for each state, `start` tokens into its response."""
        origins = [groups[i] for i, _ in states]
        heads = [np.frombuffer(tokens, np.int32) for _, tokens in states]
        starts = zip(origins, heads, strict=True)
        contexts = [np.concatenate([group.prompt_tokens, head]) for group, head in starts]
        max_tokens = self.sampling.max_tokens - start
        sampling = replace(self.sampling, samples=self.request.rollouts, max_tokens=max_tokens)
        own = seed_of(seed, Use.ROLLOUT, start)
        endings = self.engine.generate(contexts, sampling, own)
        answers = []
        for head, of_state in zip(heads, endings, strict=True):
            endings_of = [self._answer(head, ending) for ending in of_state]
            answers.append(judged_before(endings_of, self.sampling.truncated))
        return self.guard([group.prompt for group in origins], answers)

    def _answer(self, head: np.ndarray, ending: Completion) -> Answer:
        """Return head and ending as text. A stop string that begins in the head counts as well.

        The engine does not know the head, and goes on after such a stop string.
        """
        whole = np.concatenate([head, ending.tokens])
        return self.text.answer(whole, ending.finished, self.sampling.stop, ending.version)

    def _value(
        self, group: Group, index: int, trajectory: Trajectory, values: dict[State, float]
    ) -> Float32[np.ndarray, " T"]:
        """Return the value of each token's state; NaN where no rollout has a reward."""
        tokens = trajectory.tokens
        others = [t.reward for t in group.trajectories if t is not trajectory]
        steps = [fmean(others or [trajectory.reward])]
        steps += [values[index, tokens[:n].tobytes()] for n in self._starts(tokens)]
        return np.repeat(np.array(steps, np.float32), self.request.step_tokens)[: len(tokens)]

    def _starts(self, tokens: np.ndarray) -> range:
        """Return the places of a response, after the first, at which a step begins."""
        return range(self.request.step_tokens, len(tokens), self.request.step_tokens)
