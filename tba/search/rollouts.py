"""Monte-Carlo values: the expected reward of states within a response, from sampled endings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from tba.models.pretrained import Text
from tba.objectives import ValueRollouts
from tba.search.rewards import Guard, Rejected, Verdict
from tba.types import Answer, Completion, Prompt, Sampling

State = tuple[int, bytes]
"""Index of a group, and the response tokens so far."""


@dataclass(frozen=True)
class Sample:
    """A completion with its reward, and with values if the objective needs them."""

    completion: Completion
    reward: float
    value: Float32[np.ndarray, " T"] | None = None


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one prompt that have a reward."""

    prompt: Prompt
    prompt_tokens: Int32[np.ndarray, " P"]
    samples: tuple[Sample, ...]


@runtime_checkable
class Generates(Protocol):
    """The part of an engine that rollouts need."""

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]: ...


@dataclass(frozen=True)
class Rollouts:
    """Estimates the values of the states before every `request.step_tokens`-th token."""

    engine: Generates
    text: Text
    guard: Guard
    sampling: Sampling
    request: ValueRollouts

    def estimate(
        self, groups: Sequence[SampleGroup], seed: int
    ) -> tuple[list[SampleGroup], list[Verdict]]:
        """Return the groups with values, and the verdict on each rollout.

        A state that several responses share is rolled out once. The first state's value is the
        mean reward of the prompt's other responses. A response is left out if no rollout of one
        of its states has a reward.
        """
        values: dict[State, float] = {}
        verdicts: list[Verdict] = []
        for start, states in self._states(groups).items():
            for state, endings in self._roll_out(groups, start, states, seed):
                rewards = [v for v in endings if not isinstance(v, Rejected)]
                values[state] = fmean(rewards) if rewards else float("nan")
                verdicts += endings
        valued = []
        for place, group in enumerate(groups):
            samples = []
            for i, sample in enumerate(group.samples):
                value = self._value(group, place, i, values)
                if np.isfinite(value).all():
                    samples.append(replace(sample, value=value))
            if samples:
                valued.append(replace(group, samples=tuple(samples)))
        return valued, verdicts

    def _states(self, groups: Sequence[SampleGroup]) -> dict[int, list[State]]:
        """Return the distinct states to roll out, by the number of tokens that lead to them."""
        by_length: dict[int, dict[State, None]] = {}
        for place, group in enumerate(groups):
            for sample in group.samples:
                tokens = sample.completion.tokens
                for n in self._starts(tokens):
                    by_length.setdefault(n, {})[place, tokens[:n].tobytes()] = None
        return {n: list(by_length[n]) for n in sorted(by_length)}

    def _roll_out(
        self, groups: Sequence[SampleGroup], start: int, states: Sequence[State], seed: int
    ) -> list[tuple[State, list[Verdict]]]:
        """Return `request.rollouts` verdicts for each state, `start` tokens into its response."""
        heads = [np.frombuffer(tokens, np.int32) for _, tokens in states]
        contexts = []
        for (place, _), head in zip(states, heads, strict=True):
            contexts.append(np.concatenate([groups[place].prompt_tokens, head]))
        max_tokens = self.sampling.max_tokens - start
        sampling = replace(self.sampling, samples=self.request.rollouts, max_tokens=max_tokens)
        endings = self.engine.generate(contexts, sampling, seed + start)
        answers = [
            [self._answer(head, ending) for ending in of_state]
            for head, of_state in zip(heads, endings, strict=True)
        ]
        prompts = [groups[place].prompt for place, _ in states]
        return list(zip(states, self.guard(prompts, answers), strict=True))

    def _answer(self, head: np.ndarray, ending: Completion) -> Answer:
        whole = np.concatenate([head, ending.tokens])
        return Answer(self.text.decode(whole), ending.finished)

    def _value(
        self, group: SampleGroup, place: int, index: int, values: dict[State, float]
    ) -> Float32[np.ndarray, " T"]:
        """Return the value of each token's state; NaN where no rollout has a reward."""
        sample = group.samples[index]
        tokens = sample.completion.tokens
        others = [s.reward for s in group.samples if s is not sample]
        steps = [fmean(others or [sample.reward])]
        steps += [values[place, tokens[:n].tobytes()] for n in self._starts(tokens)]
        return np.repeat(np.array(steps, np.float32), self.request.step_tokens)[: len(tokens)]

    def _starts(self, tokens: np.ndarray) -> range:
        """Return the places of a response, after the first, at which a step begins."""
        return range(self.request.step_tokens, len(tokens), self.request.step_tokens)
