"""Wrong rewards on purpose, to study training with a grader that errs, is noisy, or is fooled."""

from collections.abc import Awaitable, Sequence
from inspect import isawaitable
from itertools import chain
from typing import Any

import numpy as np

from tba.config.tables import FaultsTable
from tba.search.result import Rejected, Verdict
from tba.search.rewards import verdict_on
from tba.tasks import Scores, Task
from tba.types import Answer, Prompt


class FaultyTask:
    """A task that gives some answers of one search a wrong reward, as `[faults]` says.

    The search task's seed decides which, wherever it runs. An answer without a reward gets none,
    and does not change other answers' faults.
    """

    def __init__(
        self, task: Task, faults: FaultsTable, seed: int, answers: Sequence[Sequence[Answer]]
    ):
        self._task, self._faults = task, faults
        self._answers = list(chain(*answers))  # alive, so that their ids stay their own
        n, rng = len(self._answers), np.random.default_rng([faults.seed, seed])
        draws = zip(self._answers, rng.random(n), rng.normal(size=n).tolist(), strict=True)
        # by identity: two samples with the same text have faults of their own
        self._noise = {id(a): noise for a, uniform, noise in draws if uniform < faults.share}
        """The answers with a fault, each with its normal noise."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        """Return the scores of the wrapped task, some of them wrong."""
        scores: Any = self._task.score(prompt, answers)
        if isawaitable(scores):
            return self._later(scores, answers)
        return self._falsified(scores, answers)

    def count(self, answers: Sequence[Answer], verdicts: Sequence[Verdict]) -> int:
        """Return how many of these answers have a reward, and a wrong one."""
        pairs = zip(answers, verdicts, strict=True)
        return sum(id(a) in self._noise for a, v in pairs if not isinstance(v, Rejected))

    async def _later(self, scores: Awaitable[Scores], answers: Sequence[Answer]) -> Scores:
        return self._falsified(await scores, answers)

    def _falsified(self, scores: Scores, answers: Sequence[Answer]) -> Scores:
        scores = list(scores)
        if len(scores) == len(answers):  # else the guard rejects them
            scores = list(map(self._reward, scores, answers))
        return scores

    def _reward(self, score: float | None, answer: Answer) -> float | None:
        verdict, faults = verdict_on(score), self._faults
        if isinstance(verdict, Rejected) or id(answer) not in self._noise:
            return score
        if faults.kind == "flip":
            return faults.low + faults.high - verdict
        if faults.kind == "noise":
            return verdict + faults.scale * self._noise[id(answer)]
        return faults.high
