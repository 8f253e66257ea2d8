"""The process of a user's program, which holds the sessions; `agent_child` is its main program."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.child import Child
from tba.config.errors import is_secret, masked
from tba.search.process import Ended, Process
from tba.search.verdicts import DIED, Rejected, Verdict, parse_score
from tba.tasks import Itemized, Program

MAIN = Path(__file__).with_name("agent_child.py")
GRACE = 2.0
"""Seconds after which a session that was told to end counts as stuck."""


class AgentProcess(Process):
    """The process of the program: it is started when a session needs it, and killed if it hangs."""

    def __init__(self, program: Program, max_memory: float, start_deadline: float):
        self._program = program
        self._max_memory = max_memory if math.isfinite(max_memory) else None
        super().__init__(f"task.rollout = {program.rollout!r}", b"", start_deadline)
        self._stuck: set[int] = set()  # sessions that were told to end, and have not
        self._ends: set[asyncio.Task[None]] = set()

    async def run(self, url: str, row: Mapping[str, Any], seconds: float) -> Verdict:
        """Run the program for a session; return its reward, or why it has none."""
        if seconds <= 0:
            return Rejected("timeout", "not tried: the time of its search was up")
        try:
            asked = json.dumps({"base_url": url, "row": row}, allow_nan=False, default=str)
        except ValueError as error:
            return Rejected("raised", f"the row cannot be sent as JSON: {error}")
        await self.ready()
        number = self.call(lambda n: f"[{n}, {asked}]\n".encode())
        try:
            verdict = await self.reply(number, seconds)
        except TimeoutError:
            end = asyncio.create_task(self._end(number))
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)
            limit = f"task.deadline = {self._program.deadline:g} s"
            return Rejected("timeout", f"the session did not end within {seconds:g} s ({limit})")
        self.forget(number)
        if isinstance(verdict, Ended):
            return Rejected(DIED, f"the agent process ended {verdict.how}")
        return verdict

    async def _end(self, number: int) -> None:
        """Tell a session to end. If it does not, and no other is being held, end the process."""
        self.send(f"[{number}, null]\n".encode())
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
        """Return the verdict that a reply means; None if the program has started."""
        match kind, value:
            case "started", _:
                return None
            case "raised", text:
                return Rejected("raised", masked(str(text)))
            case "returned", None:
                return Rejected("none", "rollout returned None")
            case "returned", dict(rewards):
                if "reward" not in rewards:
                    return Rejected("none", "rollout returned a dict without `reward`")
                reward = rewards.pop("reward")
                return parse_score(
                    Itemized(reward, {f"rewards/{n}": x for n, x in rewards.items()}, {})
                )
            case "returned", float(reward):
                return parse_score(reward)
        raise ValueError(f"the agent process sent {kind!r:.200}")


def environment(python: str) -> dict[str, str]:
    """Return the environment of a program: no secrets, and nothing of this Python for another."""
    inherited = {name: value for name, value in os.environ.items() if not is_secret(name)}
    if python == sys.executable:
        return inherited
    return {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
