"""The process of a user's program, which holds the sessions; `agent_child` is its main program."""

import asyncio
import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from tba.child import Child
from tba.config.errors import is_secret, masked
from tba.search.verdicts import DIED, Rejected, Verdict, parse_score
from tba.tasks import Itemized, Program

MAIN = Path(__file__).with_name("agent_child.py")
GRACE = 2.0
"""Seconds after which a session that was told to end counts as stuck."""
LONGEST_LINE = 2**24
"""Most bytes of a result."""


class AgentProcess:
    """The process of the program: it is started when a session needs it, and killed if it hangs.

    All methods but `close` run in the event loop of the endpoint.
    """

    def __init__(self, program: Program, max_memory: float, start_deadline: float):
        self._program = program
        self._max_memory = max_memory if math.isfinite(max_memory) else None
        self._start_deadline = start_deadline
        self._child: Child | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._results: dict[int, asyncio.Future[Verdict]] = {}
        self._stuck: set[int] = set()  # sessions that were told to end, and have not
        self.worked = False
        """Whether the process has ever started."""

    async def run(self, url: str, row: Mapping[str, Any], seconds: float) -> Verdict:
        """Run the program for a session; return its reward, or why it has none."""
        if seconds <= 0:
            return Rejected("timeout", "not tried: the time of its search was up")
        number = next(self._numbers)
        asked = {"session": number, "base_url": url, "row": row}
        try:
            line = json.dumps(asked, allow_nan=False, default=str)
        except ValueError as error:
            return Rejected("raised", f"the row cannot be sent as JSON: {error}")
        await self._ready()
        result: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._results[number] = result
        self._send(line)
        try:
            return await asyncio.wait_for(asyncio.shield(result), seconds)
        except TimeoutError:
            self._send(json.dumps({"session": number}))
            self._stuck.add(number)
            asyncio.get_running_loop().call_later(GRACE, self._end_stuck)
            limit = f"task.deadline = {self._program.deadline:g} s"
            return Rejected("timeout", f"the session did not end within {seconds:g} s ({limit})")

    def close(self) -> None:
        """End the process, and what it has started."""
        if self._child is not None:
            self._child.kill()

    def _send(self, line: str) -> None:
        assert self._writer is not None
        self._writer.write(line.encode() + b"\n")

    async def _ready(self) -> None:
        """Start the process unless it runs; ChildProcessError if it does not start."""
        async with self._starting:
            if self._reading is not None and not self._reading.done():
                return
            if why := await self._start():
                told = f"task.rollout = {self._program.rollout!r} did not start: {why}"
                raise ChildProcessError(masked(told))
            self.worked = True

    async def _start(self) -> str:
        """Start the process, and return why it did not start, if so."""
        own, theirs = socket.socketpair()
        program = self._program
        with theirs:
            end = theirs.fileno()
            arguments = {"ARGUMENTS": [end, program.rollout, self._max_memory]}
            try:
                self._child = Child(
                    "runpy:run_path", str(MAIN), arguments, "__main__",
                    environment=program.environment,
                    pass_fds=[end],
                    inherited=environment(program.python),
                    python=program.python,
                )  # fmt: skip
            except OSError as error:
                own.close()
                return str(error)
        reader, self._writer = await asyncio.open_unix_connection(sock=own, limit=LONGEST_LINE)
        failed = f"not within runtime.start_deadline = {self._start_deadline:g} s"
        first = b""
        with suppress(TimeoutError):
            first = await asyncio.wait_for(reader.readline(), self._start_deadline)
            failed = json.loads(first).get("failed", "") if first else "its process ended"
        if failed:
            self._child.kill()
            self._writer.close()
            return f"{failed} (status {self._child.status})" if not first else failed
        self._reading = asyncio.create_task(self._read(reader, self._child))
        return ""

    async def _read(self, reader: asyncio.StreamReader, child: Child) -> None:
        """Receive results until the process ends; then the sessions it held have died."""
        try:
            while line := await reader.readline():
                message = json.loads(line)
                verdict = verdict_of(message)
                self._stuck.discard(message["session"])
                result = self._results.pop(message["session"], None)
                if result is not None and not result.done():
                    result.set_result(verdict)
        except (ValueError, TypeError, KeyError, ConnectionError):
            pass  # the program wrote to our socket
        finally:
            assert self._writer is not None
            self._writer.close()
        await asyncio.to_thread(child.kill)
        self._stuck.clear()
        died = Rejected(DIED, f"the agent process ended with status {child.status}")
        for result in self._results.values():
            if not result.done():
                result.set_result(died)
        self._results.clear()

    def _end_stuck(self) -> None:
        """Kill the process if a session does not end, and no other session is being held."""
        waiting = [number for number, result in self._results.items() if number not in self._stuck]
        if self._stuck and not waiting and self._child is not None:
            self._child.kill()
        elif self._stuck:
            asyncio.get_running_loop().call_later(GRACE, self._end_stuck)


def verdict_of(message: Mapping[str, Any]) -> Verdict:
    """Return the verdict that a result of the program means."""
    match message:
        case {"raised": text}:
            return Rejected("raised", masked(str(text)))
        case {"returned": None}:
            return Rejected("none", "rollout returned None")
        case {"returned": dict(rewards)}:
            if "reward" not in rewards:
                return Rejected("none", "rollout returned a dict without `reward`")
            reward = rewards.pop("reward")
            return parse_score(
                Itemized(reward, {f"rewards/{n}": x for n, x in rewards.items()}, {})
            )
        case {"returned": float(reward)}:
            return parse_score(reward)
    return Rejected("raised", f"the agent process sent {message!r:.200}")


def environment(python: str) -> dict[str, str]:
    """Return the environment of a program: no secrets, and nothing of this Python for another."""
    inherited = {name: value for name, value in os.environ.items() if not is_secret(name)}
    if python == sys.executable:
        return inherited
    return {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
