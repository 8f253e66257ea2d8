"""Scoring of answers: calls have deadlines, and samples without a finite reward are rejected.

The scoring process is killed if a call hangs; `child` is its main program.
"""

import asyncio
import math
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from threading import Lock
from typing import Any

import cloudpickle

from tba.child import Child
from tba.errors import EngineError, RewardError
from tba.prompt import Answer, Prompt
from tba.scoring.process import EventLoop, NoReply, Process
from tba.scoring.verdicts import (
    Reason,
    Rejected,
    Verdict,
    awaited,
    from_json,
    parse_score,
    rejection,
)
from tba.tasks import REWARD, ScorerName, Task, listed, scorer_of

TIMEOUTS = 2
"""Consecutive timeouts after which the remaining groups are not tried."""

GRACE = 1.0
"""Seconds past its deadline after which an async call is assumed to block the event loop."""

NOT_TRIED = Rejected(Reason.TIMEOUT, f"not tried: {TIMEOUTS} calls in a row timed out before")


Verdicts = list[Verdict] | Rejected
"""A verdict on each answer of a group, or one rejection of all."""


@dataclass(frozen=True)
class Pending:
    """First reply to a call of an async function: its verdicts follow within `seconds`."""

    seconds: float


@dataclass
class Search:
    """The calls of one search, which stop after consecutive timeouts."""

    name: ScorerName
    timeouts: int = 0
    """Consecutive timeouts, without a reply between them."""


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
              Process.call           sends the group -> `child.ScoringServer`, which calls the task
              Process.reply          waits for verdicts, or for the news that they are awaited

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
        """The run's task under "", and the tasks of evaluation sets by name."""
        self._process = process
        self._deadline = deadline
        self._longest = longest
        self._steps = steps  # `run.steps`, which rewards can read from an answer
        self._plain = Lock()  # without a process, searches of several threads call one by one
        if process is not None:
            self._groups = ThreadPoolExecutor(concurrency, "scoring")
            self._turn = asyncio.Lock()  # first come, first served
            self._loop = EventLoop("scoring")
            self._started = self._loop.begin(process.ready())
            weakref.finalize(self, self._loop.stop)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[Answer | Verdict]],
        name: ScorerName = REWARD,
    ) -> list[list[Verdict]]:
        """Return the reward's or a measure's verdicts on answers; keep verdicts among them."""
        score = partial(self._group, Search(name))
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

    def _group(self, search: Search, prompt: Prompt, answers: Sequence[Answer]) -> list[Verdict]:
        """Score a group; if the call raises, score each of its answers alone."""
        if not answers:
            return []
        answers = [replace(answer, steps=self._steps) for answer in answers]
        verdicts = self._call(search, prompt, answers)
        first = verdicts[0]
        can_be_one = isinstance(first, Rejected) and first.reason in (Reason.RAISED, Reason.MEMORY)
        if not can_be_one or len(answers) == 1:
            return verdicts
        verdicts = []
        for answer in answers:
            (verdict,) = self._call(search, prompt, [answer])
            # a function that compares answers cannot score a single one: report the error
            no_score = isinstance(verdict, Rejected) and verdict.reason == Reason.NONE
            verdicts.append(first if no_score else verdict)
        return verdicts

    def _call(self, search: Search, prompt: Prompt, answers: Sequence[Answer]) -> list[Verdict]:
        """Return one verdict for each answer; a rejection applies to all."""
        n = len(answers)
        verdicts: Verdicts | None = None
        if self._process is None:
            verdicts = self._call_here(search.name, prompt, answers)
        else:
            try:
                group = pickle.dumps((search.name, prompt, tuple(answers)))
            except Exception as error:  # columns may contain anything
                verdicts = rejection(error)
            for alone in (False, True):  # again if another call may have ended the process
                if verdicts is None:
                    verdicts = self._loop.begin(self._attempt(search, group, n, alone)).result()
            assert verdicts is not None
        if isinstance(verdicts, list) and len(verdicts) != n:
            verdicts = Rejected(Reason.WRONG_LENGTH, f"{len(verdicts)} rewards for {n} answers")
        return [verdicts] * n if isinstance(verdicts, Rejected) else verdicts

    def _call_here(self, name: ScorerName, prompt: Prompt, answers: Sequence[Answer]) -> Verdicts:
        """Call the function in this process."""
        try:
            scores: Any = scorer_of(self.tasks, name).score(prompt, answers)
            if isawaitable(scores):  # in a thread, as this one may run an event loop
                with ThreadPoolExecutor(1) as thread:
                    scores = thread.submit(asyncio.run, awaited(scores)).result()
            if isinstance(scores, Rejected):
                return scores
            return list(map(parse_score, listed(scores)))
        except Exception as error:  # untrusted
            return rejection(error)

    async def _attempt(self, search: Search, group: bytes, n: int, alone: bool) -> Verdicts | None:
        """Return verdicts on the `n` answers of a pickled group.

        Returns None if the call failed and another one may be the cause.
        """
        process = self._process
        assert process is not None
        seconds = min(self._deadline * n, self._longest)
        # calls begin one after the other; while a call is `alone`, no other begins
        async with self._turn:
            await process.ready()
            if search.timeouts >= TIMEOUTS:  # read here: a call before this one may have counted
                return NOT_TRIED
            number = process.call(lambda n: pickle.dumps((n, seconds, group)))
            reply = await _reply(process, number, seconds)
            if alone and isinstance(reply, Pending):
                reply = await _reply(process, number, reply.seconds + GRACE)
        if isinstance(reply, Pending):  # not in turn: async calls wait together
            reply = await _reply(process, number, reply.seconds + GRACE)
        process.forget(number)
        if not isinstance(reply, NoReply):
            search.timeouts = 0
            return reply
        if reply.beside and not alone:
            return None
        if reply.how:
            search.timeouts = 0
            return Rejected(Reason.DIED, f"the scoring process ended {reply.how}")
        search.timeouts += 1
        limit = f"reward.deadline = {self._deadline:g} s for each"
        if seconds == self._longest:
            limit += ", at most a quarter of runtime.task_deadline"
        told = f"scoring of {n} answers did not return within {seconds:g} s ({limit})"
        return Rejected(Reason.TIMEOUT, told)


async def _reply(process: Process, number: int, seconds: float) -> Any:
    """Return a reply to a call. If it does not arrive in time, kill the process."""
    try:
        return await process.reply(number, seconds)
    except TimeoutError:
        late = NoReply("", beside=len(process.calls) > 1)
        await process.end()
        return late


class ScoringProcess(Process):
    """A process that scores, and is restarted after it has ended.

    It builds the run's task, "", and the tasks of evaluation sets, so that judges of the same model
    share the model.
    """

    def __init__(
        self,
        builds: Mapping[str, Callable[[], Task]],
        max_memory: float,
        start_deadline: float = 300.0,
    ):
        setup = pickle.dumps((max_memory, cloudpickle.dumps(builds)))
        hint = "\nIf the task works in the searcher's own process, set reward.isolate=none"
        super().__init__("the scoring process", setup, start_deadline, hint)

    async def ready(self) -> None:
        """Start the process unless it runs. Raises RewardError if it cannot start.

        Raises EngineError, which restarts the searcher, if the process has started before.
        """
        try:
            await super().ready()
        except ChildProcessError as error:
            kind = EngineError if self.worked else RewardError
            raise kind(str(error)) from error

    def child(self, end: int) -> Child:
        return Child("tba.scoring.child:serve", end, pass_fds=[end])

    def parse(self, kind: str, value: Any) -> Verdicts | Pending | NoReply | None:
        if kind == "verdicts":
            return list(map(from_json, value))
        if kind == "rejected":
            reason, detail = value
            return Rejected(Reason(reason), str(detail))
        if kind == "awaits":
            return Pending(float(value))
        return NoReply("", beside=False) if kind == "late" else None
