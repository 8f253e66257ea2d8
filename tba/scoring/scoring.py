"""Scoring of answers: calls have deadlines, and samples without a finite reward are rejected.

The scoring process, which also holds the environments of dialogues, is killed if a call hangs.
"""

import asyncio
import json
import math
import weakref
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import iscoroutine
from itertools import count
from threading import Lock
from typing import Any

import cloudpickle

from tba.child import Child
from tba.prompt import Answer, Prompt
from tba.scoring.calls import TaskCalls
from tba.scoring.process import EventLoop, Process
from tba.scoring.verdicts import Reason, Rejection, ToolResult, Verdict, from_json, rejection
from tba.tasks import REWARD, ScorerName, Task
from tba.tasks._calls import MAX_CONCURRENT_CALLS

TIMEOUTS = 2
"""Consecutive timeouts after which the remaining groups are not tried."""
GRACE = 1.0
"""Seconds past its deadline after which an async call is assumed to block the event loop."""

NOT_TRIED = Rejection(Reason.TIMEOUT, f"not tried: the previous {TIMEOUTS} calls timed out")


@dataclass(frozen=True)
class Environment:
    """Handle to an environment, which is kept until the handle is deleted."""

    number: int


@dataclass
class Search:
    """The calls of one search, which stop after consecutive timeouts."""

    timeouts: int = 0  # consecutive


class Scoring:
    """Scores groups by their task, and returns a verdict on each answer, whatever the task does.

    A call has `deadline` seconds for each of its answers, and at most `longest`. A sync task scores
    one group at a time, an async task up to `concurrency` groups, over all searches together. A
    call that raises is repeated for each answer of the group, so that only the bad sample is lost.
    If a call times out or ends the process, its group is rejected, and other groups in flight are
    retried. After two consecutive timeouts, the remaining groups of the search are rejected.

        Scoring()                    the thread of a search waits for the verdicts on its groups
          _group                     a thread for each group, `concurrency` at most
            _attempt                 in one event loop, where no two calls begin at once
              Process.call           sends the group -> `calls.TaskCalls`, which calls the task

    Without a process, functions are called directly and without deadlines, for use in a debugger.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        process: "ScoringProcess | None" = None,
        deadline: float = 10.0,
        concurrency: int = 8,
        longest: float = math.inf,
        steps: int = 0,
    ):
        self.tasks = tasks
        """The run's task under "", and the sources that are only evaluated, by name."""
        self._process = process
        self._deadline = deadline
        self._longest = longest
        self._steps = steps  # `run.steps`, which rewards can read from an answer
        self._here = TaskCalls(tasks)  # without a process
        self._plain = Lock()  # without a process, the threads of searches take turns
        self._numbers = count()  # of environments
        self._ended: deque[int] = deque()  # environments without a handle
        if process is not None:
            self._groups = ThreadPoolExecutor(concurrency, "scoring")
            self._loop = EventLoop("scoring")
            self._started = self._loop.begin(process.ready())
            weakref.finalize(self, self._loop.stop)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[Answer | Verdict]],
        name: ScorerName = REWARD,
    ) -> list[list[Verdict]]:
        """Return the verdicts of the reward or of a measure; verdicts in `answers` are kept."""
        score = partial(self._group, name, Search())
        unscored = [[a for a in group if isinstance(a, Answer)] for group in answers]
        if self._process is None:
            with self._plain:
                scored = list(map(score, prompts, unscored))
        else:
            scored = list(self._groups.map(score, prompts, unscored))
        verdicts = []
        for group, new in zip(answers, map(iter, scored), strict=True):
            verdicts.append([next(new) if isinstance(a, Answer) else a for a in group])
        return verdicts

    def wait_until_ready(self) -> None:
        """Wait until groups can be scored. Raises RuntimeError if the process does not start."""
        if self._process is None:
            return
        try:
            self._started.result()
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Stop the scoring process."""
        if self._process is not None:
            self._loop.close()
            self._groups.shutdown()

    def _group(
        self, name: ScorerName, search: Search, prompt: Prompt, answers: Sequence[Answer]
    ) -> list[Verdict]:
        """Score a group; if the call raises, score each of its answers alone."""
        if not answers:
            return []
        answers = [replace(answer, steps=self._steps) for answer in answers]
        verdicts = self._call(name, search, prompt, answers)
        first = verdicts[0]
        can_be_one = isinstance(first, Rejection) and first.reason in (Reason.RAISED, Reason.MEMORY)
        if not can_be_one or len(answers) == 1:
            return verdicts
        verdicts = []
        for answer in answers:
            (verdict,) = self._call(name, search, prompt, [answer])
            # a function that compares answers cannot score a single one: report the error
            no_score = isinstance(verdict, Rejection) and verdict.reason == Reason.NONE
            verdicts.append(first if no_score else verdict)
        return verdicts

    def _call(
        self, name: ScorerName, search: Search, prompt: Prompt, answers: Sequence[Answer]
    ) -> list[Verdict]:
        """Return one verdict for each answer; a rejection applies to all."""
        group = []
        for answer in answers:
            own = answer.environment
            group.append(vars(answer) | {"environment": None if own is None else own.number})
        seconds = min(self._deadline * len(group), self._longest)
        limit = f"reward.deadline = {self._deadline:g} s for each"
        if seconds == self._longest:
            limit += ", at most a quarter of runtime.task_deadline"
        late = f"scoring of {len(group)} answers did not return within {seconds:g} s ({limit})"
        return self._ask(["score", name, vars(prompt), group], len(group), seconds, late, search)

    def reset(
        self, name: str, prompts: Sequence[Prompt], limit: int
    ) -> list[tuple[Environment, str] | Rejection]:
        """Reset an environment of the task `name` for each prompt.

        Returns each with the first `limit` characters of the text that `reset` returned.
        """
        handles = [Environment(next(self._numbers)) for _ in prompts]
        for handle in handles:
            weakref.finalize(handle, self._ended.append, handle.number).atexit = False
        ended = []
        with suppress(IndexError):
            while True:
                ended.append(self._ended.popleft())
        rows = [(handle.number, vars(p)) for handle, p in zip(handles, prompts, strict=True)]
        texts = self._use("reset", name, rows, limit, ended)
        opened = zip(handles, texts, strict=True)
        return [text if isinstance(text, Rejection) else (own, text) for own, text in opened]

    def call_tools(
        self, name: str, calls: Sequence[tuple[Environment, str, Mapping[str, Any], str, int]]
    ) -> list[ToolResult | Rejection]:
        """Call one tool in each of several environments; `TaskCalls` has the form of a call.

        If the process ends, the environments are lost, and so the calls are not repeated.
        """
        sent = [(own.number, *call) for own, *call in calls]
        return self._use("call_tools", name, sent, again=False)

    def _use(
        self, call: str, name: str, each: Sequence[Any], *more: Any, again: bool = True
    ) -> Any:
        """Return one result for each of several environments."""
        deadline = min(self._deadline, self._longest)
        # the process itself gives up on late environments, and needs a little time to report that
        seconds = math.ceil(len(each) / MAX_CONCURRENT_CALLS) * deadline + GRACE / 2
        limit = f"reward.deadline = {self._deadline:g} s"
        late = f"the environments did not answer within {seconds:g} s ({limit})"
        request = [call, name, deadline, each, *more]
        return self._ask(request, len(each), seconds, late, again=again)

    def _ask(
        self, request: Sequence[Any], count: int, seconds: float, late: str,
        search: Search | None = None, again: bool = True,
    ) -> list[Any]:  # fmt: skip
        """Return the `count` results of a call, or its rejection for each: `late` if it times out.

        If another call may have ended the process, call once more if `again` is set.
        """
        if self._process is None:
            value = self._here.answer(request)
            if iscoroutine(value):  # in a thread, as this one may run an event loop
                with ThreadPoolExecutor(1) as thread:
                    value = thread.submit(asyncio.run, value).result()
            return from_json(value)
        try:
            sent = json.dumps(request)
        except Exception as error:  # columns may contain anything
            return [rejection(error)] * count
        attempt = partial(self._attempt, sent, seconds, late, search or Search())
        results = self._loop.begin(attempt(alone=False, last=not again)).result()
        if results is None:
            results = self._loop.begin(attempt(alone=True, last=True)).result()
        assert results is not None
        return [results] * count if isinstance(results, Rejection) else results

    async def _attempt(
        self, request: str, seconds: float, late: str, search: Search, alone: bool, last: bool
    ) -> list[Any] | Rejection | None:
        """Return the results of a call, or its rejection; see `Process.call` for None."""
        assert self._process is not None

        def limit() -> float | Rejection:  # an earlier call may have been late
            return NOT_TRIED if search.timeouts >= TIMEOUTS else seconds

        reply = await self._process.call(request, limit, lambda _: late, from_json, alone, last)
        # the next call of the search reads the counter: no await before it is up to date
        if reply is not None:
            is_late = isinstance(reply, Rejection) and reply.reason == Reason.TIMEOUT
            search.timeouts = search.timeouts + 1 if is_late else 0
        return reply


class ScoringProcess(Process):
    """A process that scores, and is restarted after it has ended.

    It builds the run's task, "", and every source that is only evaluated, so that judges with the
    same model share it.
    """

    def __init__(
        self,
        builds: Mapping[str, Callable[[], Task]],
        max_memory: float,
        start_deadline: float = 300.0,
    ):
        pickled = b64encode(cloudpickle.dumps(builds)).decode()
        setup = ("tba.scoring.calls:answers_of", pickled, max_memory)
        hint = "\nIf the task works in the searcher's own process, set reward.isolate=none"
        super().__init__("the scoring process", setup, start_deadline, GRACE, hint)

    def child(self, end: int) -> Child:
        return Child("tba.scoring.worker:serve", end, pass_fds=[end])
