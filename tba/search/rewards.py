"""Guarded scoring: a reward that raises, hangs or is no number rejects its samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from tba.search.calls import Calls, EventLoop
from tba.search.result import Rejected, SearchStats, Verdict
from tba.tasks import Task
from tba.types import Answer, Prompt

WINDOW = 64
"""Samples that must have been scored before their rejections count."""


class Guard:
    """Scores groups by a task, and gives a verdict on each answer whatever the task does.

    A call has `deadline` seconds for each of its answers. A sync task scores one group at a time,
    an async one `concurrency` groups at once, however many searches use the guard. A call that
    raises is repeated for each answer of the group, so that one bad sample does not cost its
    neighbours. A call that times out is not repeated: its group is rejected. After two timeouts
    in a row, the remaining groups of the search are rejected without being tried.
    """

    def __init__(self, task: Task, deadline: float, concurrency: int = 8):
        self.task = task
        self._deadline = deadline
        self._concurrency = concurrency
        self._events = EventLoop(concurrency)
        self._lock = Lock()

    def __call__(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[Answer]],
        task: Task | None = None,
    ) -> list[list[Verdict]]:
        """Return one verdict for each answer; `answers` has a group for each prompt.

        `task`, if given, scores in place of the guard's own.
        """
        score = (task or self.task).score
        groups = list(zip(prompts, answers, strict=True))
        calls = Calls(self._events, score, groups, self._deadline)
        scores = calls.run()
        with self._lock:
            if calls.blocked and calls.events is self._events:
                self._events = EventLoop(self._concurrency)
        return [[verdict_on(score) for score in group] for group in scores]


def verdict_on(score: Any) -> Verdict:
    """Return the score as a finite float, or the reason why it is none."""
    if isinstance(score, Rejected):
        return score
    if score is None:
        return Rejected("none", "no reward function gave this sample a reward")
    try:
        value = float(score)
    except Exception:  # untrusted: two numbers raise RuntimeError, 10**400 OverflowError
        return Rejected("not_a_number", f"a reward is {score!r}")
    return value if math.isfinite(value) else Rejected("not_finite", f"a reward is {value}")


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
