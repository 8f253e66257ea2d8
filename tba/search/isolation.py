"""The searcher's side of a scoring process, which is killed if a call hangs.

A socket connects it to `child.py`. All methods are called in the thread of one event loop.
"""

import asyncio
import json
import math
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import cloudpickle

from tba.engines import EngineError, RewardError
from tba.prompt import Answer, Prompt
from tba.search.child import MARK, descendants, kill
from tba.search.verdicts import DIED, Rejected, Verdict, rejection, verdict_on
from tba.tasks import REWARD, Itemized, ScorerName, Task

GRACE = 1.0
"""Seconds past its deadline after which an async call has blocked the event loop."""

LONGEST_REPLY = 2**28
"""Bytes of one reply."""

# not multiprocessing, which would run the user's script again and forbid processes of its own
CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from tba.search.child import main; main(int(sys.argv[2]))"
)


class Lost(Rejected):
    """Rejection of a group whose process ended, perhaps because of another group."""


class InProcess:
    """Scores in a process of its own, which is replaced when it ends.

    It builds the task of the run, "", and those of evaluation sets, so that judges of the same
    model share it.
    """

    grace = math.inf  # the process has deadlines of its own for what is awaited

    def __init__(
        self,
        builds: Mapping[str, Callable[[], Task]],
        max_memory: float,
        start_deadline: float = 300.0,
    ):
        self._setup = pickle.dumps((max_memory, cloudpickle.dumps(builds)))
        self._start_deadline = start_deadline
        self._process: ScoringProcess | None = None
        self._failure: Rejected | None = None
        self._worked = False

    async def ready(self) -> None:
        """Wait until there is a process that can score; RewardError if it cannot start.

        EngineError, which restarts the searcher, if there has been one before.
        """
        if self._failure is None:
            self._failure = await self._started()
        if self._failure is not None:
            raise (EngineError if self._worked else RewardError)(
                f"the scoring process did not start: {self._failure.detail}\nIf the task works in"
                " the searcher's own process, set reward.isolate=thread"
            )
        self._worked = True

    async def _started(self) -> Rejected | None:
        """Start a process unless there is one, and return why it cannot score."""
        if self._process is None or self._process.ended:
            try:
                self._process = ScoringProcess(self._setup)
            except OSError as error:  # no memory, or too many processes or open files
                return rejection(error)
        started = self._process.started
        if not started.done():
            await asyncio.wait([started], timeout=self._start_deadline)
        if started.done():
            return started.result()
        limit = f"runtime.start_deadline = {self._start_deadline:g} s"
        return Rejected("timeout", f"not within {limit}; raise it if models load so long")

    def begin(
        self, prompt: Prompt, answers: Sequence[Answer], seconds: float, name: ScorerName = REWARD
    ) -> asyncio.Future[Any]:
        """Start a call; its result is a list, an awaitable of one, or a rejection.

        The process must be ready. Cancelling the call kills it.
        """
        assert self._process is not None
        return self._process.begin(prompt, answers, seconds, name)


class ScoringProcess:
    """A process that scores until it ends or a call is cancelled."""

    def __init__(self, setup: bytes):
        self._socket, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            command = [sys.executable, "-P", "-c", CODE, json.dumps(sys.path), str(end)]
            self._mark = secrets.token_hex(8)
            marked = {**os.environ, MARK: self._mark}
            # a session of its own: Ctrl-C is for the run, and a kill reaches the whole group
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    pass_fds=[end],
                    start_new_session=True,
                    env=marked,
                )
            except OSError:
                self._socket.close()
                raise
        self.ended = False
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self.started = self._expect(next(self._numbers))
        """Result: None if the tasks were built, else the reason why they were not."""
        self._serving = asyncio.create_task(self._serve(setup))
        self._serving.add_done_callback(self._end)

    def begin(
        self, prompt: Prompt, answers: Sequence[Answer], seconds: float, name: ScorerName = REWARD
    ) -> asyncio.Future[Any]:
        """Send a group; see `InProcess.begin`."""
        assert self._writer is not None
        number = next(self._numbers)
        future = self._expect(number)
        try:
            group = pickle.dumps((name, prompt, tuple(answers)))
        except Exception as error:  # columns may hold anything
            future.set_result(rejection(error))
        else:
            self._writer.write(pickle.dumps((number, seconds, group)))
        return future

    def _expect(self, number: int) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._done(number, future))
        return future

    def _done(self, number: int, future: asyncio.Future[Any]) -> None:
        if self._waiting.get(number) is future:  # else the call goes on, with another future
            del self._waiting[number]
        if future.cancelled():
            self._stop(Lost)

    async def _serve(self, setup: bytes) -> None:
        """Receive replies until the process ends."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=LONGEST_REPLY)
        self._writer.write(setup)
        # killed with unread requests or within a reply, or the function wrote to the socket
        wrong = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
        with suppress(OSError, *wrong):
            while line := await reader.readline():
                self._receive(*json.loads(line))

    def _receive(self, number: int, kind: str, value: Any) -> None:
        future = self._waiting.get(number)
        if future is None or future.done():  # given up
            return
        if kind == "awaits":
            seconds, value = value + GRACE, self._expect(number)
            asyncio.get_running_loop().call_later(seconds, self._stop_if_late, value)
        elif kind == "scores":
            value = list(map(verdict, value))
        elif kind == "rejected":
            value = verdict(list(value))
        future.set_result(value)

    def _stop_if_late(self, future: asyncio.Future[Any]) -> None:
        """Stop a process whose event loop is blocked; any of the open calls may be the cause."""
        if not future.done():
            if len(self._waiting) == 1:
                future.set_result(None)
            self._stop(Lost)

    def _end(self, _: asyncio.Task[None]) -> None:
        self._stop(Rejected if len(self._waiting) == 1 else Lost)
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()

    def _stop(self, kind: type[Rejected]) -> None:
        """Kill the process and those it has started, and reject what it has not scored."""
        self.ended = True
        if self._process.returncode is None:  # else another process may have its pid
            self._kill()
        how = f"the scoring process ended {ending(self._process.returncode)}"
        for future in self._waiting.values():
            if not future.done():
                future.set_result(kind(DIED, how))

    def _kill(self) -> None:
        """Kill the process, its group, and what it has started in other groups."""
        started = descendants(self._process.pid, self._mark)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill(started)
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


def verdict(plain: Any) -> Verdict:
    """Return a verdict that `child` has sent, or a reward function that writes to its socket."""
    if isinstance(plain, list):
        return Rejected(*map(str, plain))
    if not isinstance(plain, dict):
        return verdict_on(plain)
    items = {name: float(value) for name, value in plain["items"].items()}
    return verdict_on(Itemized(plain["reward"], items, dict(plain["notes"])))


def ending(status: int | None) -> str:
    """Return in words how a process has ended."""
    if status is None:
        return "without a status"
    if status < 0:
        return f"by signal {-status} ({signal.strsignal(-status)})"
    return f"with exit status {status}"
