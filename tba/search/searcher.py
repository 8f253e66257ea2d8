"""Search: from prompts to groups that any objective can learn from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from tba.config.tables import EvalTable, FaultsTable
from tba.engines import Engine
from tba.models.pretrained import Text
from tba.objectives import ValueRollouts
from tba.search.evaluate import evaluate
from tba.search.faults import FaultyTask
from tba.search.reference import Reference
from tba.search.result import Evaluation, SearchResult, SearchStats
from tba.search.rewards import Guard, Rejected, Verdict
from tba.search.rollouts import Rollouts, Sample, SampleGroup
from tba.types import Completion, Group, Prompt, Sampling, Trajectory

STAGES = ("generate", "reward", "rollouts", "reference")
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
        rewarded = _rewarded(prompts, tokens, completions, verdicts)
        rewarded, rollouts = self._add_values(rewarded, seed)
        times.append(time.perf_counter())
        groups = self._finish(rewarded)
        times.append(time.perf_counter())
        stats = SearchStats(samples=sum(map(len, verdicts)), rollouts=len(rollouts), faulty=faulty)
        for verdict in chain(*verdicts, rollouts):
            if isinstance(verdict, Rejected):
                stats.rejected[verdict.reason] += 1
                stats.last_rejection = verdict.detail
        for stage, seconds in zip(STAGES, np.diff(times).tolist(), strict=True):
            stats.seconds[stage] += seconds
        return SearchResult(groups, stats)

    def evaluate(self) -> Evaluation:
        """Evaluate the engine's weights on the held-out prompts, as `[eval]` says."""
        same = self.evaluation.temperature == self.sampling.temperature
        reference = self.reference if same else None  # the reference has one temperature
        return evaluate(
            self.engine, self.text, self.guard, self.held_out, self.evaluation,
            self.sampling.max_tokens, reference,
        )  # fmt: skip

    def _score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], seed: int
    ) -> tuple[list[list[Verdict]], int]:
        """Return a verdict on each completion, and how many rewards are wrong on purpose."""
        answers = [[self.text.answer(c) for c in group] for group in completions]
        if self.faults.kind == "none":
            return self.guard(prompts, answers), 0
        task = FaultyTask(self.guard.task, self.faults, seed, answers)
        verdicts = replace(self.guard, task=task)(prompts, answers)
        return verdicts, sum(task.count(*group) for group in zip(answers, verdicts, strict=True))

    def _add_values(
        self, groups: list[SampleGroup], seed: int
    ) -> tuple[list[SampleGroup], list[Verdict]]:
        """Add values if the objective needs them; return the verdicts on the rollouts as well."""
        request = self.value_rollouts
        if request is None:
            return groups, []
        rollouts = Rollouts(self.engine, self.text, self.guard, self.sampling, request)
        return rollouts.estimate(groups, seed)

    def _finish(self, groups: Sequence[SampleGroup]) -> list[Group]:
        """Turn samples into trajectories, with the reference's log-probs."""
        prompts = [g.prompt_tokens for g in groups]
        responses = [[s.completion.tokens for s in g.samples] for g in groups]
        logp, version = self.reference.logp(prompts, responses)
        finished = []
        for group, rows in zip(groups, logp, strict=True):
            pairs = zip(group.samples, rows, strict=True)
            trajectories = tuple(_trajectory(sample, ref_logp) for sample, ref_logp in pairs)
            finished.append(Group(group.prompt, group.prompt_tokens, trajectories, version))
        return finished


def _rewarded(
    prompts: Sequence[Prompt],
    tokens: Sequence[np.ndarray],
    completions: Sequence[Sequence[Completion]],
    verdicts: Sequence[Sequence[Verdict]],
) -> list[SampleGroup]:
    """Return the samples that have a reward, by prompt; prompts without any are left out."""
    groups = []
    for prompt, encoded, sampled, judged in zip(
        prompts, tokens, completions, verdicts, strict=True
    ):
        samples = []
        for completion, verdict in zip(sampled, judged, strict=True):
            if not isinstance(verdict, Rejected):
                samples.append(Sample(completion, verdict))
        if samples:
            groups.append(SampleGroup(prompt, encoded, tuple(samples)))
    return groups


def _trajectory(sample: Sample, ref_logp: np.ndarray) -> Trajectory:
    c = sample.completion
    return Trajectory(
        tokens=c.tokens,
        behavior_logp=c.logp,
        ref_logp=ref_logp,
        reward=sample.reward,
        version=c.version,
        finished=c.finished,
        value=sample.value,
    )
