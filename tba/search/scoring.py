"""Scoring of answers: each call has a deadline, and a sample without a finite reward is rejected.

The process that scores is killed if a call hangs; `child` is its main program.
"""

import asyncio
import json
import math
import pickle
import signal
import socket
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from itertools import count
from threading import Lock, Thread
from typing import Any

import cloudpickle

from tba.child import Child
from tba.engines import EngineError, RewardError
from tba.prompt import Answer, Prompt
from tba.search.verdicts import DIED, Rejected, Verdict, finished, parse_score, rejection
from tba.tasks import REWARD, Itemized, ScorerName, Task, listed, scorer_of

TIMEOUTS = 2
"""Timeouts in a row after which the remaining groups are not tried."""

GRACE = 1.0
"""Seconds past its deadline after which an async call has blocked the event loop."""

SENDING = 30
"""Seconds after which a process that reads nothing counts as hung."""

NOT_TRIED = Rejected("timeout", f"not tried: {TIMEOUTS} calls in a row timed out before")


@dataclass(frozen=True)
class NoReplyError(Exception):
    """A call got no reply: it is late, or the process that scores has ended."""

    how: str
    """The way in which the process has ended; empty if the call is late."""
    beside: bool
    """True if other calls were in flight, one of which may be the cause."""


@dataclass(frozen=True)
class Pending:
    """A reply that a process will give in some seconds; a pending one if the function is async."""

    worker: "Worker"
    reply: "Future[Reply]"
    seconds: float

    def result(self) -> "Reply":
        """Wait for the reply. If there is none in time, stop the process: NoReplyError."""
        try:
            return self.reply.result(self.seconds)
        except TimeoutError:
            beside = len(self.worker.waiting) > 1
            self.worker.stop()
            raise NoReplyError("", beside) from None


Reply = list[Verdict] | Rejected | Pending


@dataclass
class Search:
    """The calls of one search, which end after timeouts in a row."""

    name: ScorerName
    timeouts: int = 0
    """Timeouts in a row, without a reply between them."""


@dataclass
class Call:
    """A call of the scoring function for one group, in a process."""

    search: Search
    group: bytes
    size: int
    seconds: float
    alone: bool = False
    """True for the second try, during which no other call begins."""


class Scoring:
    """Scores groups by their task, and returns a verdict on each answer, whatever the task does.

    A call has `deadline` seconds for each of its answers, and at most `longest`. A sync task scores
    one group at a time, an async one `concurrency` groups at once, however many searches there are.
    A call that raises is repeated for each answer of the group, so that one bad sample does not
    cost its neighbours. A call that times out or ends the process costs its group; groups beside it
    are tried again. After two timeouts in a row, the remaining groups of the search are rejected.

        Scoring()                    the thread of a search waits for the verdicts on its groups
          _group                     a thread for each group, `concurrency` at most
            _begin                   one thread for all calls: no two begin at once
              Worker.begin           sends the group -> `child.ScoringServer`, which calls the task
              Worker._receive        a thread that reads the replies

    Without a process, a call is a plain call, without deadlines, for a debugger.
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
        """The task of the run, "", and those of evaluation sets by name."""
        self._process = process
        self._deadline = deadline
        self._longest = longest
        self._steps = steps  # `run.steps`, which rewards may ask of an answer
        self._plain = Lock()
        if process is not None:
            self._groups = ThreadPoolExecutor(concurrency, "scoring")
            self._turns = ThreadPoolExecutor(1, "scoring")  # first come, first served, unlike locks
            self._started = self._turns.submit(process.ready)
            weakref.finalize(self, process.close)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        answers: Sequence[Sequence[Answer | Verdict]],
        name: ScorerName = REWARD,
    ) -> list[list[Verdict]]:
        """Return the reward's or a measure's verdicts on answers; verdicts among these stay."""
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
        """Wait until groups can be scored; RuntimeError if the process does not start."""
        if self._process is None:
            return
        try:
            self._started.result()
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()
            self._groups.shutdown()
            self._turns.shutdown()

    def _group(self, search: Search, prompt: Prompt, answers: Sequence[Answer]) -> list[Verdict]:
        """Score a group; if the call raises, score each of its answers alone."""
        if not answers:
            return []
        answers = [replace(answer, steps=self._steps) for answer in answers]
        verdicts = self._call(search, prompt, answers)
        first = verdicts[0]
        raised = isinstance(first, Rejected) and first.reason in ("raised", "memory")
        if not raised or len(answers) == 1:
            return verdicts
        verdicts = []
        for answer in answers:
            (verdict,) = self._call(search, prompt, [answer])
            # a function that compares answers has no score for one: the error is the reason
            no_score = isinstance(verdict, Rejected) and verdict.reason == "none"
            verdicts.append(first if no_score else verdict)
        return verdicts

    def _call(self, search: Search, prompt: Prompt, answers: Sequence[Answer]) -> list[Verdict]:
        """Return one verdict for each answer; all are rejected together."""
        if self._process is None:
            verdicts = self._plainly(search.name, prompt, answers)
        else:
            verdicts = self._in_process(search, prompt, answers)
        n = len(answers)
        if isinstance(verdicts, list) and len(verdicts) != n:
            verdicts = Rejected("wrong_length", f"{len(verdicts)} rewards for {n} answers")
        return [verdicts] * n if isinstance(verdicts, Rejected) else verdicts

    def _plainly(
        self, name: ScorerName, prompt: Prompt, answers: Sequence[Answer]
    ) -> list[Verdict] | Rejected:
        """Call the function here; an async one in a thread, because this one may have a loop."""
        try:
            scores: Any = scorer_of(self.tasks, name).score(prompt, answers)
            if isawaitable(scores):
                with ThreadPoolExecutor(1) as thread:
                    scores = thread.submit(asyncio.run, finished(scores)).result()
            if isinstance(scores, Rejected):
                return scores
            return list(map(parse_score, listed(scores)))
        except Exception as error:  # untrusted
            return rejection(error)

    def _in_process(
        self, search: Search, prompt: Prompt, answers: Sequence[Answer]
    ) -> list[Verdict] | Rejected:
        """Call the function in the process, again if another call may have ended that."""
        try:
            group = pickle.dumps((search.name, prompt, tuple(answers)))
        except Exception as error:  # columns may hold anything
            return rejection(error)
        seconds = min(self._deadline * len(answers), self._longest)
        call = Call(search, group, len(answers), seconds)
        try:
            reply = self._wait(call, self._turns.submit(self._begin, call).result())
        except NoReplyError:
            call.alone = True
            reply = self._turns.submit(self._begin, call).result()
        assert not isinstance(reply, Pending)
        return reply

    def _begin(self, call: Call) -> Reply:
        """Begin a call when its turn has come, and return the first reply; `alone`, the last."""
        assert self._process is not None
        worker = self._process.ready()
        if call.search.timeouts >= TIMEOUTS:
            return NOT_TRIED
        reply = self._wait(call, worker.begin(call))
        return self._wait(call, reply) if call.alone else reply

    def _wait(self, call: Call, reply: Reply) -> Reply:
        """Return what a pending reply becomes, or the rejection of a call that gets none.

        NoReplyError if another call may be the cause, unless it is the second try.
        """
        if not isinstance(reply, Pending):
            return reply
        try:
            reply = reply.result()
        except NoReplyError as error:
            if error.beside and not call.alone:
                raise
            if not error.how:
                return self._timeout(call)
            reply = Rejected(DIED, f"the scoring process ended {error.how}")
        if not isinstance(reply, Pending):
            call.search.timeouts = 0
        return reply

    def _timeout(self, call: Call) -> Rejected:
        call.search.timeouts += 1
        limit = f"reward.deadline = {self._deadline:g} s for each"
        if call.seconds == self._longest:
            limit += ", at most a quarter of runtime.task_deadline"
        return Rejected(
            "timeout",
            f"scoring of {call.size} answers did not return within {call.seconds:g} s ({limit})",
        )


class ScoringProcess:
    """A process that scores, and is replaced when it has ended.

    It builds the task of the run, "", and those of evaluation sets, so that judges of the same
    model share it.
    """

    def __init__(
        self,
        builds: Mapping[str, Callable[[], Task]],
        max_memory: float,
        start_deadline: float = 300.0,
    ):
        self._setup = pickle.dumps((max_memory, cloudpickle.dumps(builds)))
        self._start_deadline = start_deadline
        self._worker: Worker | None = None
        self._failure: Rejected | None = None
        self._worked = False
        self._closed = False
        self._lock = Lock()

    def ready(self) -> "Worker":
        """Return a process that can score; RewardError if it cannot start.

        EngineError, which restarts the searcher, if there has been one before.
        """
        if self._failure is None:
            self._failure = self._start()
        if self._failure is not None:
            kind = EngineError if self._worked else RewardError
            raise kind(
                f"the scoring process did not start: {self._failure.detail}\nIf the task works in"
                " the searcher's own process, set reward.isolate=none"
            )
        assert self._worker is not None
        self._worked = True
        return self._worker

    def _start(self) -> Rejected | None:
        """Start a process unless there is one, and return why it cannot score."""
        with self._lock:
            if self._closed:
                return Rejected(DIED, "it was closed")
            if self._worker is None or self._worker.ended:
                try:
                    self._worker = Worker(self._setup)
                except OSError as error:  # no memory, or too many processes or open files
                    return rejection(error)
        return self._worker.failure(self._start_deadline)

    def close(self) -> None:
        """End the process, and start no other."""
        with self._lock:
            self._closed = True
        if self._worker is not None:
            self._worker.stop()
            self._worker.reader.join(10)


class Worker:
    """One process: it scores until it ends or does not reply in time.

    A socket connects it to `child`.
    """

    def __init__(self, setup: bytes):
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                end = theirs.fileno()
                self._child = Child("tba.search.child:main", end, pass_fds=[end])
            except OSError:
                self._socket.close()
                raise
        self.ended = ""  # how it has ended, in words
        self.waiting: dict[int, Future[Any]] = {}
        """Replies that have not come, by the number of the call."""
        self._numbers = count()
        self._lock = Lock()  # guards what is waiting
        self._stopping = Lock()
        self._started = self._expect(next(self._numbers))
        self.reader = Thread(target=self._serve, args=[setup], daemon=True, name="scoring")
        self.reader.start()

    def failure(self, seconds: float) -> Rejected | None:
        """Wait until the tasks are built, and return why they were not."""
        try:
            failure: Rejected | None = self._started.result(seconds)
            return failure
        except TimeoutError:
            limit = f"runtime.start_deadline = {seconds:g} s"
            return Rejected("timeout", f"not within {limit}; raise it if models load so long")
        except NoReplyError as error:
            return Rejected(DIED, f"the scoring process ended {error.how}")

    def begin(self, call: Call) -> Pending:
        """Send a group."""
        number = next(self._numbers)
        reply = self._expect(number)
        try:
            self._socket.sendall(pickle.dumps((number, call.seconds, call.group)))
        except OSError:
            self.stop()
        return Pending(self, reply, call.seconds)

    def _expect(self, number: int) -> "Future[Any]":
        reply: Future[Any] = Future()
        with self._lock:
            if self.ended:
                reply.set_exception(NoReplyError(self.ended, beside=False))
            else:
                self.waiting[number] = reply
        return reply

    def _serve(self, setup: bytes) -> None:
        """Receive replies until the process ends."""
        # killed with unread requests or within a reply, or the function wrote to the socket
        wrong = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
        with suppress(OSError, *wrong), self._socket.makefile("rb") as replies:
            self._socket.sendall(setup)
            limit = struct.pack("ll", SENDING, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            for line in replies:
                self._receive(*json.loads(line))
        self.stop()
        self._socket.close()

    def _receive(self, number: int, kind: str, value: Any) -> None:
        if kind == "verdicts":
            value = [_from_json(verdict) for verdict in value]
        elif kind == "rejected":
            value = Rejected(*map(str, value))
        with self._lock:
            reply = self.waiting.pop(number, None)
        if reply is None:  # a function has forked, or wrote to the socket
            return
        if kind == "late":
            reply.set_exception(NoReplyError("", beside=False))
        elif kind == "awaits":
            reply.set_result(Pending(self, self._expect(number), value + GRACE))
        else:
            reply.set_result(value)

    def stop(self) -> None:
        """Kill the process and those it has started; calls in flight get no reply."""
        with self._stopping:
            if self.ended:
                return
            self._child.kill()
            status = self._child.status
            how = f"with exit status {status}"
            if status is not None and status < 0:
                how = f"by signal {-status} ({signal.strsignal(-status)})"
            with self._lock:
                self.ended = how
                replies = list(self.waiting.values())
                self.waiting.clear()
        for reply in replies:
            reply.set_exception(NoReplyError(self.ended, beside=len(replies) > 1))


def _from_json(plain: Any) -> Verdict:
    """Return a verdict that `child` has sent."""
    if isinstance(plain, list):
        return Rejected(*map(str, plain))
    if isinstance(plain, dict):
        items = {name: float(value) for name, value in plain["items"].items()}
        return Itemized(float(plain["reward"]), items, dict(plain["notes"]))
    return float(plain)
