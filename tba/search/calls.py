"""Calls of untrusted scoring functions, sync or async, each with a deadline."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from tba.tasks import WrongLength
from tba.types import Answer, Prompt

TIMEOUTS = 2
"""Timeouts in a row after which the remaining groups are not tried."""

GRACE = 1.0
"""Seconds past a call's deadline after which the event loop itself counts as blocked."""


@dataclass(frozen=True)
class Failure:
    """The reason why a call gave an answer no score: `raised`, `timeout` or `wrong_length`."""

    reason: str
    detail: str


BLOCKED = Failure(
    "timeout",
    "an async scoring function blocked the event loop for longer than its deadline; `await` an"
    " async client in it, or write a sync function",
)

Group = tuple[Prompt, Sequence[Answer]]


class Calls:
    """The scoring of one search's groups, on an event loop in a thread of its own.

    A sync function runs in one more thread, for one group at a time. Threads that hang are
    daemons and are left behind, because Python cannot end them.
    """

    def __init__(
        self, score: Callable[..., Any], groups: Sequence[Group], deadline: float, concurrency: int
    ):
        self._score = score
        self._groups = groups
        self._deadline = deadline
        self._slots = asyncio.Semaphore(concurrency)
        self._turn = asyncio.Lock()
        self._results: dict[int, list[Any]] = {}
        self._done = threading.Event()
        self._due: dict[int, float] = {}
        """Group being scored -> time at which its current call must have ended."""
        self._timeouts = 0
        """Timeouts in a row: of calls during which no other call ended in time."""
        self._last_end = -math.inf

    def run(self) -> list[list[Any]]:
        """Return for each answer its score as the function returned it, or a Failure."""
        threading.Thread(target=self._in_thread, daemon=True, name="scoring").start()
        while not self._done.wait(GRACE):
            if any(time.monotonic() > due + GRACE for due in list(self._due.values())):
                break
        results = []
        for i, (_, answers) in enumerate(self._groups):
            results.append(self._results.get(i, [BLOCKED] * len(answers)))
        return results

    def _in_thread(self) -> None:
        try:
            asyncio.run(self._run())
        finally:
            self._done.set()

    async def _run(self) -> None:
        await asyncio.gather(*(self._group(i) for i in range(len(self._groups))))
        self._done.set()  # before asyncio waits for calls that ignore their cancellation

    async def _group(self, index: int) -> None:
        """Score a group; if the call raises, score each of its answers alone."""
        prompt, answers = self._groups[index]
        async with self._slots:
            scores = await self._call(index, prompt, answers)
            raised = isinstance(scores, Failure) and scores.reason == "raised"
            if raised and len(answers) > 1:
                alone: list[Any] = []
                for answer in answers:
                    one = await self._call(index, prompt, [answer])
                    alone += [one] if isinstance(one, Failure) else one
                scores = alone
        if isinstance(scores, Failure):
            scores = [scores] * len(answers)
        self._results[index] = scores

    async def _call(self, index: int, prompt: Prompt, answers: Sequence[Answer]) -> Any:
        """Return a list of as many scores as there are answers, or a Failure."""
        if not answers:
            return []
        async with self._turn:
            if self._timeouts >= TIMEOUTS:
                why = f"not tried: {TIMEOUTS} calls in a row timed out before"
                return Failure("timeout", why)
            began = time.monotonic()
            seconds = self._deadline * len(answers)
            self._due[index] = began + seconds
            scores = await _within(seconds, _threaded(lambda: self._score(prompt, answers)))
        if isawaitable(scores):
            left = began + seconds - time.monotonic()
            scores = await _within(left, _finished(scores))
        del self._due[index]
        if scores is None:
            return self._timed_out(began, len(answers))
        self._timeouts, self._last_end = 0, time.monotonic()
        if isinstance(scores, list) and len(scores) != len(answers):
            detail = f"{len(scores)} rewards for {len(answers)} answers"
            return Failure("wrong_length", detail)
        return scores

    def _timed_out(self, began: float, answers: int) -> Failure:
        if self._last_end < began:
            self._timeouts += 1
        return Failure(
            "timeout",
            f"scoring of {answers} answers did not return within {self._deadline * answers:g} s"
            f" (reward.deadline = {self._deadline:g} s for each)",
        )


async def _within(seconds: float, call: Awaitable[Any]) -> Any:
    """Return the call's result, or None after so many seconds."""
    task = asyncio.ensure_future(call)
    # not wait_for, which would wait on for a call that ignores its cancellation
    ended, _ = await asyncio.wait([task], timeout=max(0.0, seconds))
    if not ended:
        task.cancel()
        return None
    return task.result()


def _threaded(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """Start the call in a daemon thread; its result is a list, an awaitable or a Failure."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def finish(result: Any) -> None:
        if not future.done():
            future.set_result(result)

    def run() -> None:
        try:
            returned = call()
            result: Any = returned if isawaitable(returned) else list(returned)
        except BaseException as error:  # a daemon thread must not end silently
            result = _failure(error)
        with suppress(RuntimeError):  # the loop is closed when the deadline has long passed
            loop.call_soon_threadsafe(finish, result)

    threading.Thread(target=run, daemon=True, name="reward").start()
    return future


async def _finished(scores: Awaitable[Any]) -> Any:
    try:
        return list(await scores)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # untrusted code
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, WrongLength):
        return Failure("wrong_length", str(error))
    return Failure("raised", "".join(traceback.format_exception(error)))
