"""Values by rollouts: expected rewards of states within a response, from sampled endings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from tba.engines import Engine
from tba.models.tokenizer import Tokenizer
from tba.objectives import ValueRollouts
from tba.prompt import Answer, Prompt
from tba.scoring.verdicts import Rejection, Verdict, settle_truncated
from tba.streams import Use, seed_of
from tba.types import Group, Sampling

State = tuple[int, bytes]
"""Index of a group, and the response's tokens up to the state."""


@dataclass(frozen=True)
class Rollouts:
    """Monte-Carlo values: expected rewards of states within a response, from sampled endings.

    The states are those before every `request.step_tokens`-th token.
    """

    engine: Engine
    text: Tokenizer
    score: Callable[[Sequence[Prompt], Sequence[Sequence[Answer | Verdict]]], list[list[Verdict]]]
    """Returns the verdicts on the answers to each prompt."""
    sampling: Sampling
    request: ValueRollouts

    def estimate(self, groups: Sequence[Group], seed: int) -> tuple[list[Group], list[Verdict]]:
        """Return the groups with values, and the verdict on each rollout.

        A state that several responses share is rolled out once. The first state's value is the
        mean reward of the prompt's other responses. A response is left out if all rollouts of one
        of its states were rejected.
        """
        values: dict[State, float] = {}
        verdicts: list[Verdict] = []
        longest = max((len(t.tokens) for g in groups for t in g.trajectories), default=0)
        for start in range(self.request.step_tokens, longest, self.request.step_tokens):
            states: dict[State, None] = {}
            for i, group in enumerate(groups):
                heads = [t.tokens[:start] for t in group.trajectories if len(t.tokens) > start]
                states.update(dict.fromkeys((i, head.tobytes()) for head in heads))
            endings = self._roll_out(groups, start, list(states), seed)
            for state, judged in zip(states, endings, strict=True):
                rewards = [v for v in judged if not isinstance(v, Rejection)]
                values[state] = fmean(rewards) if rewards else float("nan")
                verdicts += judged
        valued = []
        for i, group in enumerate(groups):
            kept = []
            for trajectory in group.trajectories:
                tokens = trajectory.tokens
                others = [t.reward for t in group.trajectories if t is not trajectory]
                by_step = [fmean(others or [trajectory.reward])]
                starts = range(self.request.step_tokens, len(tokens), self.request.step_tokens)
                by_step += [values[i, tokens[:start].tobytes()] for start in starts]
                by_token = np.repeat(np.array(by_step, np.float32), self.request.step_tokens)
                value = by_token[: len(tokens)]
                if np.isfinite(value).all():
                    kept.append(replace(trajectory, value=value))
            if kept:
                valued.append(replace(group, trajectories=tuple(kept)))
        return valued, verdicts

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
            endings_of = []
            for ending in of_state:
                # a stop string that begins in the head is found here: the engine continues after it
                tokens = np.concatenate([head, ending.tokens])
                stop = self.sampling.stop
                endings_of.append(self.text.answer(tokens, ending.finished, stop, ending.version))
            answers.append(settle_truncated(endings_of, self.sampling.truncated))
        return self.score([group.prompt for group in origins], answers)
