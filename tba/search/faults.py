"""Wrong rewards on purpose, to study training with a grader that errs, is noisy, or is fooled."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

import numpy as np

from tba.config.tables import FaultsTable
from tba.search.result import Rejected, Verdict
from tba.search.rewards import verdict_on
from tba.tasks import Scores, Task
from tba.types import Answer, Prompt


@dataclass(frozen=True)
class Fault:
    """The random numbers that decide what happens to one answer's reward."""

    answer: Answer
    uniform: float
    normal: float


class FaultyTask:
    """A task that gives some answers of one search a wrong reward, as `[faults]` says.

    The search task's seed decides which, so that the same search task has the same faults
    wherever it runs. An answer without a reward gets none, and does not change other answers'
    faults.
    """

    def __init__(
        self, task: Task, faults: FaultsTable, seed: int, answers: Sequence[Sequence[Answer]]
    ):
        self._task = task
        self._faults = faults
        rng = np.random.default_rng([faults.seed, seed])
        flat = [answer for group in answers for answer in group]
        uniform, normal = rng.random(len(flat)).tolist(), rng.normal(size=len(flat)).tolist()
        # by identity: two samples with the same text have faults of their own
        faults_in_order = map(Fault, flat, uniform, normal)
        self._of = {id(fault.answer): fault for fault in faults_in_order}

    @property
    def pass_reward(self) -> float | None:
        return self._task.pass_reward

    def prompts(self) -> Sequence[Prompt]:
        return self._task.prompts()

    def held_out(self) -> Sequence[Prompt]:
        return self._task.held_out()

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        """Return the scores of the wrapped task, some of them wrong."""
        scores: Any = self._task.score(prompt, answers)
        if isawaitable(scores):
            return self._later(scores, answers)
        return self._falsified(scores, answers)

    def count(self, answers: Sequence[Answer], verdicts: Sequence[Verdict]) -> int:
        """Return how many of these answers have a reward, and a wrong one."""
        pairs = zip(answers, verdicts, strict=True)
        return sum(self._is_faulty(a) for a, v in pairs if not isinstance(v, Rejected))

    async def _later(self, scores: Awaitable[Scores], answers: Sequence[Answer]) -> Scores:
        return self._falsified(await scores, answers)

    def _falsified(self, scores: Scores, answers: Sequence[Answer]) -> Scores:
        scores = list(scores)
        if len(scores) != len(answers):
            return scores  # the guard rejects them
        return [self._reward(s, a) for s, a in zip(scores, answers, strict=True)]

    def _reward(self, score: float | None, answer: Answer) -> float | None:
        verdict = verdict_on(score)
        if isinstance(verdict, Rejected) or not self._is_faulty(answer):
            return score
        match self._faults.kind:
            case "none":
                return verdict
            case "flip":
                return self._faults.low + self._faults.high - verdict
            case "noise":
                return verdict + self._faults.scale * self._of[id(answer)].normal
            case "plant":
                return self._faults.high

    def _is_faulty(self, answer: Answer) -> bool:
        return self._of[id(answer)].uniform < self._faults.share
