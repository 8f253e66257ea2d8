"""Guarded scoring: each call has a deadline, and samples without a finite reward are rejected."""

import asyncio
import math
import threading
import time
import weakref
from asyncio import run_coroutine_threadsafe
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from inspect import isawaitable
from threading import Lock
from typing import Any

from tba.prompt import Answer, Prompt
from tba.search.isolation import InProcess, Lost
from tba.search.verdicts import (
    Rejected,
    Verdict,
    finished,
    is_none,
    rejection,
    run_until_stopped,
    verdict_on,
    within,
)
from tba.tasks import REWARD, ScorerName, Task, listed, scorer_of

TIMEOUTS = 2
"""Timeouts in a row after which the remaining groups are not tried."""

GRACE = 1.0
"""Seconds past a call's deadline after which the event loop itself counts as blocked."""


BLOCKED = Rejected(
    "timeout",
    "an async scoring function blocked the event loop for longer than its deadline; `await` an"
    " async client in it, or write a sync function",
)

BESIDE = Lost("timeout", "another call may have blocked the scoring process")

NOT_TRIED = Rejected("timeout", f"not tried: {TIMEOUTS} calls in a row timed out before")

Group = tuple[Prompt, Sequence[Answer]]


@dataclass(frozen=True)
class InThread:
    """Scores in daemon threads of this process. Python cannot end a thread that hangs."""

    tasks: Mapping[str, Task]
    grace: float = 0.0

    async def ready(self) -> None:
        """Return at once."""

    def begin(
        self, prompt: Prompt, answers: Sequence[Answer], seconds: float, name: ScorerName = REWARD
    ) -> asyncio.Future[Any]:
        """Start a call; its result is a list, an awaitable of one, or a rejection."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # from now on, giving up on it does not cancel it

        def run() -> None:
            try:
                scores = scorer_of(self.tasks, name).score(prompt, answers)
                future.set_result(finished(scores) if isawaitable(scores) else listed(scores))
            except BaseException as error:  # a daemon thread must not end silently
                future.set_result(rejection(error))

        threading.Thread(target=run, daemon=True, name="reward").start()
        return asyncio.wrap_future(future)


class EventLoop:
    """An event loop in a daemon thread, which ends when nothing refers to this object any more.

    The scorer starts and ends with the loop.
    """

    def __init__(self, scorer: InThread | InProcess, concurrency: int):
        self.loop = asyncio.new_event_loop()
        self.scorer = scorer
        self.slots = asyncio.Semaphore(concurrency)
        """One for each group that is being scored."""
        self.turn = asyncio.Lock()
        """Held while a sync function runs: it has one group at a time."""
        self.awaited = 0
        """Calls of async functions that have begun and not ended."""
        self.thread = threading.Thread(
            target=_run, args=[self.loop, scorer], daemon=True, name="scoring"
        )
        self.thread.start()
        self.end = weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)
        self.ready = run_coroutine_threadsafe(scorer.ready(), self.loop)
        """Ends when what scores is ready, with an error if it cannot be, or past its deadline."""


@dataclass
class Calls:
    """The scoring of one search's groups on a searcher's event loop."""

    events: EventLoop
    groups: Sequence[Group]
    deadline: float
    longest: float
    name: ScorerName
    blocked: bool = False
    """Set when a function has blocked the event loop: other searches need a new one."""
    _timeouts: int = 0
    """Timeouts in a row: of calls during which no other call ended in time."""
    _last_end: float = -math.inf

    def run(self) -> list[list[Any]]:
        """Return for each answer its score as the function returned it, or a rejection."""
        longest = self._seconds(max((len(answers) for _, answers in self.groups), default=0))
        loop = self.events.loop
        scoring = [run_coroutine_threadsafe(self._group(*group), loop) for group in self.groups]
        while wait(scoring, GRACE).not_done:
            sign_of_life = run_coroutine_threadsafe(asyncio.sleep(0), loop)
            if not wait([sign_of_life], longest + GRACE).done:
                self.blocked = True
                break
        scores = []
        for group, (_, answers) in zip(scoring, self.groups, strict=True):
            scores.append(group.result() if group.done() else [BLOCKED] * len(answers))
        return scores

    async def _group(self, prompt: Prompt, answers: Sequence[Answer]) -> list[Any]:
        """Score a group; if the call raises, score each of its answers alone."""
        if not answers:
            return []
        async with self.events.slots:
            scores = await self._call(prompt, answers)
            if isinstance(scores[0], Lost):
                scores = await self._call(prompt, answers, alone=True)
            first = scores[0]
            raised = isinstance(first, Rejected) and first.reason in ("raised", "memory")
            if raised and len(answers) > 1:
                scores = []
                for answer in answers:
                    (score,) = await self._call(prompt, [answer])
                    # a function that compares answers has no score for one: the error is the reason
                    scores.append(first if is_none(score) else score)
        return scores

    async def _call(
        self, prompt: Prompt, answers: Sequence[Answer], alone: bool = False
    ) -> list[Any]:
        """Return one score for each answer; all are rejected together.

        If `alone`, no other call begins before this one has ended, also if it is async.
        """
        n, seconds = len(answers), self._seconds(len(answers))
        scorer = self.events.scorer
        async with self.events.turn:
            if self._timeouts >= TIMEOUTS or self.blocked:
                return [NOT_TRIED] * n
            await scorer.ready()
            began = time.monotonic()
            until = began + seconds + scorer.grace
            scores = await within(seconds, scorer.begin(prompt, answers, seconds, self.name))
            beside = self.events.awaited > 0 and isinstance(scorer, InProcess)
            if scores is None and beside and not alone:
                return [BESIDE] * n
            if alone:
                scores = await _awaited(scores, until)
        self.events.awaited += 1
        scores = await _awaited(scores, until)
        self.events.awaited -= 1
        if scores is None:
            if self._last_end < began:
                self._timeouts += 1
            most = "" if seconds < self.longest else ", at most a quarter of runtime.task_deadline"
            scores = Rejected(
                "timeout",
                f"scoring of {n} answers did not return within {seconds:g} s"
                f" (reward.deadline = {self.deadline:g} s for each{most})",
            )
        else:
            self._timeouts, self._last_end = 0, time.monotonic()
            if isinstance(scores, list) and len(scores) != n:
                scores = Rejected("wrong_length", f"{len(scores)} rewards for {n} answers")
        return [scores] * n if isinstance(scores, Rejected) else scores

    def _seconds(self, answers: int) -> float:
        """Return the deadline of a call with so many answers."""
        return min(self.deadline * answers, self.longest)


def _run(loop: asyncio.AbstractEventLoop, scorer: InThread | InProcess) -> None:
    """Run a loop; the scorer lives until its end, because tasks are only weakly held."""
    with asyncio.Runner(loop_factory=lambda: loop):  # cancels what is left, and closes the loop
        run_until_stopped(loop)


async def _awaited(scores: Any, until: float) -> Any:
    """Return the scores, awaited if needed; None after `until`, a time of the monotonic clock."""
    return await within(until - time.monotonic(), scores) if isawaitable(scores) else scores


@dataclass
class Guard:
    """Scores groups by their task, and returns a verdict on each answer, whatever the task does.

    A call has `deadline` seconds for each of its answers, and at most `longest`. A sync task scores
    one group at a time, an async one `concurrency` groups at once, however many searches use the
    guard. A call that raises is repeated for each answer of the group, so that one bad sample does
    not cost its neighbours. A call that times out is not repeated: its group is rejected. After two
    timeouts in a row, the remaining groups of the search are rejected without being tried. With
    `process`, calls run there, and one that ends the process costs its group.
    """

    tasks: Mapping[str, Task]
    """The task of the run, "", and those of evaluation sets by name."""
    deadline: float
    concurrency: int = 8
    process: InProcess | None = None
    longest: float = math.inf

    def __post_init__(self) -> None:
        self._events, self._lock = self._event_loop(), Lock()

    def _event_loop(self) -> EventLoop:
        return EventLoop(self.process or InThread(self.tasks), self.concurrency)

    def measures(self, name: str = "") -> list[str]:
        """Return the names of the measures of the run's task, or of an evaluation set's."""
        return list(self.tasks[name].measures())

    def __call__(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[Answer | Verdict]],
        name: ScorerName = REWARD,
    ) -> list[list[Verdict]]:
        """Return verdicts on the answers to each prompt, by the reward or a measure of a task.

        Verdicts that were given before stay.
        """
        scored = [[a for a in group if isinstance(a, Answer)] for group in answers]
        groups = list(zip(prompts, scored, strict=True))
        calls = Calls(self._events, groups, self.deadline, self.longest, name)
        scores = map(iter, calls.run())
        with self._lock:
            if calls.blocked and calls.events is self._events:
                self._events = self._event_loop()
        verdicts = []
        for group, own in zip(answers, scores, strict=True):
            given = [next(own) if isinstance(a, Answer) else a for a in group]
            verdicts.append([verdict_on(score) for score in given])
        return verdicts

    def wait_until_ready(self) -> None:
        """Wait until groups can be scored; RuntimeError if the process does not start."""
        try:
            self._events.ready.result()
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """End the process, if there is one."""
        self._events.end()
        self._events.thread.join(10)
