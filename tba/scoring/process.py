"""Child processes that answer calls: one runs a user's program, another scores answers.

    caller                    event loop                         child
    Process.ready                                             -> its main function
    Process.call                                              -> a call, as bytes
    Process.reply          <- Process._read, which parses it  <- a line of JSON

A line contains the number of the call, a kind and a value. The first line has the number STARTED
and the kind "started" or "failed". A child that sends malformed output is killed.
"""

import asyncio
import json
import math
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from tba.child import STARTED, Child
from tba.config.mistakes import masked
from tba.config.secrets import is_secret
from tba.scoring.verdicts import Reason, Rejected, Verdict, parse_score
from tba.tasks import Itemized, Program

T = TypeVar("T")

MAIN = Path(__file__).parents[1] / "agents" / "child.py"
"""Main program of an agent process."""
GRACE = 2.0
"""Seconds after its cancellation at which a session counts as stuck."""
BLOCKED = 5.0
"""Seconds without an acknowledgement after which an event loop counts as blocked."""
PAUSES = (0.0, 0.5, 2.0, 5.0)
"""Seconds before each attempt to restart a child that has worked and ended."""
LONGEST_LINE = 2**24
"""Most bytes of a reply."""
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Read errors: the child was killed during a reply, or a user's function wrote to its socket."""


@dataclass(frozen=True)
class StartFailed:
    """First reply of a child that cannot be called."""

    why: str


@dataclass(frozen=True)
class NoReply:
    """Returned in place of a reply: the child has ended, or is late."""

    how: str
    """How the child ended; empty if it is late."""
    beside: bool
    """True if other calls were in flight, one of which may be the cause."""


class Process(ABC):
    """A child that answers calls. It is started on demand, and restarted after it has ended.

    All methods run in one event loop, which kills the child when it is closed.
    """

    def __init__(self, name: str, setup: bytes, start_deadline: float, hint: str = ""):
        """`setup` is sent before all calls; the error of a failed start has `name` and `hint`."""
        self._name = name
        self._setup = setup
        self._start_deadline = start_deadline
        self._hint = hint
        self._starting = asyncio.Lock()
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None] | None = None
        self._failure = ""
        self.worked = False
        """Whether a child has ever started."""
        self._numbers = count(STARTED + 1)
        self._replies: dict[int, asyncio.Queue[Any]] = {}
        """Replies that were not read yet, by the number of the call."""

    @abstractmethod
    def child(self, end: int) -> Child:
        """Start the child, which inherits the socket with descriptor `end`."""

    @abstractmethod
    def parse(self, kind: str, value: Any) -> Any:
        """Parse a reply."""

    async def ready(self) -> None:
        """Start the child unless it runs. Raises ChildProcessError now and later if that fails."""
        async with self._starting:
            until = time.monotonic() + self._start_deadline
            if not self._failure and (self._reading is None or self._writer.is_closing()):
                for pause in PAUSES if self.worked else PAUSES[:1]:
                    await asyncio.sleep(pause)
                    self._failure = await self._start()
                    if not self._failure or time.monotonic() > until:
                        break
            if self._failure:
                told = f"{self._name} did not start: {self._failure}{self._hint}"
                raise ChildProcessError(masked(told))
            self.worked = True

    @property
    def calls(self) -> set[int]:
        """Numbers of the calls in flight."""
        return set(self._replies)

    def call(self, request: Callable[[int], bytes]) -> int:
        """Send a call to a ready child; the call is in flight until its number is forgotten."""
        number = next(self._numbers)
        self._replies[number] = asyncio.Queue()
        self._writer.write(request(number))
        return number

    def send(self, data: bytes) -> None:
        """Send further data about a call."""
        self._writer.write(data)

    async def reply(self, number: int, seconds: float) -> Any:
        """Return the next reply to a call, or NoReply. Raises TimeoutError after `seconds`."""
        return await asyncio.wait_for(self._replies[number].get(), seconds)

    def forget(self, number: int) -> None:
        del self._replies[number]

    async def end(self) -> None:
        """Kill the child and its descendants; calls in flight get NoReply."""
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
        try:
            self._writer.write(self._setup)
            reply = await self.reply(STARTED, self._start_deadline)
            while reply is None and not replies.empty():  # it has ended since
                reply = replies.get_nowait()
        except TimeoutError:
            limit = f"runtime.start_deadline = {self._start_deadline:g} s"
            reply = StartFailed(f"not within {limit}; raise it if models load so long")
        finally:
            self.forget(STARTED)
        if isinstance(reply, NoReply):
            return f"its process ended {reply.how}"
        if not isinstance(reply, StartFailed):
            return ""
        await self.end()
        return reply.why

    async def _read(self, child: Child, reader: asyncio.StreamReader) -> None:
        """Receive replies until the child ends."""
        try:
            while line := await reader.readline():
                number, kind, value = json.loads(line)
                reply = StartFailed(str(value)) if kind == "failed" else self.parse(kind, value)
                if number in self._replies:  # else a user's function forked or wrote to the socket
                    self._replies[number].put_nowait(reply)
        except UNREADABLE:
            pass
        finally:
            self._writer.transport.abort()
            child.kill()
            status = child.status
            how = f"with exit status {status}"
            if status is not None and status < 0:
                how = f"by signal {-status} ({signal.strsignal(-status)})"
            for replies in self._replies.values():
                replies.put_nowait(NoReply(how, beside=len(self._replies) > 1))


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
        self._max_memory = max_memory if math.isfinite(max_memory) else None
        super().__init__(f"task.rollout = {program.rollout!r}", b"", start_deadline)
        self._stuck: set[int] = set()  # sessions that were cancelled but have not ended
        self._ends: set[asyncio.Task[None]] = set()

    async def run(
        self, url: str, row: Mapping[str, Any], until: float, alone: bool
    ) -> Verdict | None:
        """Run the program for a session; return its reward or a rejection.

        Returns None if the process has ended and another session may be the cause, because this
        one was not `alone`.
        """
        try:
            asked = json.dumps({"base_url": url, "row": row}, allow_nan=False, default=str)
        except ValueError as error:
            return Rejected(Reason.RAISED, f"the row cannot be sent as JSON: {error}")
        await self.ready()
        seconds = min(self._program.deadline, until - time.monotonic())
        if seconds <= 0:
            return Rejected(Reason.TIMEOUT, "not tried: the time of its search was up")
        number = self.call(lambda n: f"[{n}, {asked}]\n".encode())
        try:
            verdict = await self.reply(number, seconds)
        except TimeoutError:
            others = self.calls - {number}
            if not await self._is_heard(number) and others and not alone:
                return None
            limit = f"task.deadline = {self._program.deadline:g} s"
            if seconds < self._program.deadline:
                limit = "what was left of runtime.task_deadline for its search"
            return Rejected(
                Reason.TIMEOUT, f"the session did not end within {seconds:.3g} s ({limit})"
            )
        self.forget(number)
        if not isinstance(verdict, NoReply):
            return verdict
        if verdict.beside and not alone:
            return None
        return Rejected(Reason.DIED, f"the agent process ended {verdict.how}")

    async def _is_heard(self, number: int) -> bool:
        """Cancel a session; return whether the program acknowledged the cancellation.

        If it did not, a session blocks its event loop, and the process is killed.
        """
        self.send(f"[{number}, null]\n".encode())
        try:
            reply = await self.reply(number, BLOCKED)
        except TimeoutError:
            await self.end()
            reply = NoReply("", beside=True)
        if reply is not None:  # None: it is ending
            self.forget(number)
            return not isinstance(reply, NoReply)
        end = asyncio.create_task(self._end(number))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)
        return True

    async def _end(self, number: int) -> None:
        """Wait for a session to end. If it does not, and no other runs, kill the process."""
        ended = False
        while not ended:
            try:
                await self.reply(number, GRACE)
                ended = True
            except TimeoutError:
                self._stuck.add(number)
                if self.calls <= self._stuck:
                    await self.end()
        self._stuck.discard(number)
        self.forget(number)

    def child(self, end: int) -> Child:
        program = self._program
        arguments = {"ARGUMENTS": [end, program.rollout, self._max_memory]}
        return Child(
            "runpy:run_path", str(MAIN), arguments, "__main__",
            environment=program.environment,
            pass_fds=[end],
            inherited=environment(program.python),
            python=program.python,
        )  # fmt: skip

    def parse(self, kind: str, value: Any) -> Verdict | None:
        """Return a verdict; None if the process has started, or a session is ending."""
        match kind, value:
            case "started" | "ending", _:
                return None
            case "raised", text:
                return Rejected(Reason.RAISED, masked(str(text)))
            case "returned", None:
                return Rejected(Reason.NONE, "rollout returned None")
            case "returned", dict(rewards):
                if "reward" not in rewards:
                    return Rejected(Reason.NONE, "rollout returned a dict without `reward`")
                reward = rewards.pop("reward")
                return parse_score(
                    Itemized(reward, {f"rewards/{n}": x for n, x in rewards.items()}, {})
                )
            case "returned", float(reward):
                return parse_score(reward)
        raise ValueError(f"the agent process sent {kind!r:.200}")


def environment(python: str) -> dict[str, str]:
    """Return a program's environment: no secrets, and no PYTHON* for another interpreter."""
    inherited = {name: value for name, value in os.environ.items() if not is_secret(name, value)}
    if python == sys.executable:
        return inherited
    return {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
