"""Scoring that cannot be trusted: a reward that raises, hangs or returns nonsense costs that sample and is counted."""

from __future__ import annotations

import math
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tba.types import Answer, Prompt


@runtime_checkable
class Task(Protocol):
    """Where prompts come from, and what an answer is worth. `pass_reward` is the least reward of a right answer, if there is such a thing."""

    @property
    def pass_reward(self) -> float | None: ...

    def prompts(self) -> Sequence[Prompt]:
        """To train on."""

    def held_out(self) -> Sequence[Prompt]:
        """To evaluate on: none of them is among `prompts()`."""

    def score(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Sequence[float | None]:
        """One reward for each answer to the prompt at the same place; None: this one cannot be scored."""


class WrongLength(ValueError):
    """A reward function returned another number of rewards than it was given completions."""


@dataclass(frozen=True)
class Rejected:
    """Why a sample has no reward: `raised`, `timeout`, `not_finite`, `not_a_number`, `none` or `wrong_length`."""

    reason: str
    detail: str


Verdict = float | Rejected


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
        if len(answers) < 2 or not isinstance(verdicts[0], Rejected) or verdicts[0].reason not in ("raised", "timeout"):
            return verdicts
        alone: list[Verdict] = []
        for p, a in zip(prompts, answers, strict=True):
            hangs = [v for v in alone if isinstance(v, Rejected) and v.reason == "timeout"]
            alone += hangs[:1] if len(hangs) >= 2 else self._call([p], [a])  # after two hangs the rest is not tried
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
            return [Rejected("wrong_length", f"{len(scores)} rewards for {len(answers)} answers")] * len(answers)
        return [_verdict(s) for s in scores]


@dataclass
class Tally:
    """Counts rejections by reason, and calls it off when they are the rule rather than the exception."""

    max_share: float
    reasons: Counter[str] = field(default_factory=Counter)
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=64))  # (scored, rejected) of each report
    _last: str = ""

    def add(self, scored: int, rejected: Counter[str], detail: str) -> None:
        """RuntimeError with the last traceback when more than `max_share` of the last 64 or more samples were rejected."""
        self.reasons += rejected
        self._last = detail or self._last
        self._recent.append((scored, rejected.total()))
        while len(self._recent) > 1 and sum(n for n, _ in list(self._recent)[1:]) >= 64:
            self._recent.popleft()
        total, bad = (sum(column) for column in zip(*self._recent, strict=True))
        if total >= 64 and bad > self.max_share * total:
            raise RuntimeError(
                f"{bad} of the last {total} samples were rejected ({', '.join(f'{r}: {n}' for r, n in self.reasons.items())}), more than"
                f" reward.max_rejected = {self.max_share}; mend the task's scoring. The last one said:\n{self._last}"
            )


def _verdict(score: Any) -> Verdict:
    if score is None:
        return Rejected("none", "no reward function gave this sample a reward")
    try:
        value = float(score)
    except Exception:  # untrusted too: a tensor of two numbers raises RuntimeError, 10**400 OverflowError
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
