"""Scoring that cannot be trusted: a reward that raises, hangs or returns nonsense costs that sample and is counted."""

from __future__ import annotations

import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tba.search.result import SearchStats
from tba.tasks import Task, WrongLength
from tba.types import Answer, Prompt


@dataclass(frozen=True)
class Rejected:
    """Why a sample has no reward: `raised`, `timeout`, `not_finite`, `not_a_number`, `none` or `wrong_length`."""

    reason: str
    detail: str


Verdict = float | Rejected


WINDOW = 64
"""Samples that must have been scored before their rejections count."""

AT_ONCE = 64
"""Answers that a task scores in one call, where there are many."""


@dataclass(frozen=True)
class Guard:
    """Calls a task's scoring with a deadline, and finds out which sample is to blame when a call fails."""

    task: Task
    deadline: float
    """Seconds for one call."""

    def __call__(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Verdict]:
        """One verdict for each answer. A failing call is repeated one sample at a time, so that the others keep their rewards."""
        verdicts = self._call(prompts, answers)
        if (
            len(answers) < 2
            or not isinstance(verdicts[0], Rejected)
            or verdicts[0].reason not in ("raised", "timeout")
        ):
            return verdicts
        alone: list[Verdict] = []
        for p, a in zip(prompts, answers, strict=True):
            hangs = [v for v in alone if isinstance(v, Rejected) and v.reason == "timeout"]
            alone += (
                hangs[:1] if len(hangs) >= 2 else self._call([p], [a])
            )  # after two hangs the rest is not tried
        return alone

    def in_parts(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Verdict]:
        """The same in calls about as large as those of a search, each with the deadline, where there are many."""
        starts = range(0, len(answers), AT_ONCE)
        return [v for i in starts for v in self(prompts[i : i + AT_ONCE], answers[i : i + AT_ONCE])]

    def _call(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Verdict]:
        try:
            scores = _within(self.deadline, lambda: list(self.task.score(prompts, answers)))
        except TimeoutError as error:
            return [Rejected("timeout", str(error))] * len(answers)
        except WrongLength as error:
            return [Rejected("wrong_length", str(error))] * len(answers)
        except (Exception, SystemExit):  # untrusted code
            return [Rejected("raised", traceback.format_exc())] * len(answers)
        if len(scores) != len(answers):
            return [
                Rejected("wrong_length", f"{len(scores)} rewards for {len(answers)} answers")
            ] * len(answers)
        return [_verdict(s) for s in scores]


@dataclass
class RejectionMonitor:
    """Stops the run when more than `max_share` of the latest samples were rejected."""

    max_share: float
    _recent: deque[SearchStats] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, stats: SearchStats) -> None:
        """Take in the statistics of one search.

        RuntimeError, with the latest rejection, when more than `max_share` of the last 64 or more
        samples were rejected.
        """
        self._recent.append(stats)
        while len(self._recent) > 1 and self._scored(skip=1) >= WINDOW:
            self._recent.popleft()
        total = self._scored()
        recent = SearchStats()
        for one in self._recent:
            recent.add(one)
        rejected = recent.rejected.total()
        if total >= WINDOW and rejected > self.max_share * total:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in recent.rejected.items())
            raise RuntimeError(
                f"{rejected} of the last {total} samples were rejected ({reasons}), more than"
                f" reward.max_rejected = {self.max_share}; fix the scoring function. The last"
                f" error was:\n{recent.last_rejection}"
            )

    def _scored(self, skip: int = 0) -> int:
        return sum(stats.samples + stats.rollouts for stats in list(self._recent)[skip:])


def _verdict(score: Any) -> Verdict:
    if score is None:
        return Rejected("none", "no reward function gave this sample a reward")
    try:
        value = float(score)
    except (
        Exception
    ):  # untrusted too: a tensor of two numbers raises RuntimeError, 10**400 OverflowError
        return Rejected("not_a_number", f"a reward is {score!r}")
    return value if math.isfinite(value) else Rejected("not_finite", f"a reward is {value}")


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result or exception; TimeoutError after so many seconds. A hung call keeps its (daemon) thread."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # handed to the caller
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"scoring did not return within reward.deadline = {seconds} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
