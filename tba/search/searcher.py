"""Search: from prompts to groups that any objective can learn from."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tba.config.tables import EvalTable, FaultsTable
from tba.engines import Engine
from tba.models.pretrained import Text
from tba.objectives import ValueRollouts
from tba.search.faults import FaultyTask
from tba.search.reference import Reference
from tba.search.result import Rejected, SearchResult, SearchStats, Verdict
from tba.search.rewards import Guard
from tba.search.rollouts import Rollouts
from tba.types import Completion, Group, Prompt, Sampling, Trajectory

STAGES = ("generate", "reward", "reference", "rollouts")
"""Stages of a search, whose seconds are counted."""


@dataclass(frozen=True)
class Searcher:
    """Finishes trajectories, reference log-probs included, so that the trainer holds one model."""

    engine: Engine
    reference: Reference
    text: Text
    guard: Guard
    sampling: Sampling
    faults: FaultsTable
    value_rollouts: ValueRollouts | None
    held_out: Sequence[Prompt]
    evaluation: EvalTable

    def search(self, prompts: Sequence[Prompt], seed: int) -> SearchResult:
        """Sample and score S responses of each prompt.

        A prompt whose samples were all rejected gives no group.
        """
        times = [time.perf_counter()]
        tokens = [self.text.encode(p) for p in prompts]
        completions = self.engine.generate(tokens, self.sampling, seed)
        times.append(time.perf_counter())
        verdicts, faulty = self._score(prompts, completions, seed)
        times.append(time.perf_counter())
        groups = self._groups(prompts, tokens, completions, verdicts)
        times.append(time.perf_counter())
        rollouts: list[Verdict] = []
        if self.value_rollouts is not None:
            request = self.value_rollouts
            values = Rollouts(self.engine, self.text, self.guard, self.sampling, request)
            groups, rollouts = values.estimate(groups, seed)
        times.append(time.perf_counter())
        stats = SearchStats(samples=sum(map(len, verdicts)), rollouts=len(rollouts), faulty=faulty)
        for verdict in chain(*verdicts, rollouts):
            if isinstance(verdict, Rejected):
                stats.rejected[verdict.reason] += 1
                stats.last_rejection = verdict.detail
        for stage, seconds in zip(STAGES, np.diff(times).tolist(), strict=True):
            stats.seconds[stage] += seconds
        return SearchResult(groups, stats)

    def _score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], seed: int
    ) -> tuple[list[list[Verdict]], int]:
        """Return a verdict on each completion, and how many rewards are wrong on purpose."""
        answers = [[self.text.answer(c) for c in group] for group in completions]
        if self.faults.kind == "none":
            return self.guard(prompts, answers), 0
        task = FaultyTask(self.guard.task, self.faults, seed, answers)
        verdicts = self.guard(prompts, answers, task)
        return verdicts, sum(task.count(*group) for group in zip(answers, verdicts, strict=True))

    def _groups(
        self,
        prompts: Sequence[Prompt],
        tokens: Sequence[np.ndarray],
        completions: Sequence[Sequence[Completion]],
        verdicts: Sequence[Sequence[Verdict]],
    ) -> list[Group]:
        """Return the samples that have a reward, by prompt, with the reference's log-probs."""
        rewarded = list(map(_rewarded, completions, verdicts))
        kept = [i for i, samples in enumerate(rewarded) if samples]
        responses = [[c.tokens for c, _ in rewarded[i]] for i in kept]
        logp, version = self.reference.logp([tokens[i] for i in kept], responses)
        groups = []
        for i, rows in zip(kept, logp, strict=True):
            trajectories = []
            for (completion, reward), ref_logp in zip(rewarded[i], rows, strict=True):
                trajectory = Trajectory(
                    tokens=completion.tokens,
                    behavior_logp=completion.logp,
                    ref_logp=ref_logp,
                    reward=reward,
                    version=completion.version,
                    finished=completion.finished,
                )
                trajectories.append(trajectory)
            groups.append(Group(prompts[i], tokens[i], tuple(trajectories), version))
        return groups


def _rewarded(
    completions: Sequence[Completion], verdicts: Sequence[Verdict]
) -> list[tuple[Completion, float]]:
    pairs = zip(completions, verdicts, strict=True)
    return [(c, v) for c, v in pairs if not isinstance(v, Rejected)]
