"""Child processes that answer calls: one runs a user's program, another scores answers.

    caller                    event loop                         child
    Process.ready                                             -> worker.serve
    Process.call                                              -> a call, as a line of JSON
    Process.call           <- Process._read                   <- a reply, as a line of JSON

`worker` describes the lines. A child that sends malformed output is killed.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from tba.child import Child
from tba.config.mistakes import masked
from tba.config.secrets import is_secret
from tba.errors import EngineError, RewardError
from tba.scoring.verdicts import MAX_MESSAGE, Reason, Rejection, Verdict, parse_score
from tba.scoring.worker import STARTED
from tba.tasks import ItemizedReward, Program

T = TypeVar("T")

MAIN = Path(__file__).with_name("worker.py")
"""Main program of a child."""
BLOCKED = 5.0
"""Seconds past its deadline after which a session is assumed to block its event loop."""
PAUSES = (0.0, 0.5, 2.0, 5.0)
"""Seconds to wait before each attempt to restart a child that worked and then ended."""
LONGEST_LINE = 2**28
"""Maximum size of a reply in bytes, such as the results of tools."""
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Read errors: the child was killed during a reply, or a user's function wrote to its socket."""


class Process(ABC):
    """A child that answers calls. It is started on demand, and restarted after it has ended.

    All methods run in one event loop, which kills the child when it is closed.
    """

    def __init__(
        self, name: str, setup: tuple[str | None, str, float], start_deadline: float, grace: float,
        hint: str = "",
    ):  # fmt: skip
        """Error messages contain `name`; the message of a failed start also contains `hint`.

        `setup` is sent first: the function that answers calls (`package.module:function`, or None
        for a program), its argument, and the GB of memory that calls may use. A call that is
        `grace` seconds late is assumed to block the child's event loop.
        """
        self._name = name
        self._setup = json.dumps(setup).encode() + b"\n"
        self._start_deadline = start_deadline
        self._grace = grace
        self._hint = hint
        self._starting = asyncio.Lock()  # concurrent calls start one child
        self._turn = asyncio.Lock()  # first come, first served
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None] | None = None
        self._failure = ""
        self._worked = False  # whether a child has ever started
        self._numbers = count(STARTED + 1)
        self._replies: dict[int, asyncio.Queue[Any]] = {}
        """Kinds and values of replies that have not been read yet, by the number of the call."""

    @abstractmethod
    def child(self, end: int) -> Child:
        """Start the child, which inherits the socket with descriptor `end`."""

    async def ready(self) -> None:
        """Start the child unless it runs. If that fails, this and later calls raise RewardError.

        Raises EngineError, which restarts the searcher, if a child has started before.
        """
        async with self._starting:
            until = time.monotonic() + self._start_deadline
            if not self._failure and (self._reading is None or self._writer.is_closing()):
                for pause in PAUSES if self._worked else PAUSES[:1]:
                    await asyncio.sleep(pause)
                    self._failure = await self._start()
                    if not self._failure or time.monotonic() > until:
                        break
            if self._failure:
                told = f"{self._name} did not start: {self._failure}{self._hint}"
                raise (EngineError if self._worked else RewardError)(masked(told))
            self._worked = True

    async def call(
        self, request: str, limit: Callable[[], float | Rejection], late: Callable[[float], str],
        parse: Callable[[Any], T], alone: bool, last: bool,
    ) -> "T | Rejection | None":  # fmt: skip
        """Send a request, which is JSON, and return the parsed reply, or a rejection.

        Calls begin one at a time; one that is `alone` begins when no other is in flight. `limit`
        is called when a call begins: it returns the deadline in seconds, or a rejection if the
        call is not to be tried. `late` returns the error if the deadline passes. Returns None if
        the process ended and another call may be the cause, unless this is the `last` attempt.
        """
        async with self._turn:
            while alone and self._replies:
                await asyncio.sleep(0.01)
            await self.ready()
            seconds = limit()
            if isinstance(seconds, Rejection):
                return seconds
            number = next(self._numbers)
            self._replies[number] = asyncio.Queue()
            self._writer.write(f"[{number}, {seconds}, {request}]\n".encode())
            kind, value = await self._reply(number, seconds)
            if alone and kind == "awaits":
                kind, value = await self._reply(number, value + self._grace)
        if kind == "awaits":  # outside the lock: async calls run concurrently
            kind, value = await self._reply(number, value + self._grace)
        del self._replies[number]
        if kind == "returned":
            try:
                return parse(value)
            except UNREADABLE:
                await self.end()
                value = ("after an unreadable reply", False)
        if kind == "raised":
            return Rejection(Reason.RAISED, masked(str(value))[-MAX_MESSAGE:])
        how, beside = value or ("", False)  # the child may have cancelled a call that is late
        if beside and not last:
            return None
        if how:
            return Rejection(Reason.DIED, f"{self._name} ended {how}")
        return Rejection(Reason.TIMEOUT, late(seconds))

    async def _reply(self, number: int, seconds: float) -> tuple[str, Any]:
        """Return the next reply to a call. If it does not arrive in time, kill the child."""
        replies = self._replies[number]
        try:
            kind, value = await asyncio.wait_for(replies.get(), seconds)
        except TimeoutError:
            # another late call may have ended the child, and then ended itself; a new child may run
            if replies.empty():
                await self.end()
            kind, value = replies.get_nowait()  # at the end, `_read` has replied to each call
            if kind == "ended":
                value = "", value[1]
        return kind, value

    async def end(self) -> None:
        """Kill the child and its descendants; calls in flight get no reply."""
        if self._reading is not None:
            self._writer.transport.abort()  # drops unsent data, which the child may never read
            await asyncio.wait({self._reading})

    async def _start(self) -> str:
        """Start the child; return why that failed, or ""."""
        await self.end()
        own, theirs = socket.socketpair()
        with theirs:
            try:
                reader, self._writer = await asyncio.open_unix_connection(
                    sock=own, limit=LONGEST_LINE
                )
            except asyncio.CancelledError:
                own.close()
                raise
            try:
                child = self.child(theirs.fileno())
            except OSError as error:  # out of memory, or too many processes or open files
                self._writer.transport.abort()
                return str(error)
        replies = self._replies[STARTED] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(child, reader))
        self._writer.write(self._setup)
        try:
            kind, value = await asyncio.wait_for(replies.get(), self._start_deadline)
            while kind == "started" and not replies.empty():  # it has ended since
                kind, value = replies.get_nowait()
        except TimeoutError:
            limit = f"runtime.start_deadline = {self._start_deadline:g} s"
            kind, value = "failed", f"not ready within {limit}; raise it if models load slowly"
        finally:
            del self._replies[STARTED]
        if kind == "ended":
            return f"its process ended {value[0]}"
        if kind == "failed":
            await self.end()
            return masked(str(value))[-MAX_MESSAGE:]
        return ""

    async def _read(self, child: Child, reader: asyncio.StreamReader) -> None:
        """Receive replies until the child ends."""
        try:
            while line := await reader.readline():
                number, kind, value = json.loads(line)
                if kind not in ("started", "failed", "awaits", "returned", "raised", "late"):
                    raise ValueError(f"a reply of the kind {kind!r:.200}")
                if kind == "awaits":
                    value = float(value)
                if number in self._replies:  # else a user's function forked or wrote to the socket
                    self._replies[number].put_nowait((kind, value))
        except UNREADABLE:
            pass
        finally:
            self._writer.transport.abort()
            child.kill()
            status = child.status
            how = f"with exit status {status}"
            if status is not None and status < 0:
                how = f"by signal {-status} ({signal.strsignal(-status)})"
            beside = len(self._replies) > 1
            for replies in self._replies.values():
                replies.put_nowait(("ended", (how, beside)))


class EventLoop:
    """An event loop with its own thread. Its end cancels its tasks and kills its children."""

    def __init__(self, name: str):
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._stopped = asyncio.Event()
        self._thread = Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine from another thread, and return a future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Ask the loop to end. May be called twice."""
        with suppress(RuntimeError):  # already closed
            self._loop.call_soon_threadsafe(self._stopped.set)

    def close(self) -> None:
        """End the loop, and wait until it has ended."""
        self.stop()
        self._thread.join(10)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._stopped.wait())


class AgentProcess(Process):
    """The program's process: started when a session needs it, and killed if it hangs."""

    def __init__(self, program: Program, max_memory: float, start_deadline: float):
        self._program = program
        setup = (None, program.rollout, max_memory)
        name = f"the process of task.rollout = {program.rollout!r}"
        super().__init__(name, setup, start_deadline, BLOCKED)

    def child(self, end: int) -> Child:
        program = self._program
        return Child(
            "runpy:run_path", str(MAIN), {"ARGUMENTS": [end]}, "__main__",
            environment=program.environment,
            pass_fds=[end],
            inherited=environment(program.python),
            python=program.python,
        )  # fmt: skip

    async def run(
        self, url: str, row: Mapping[str, Any], until: float, alone: bool
    ) -> Verdict | None:
        """Run the program for a session; return its reward or a rejection.

        Returns None if the process has ended and another session may be the cause, because this
        one was not `alone`.
        """
        deadline = self._program.deadline

        def limit() -> float | Rejection:
            left = until - time.monotonic()
            not_tried = Rejection(Reason.TIMEOUT, "not tried: its search had run out of time")
            return min(deadline, left) if left > 0 else not_tried

        def late(seconds: float) -> str:
            limit = f"task.deadline = {deadline:g} s"
            if seconds < deadline:
                limit = "what was left of runtime.task_deadline for its search"
            return f"the session did not end within {seconds:.3g} s ({limit})"

        return await self.call(
            json.dumps([url, row]), limit, late, _returned, alone=alone, last=alone
        )


def _returned(value: Any) -> Verdict:
    """Return the verdict on what a program returned."""
    match value:
        case None:
            return Rejection(Reason.NONE, "rollout returned None")
        case dict() if "reward" not in value:
            return Rejection(Reason.NONE, "rollout returned a dict without `reward`")
        case dict():
            items = {f"rewards/{name}": x for name, x in value.items() if name != "reward"}
            return parse_score(ItemizedReward(value["reward"], items, {}))
    return parse_score(float(value))


def environment(python: str) -> dict[str, str]:
    """Return a program's environment: no secrets, and no PYTHON* for another interpreter."""
    inherited = {name: value for name, value in os.environ.items() if not is_secret(name, value)}
    if python == sys.executable:
        return inherited
    return {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
