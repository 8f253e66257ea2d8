"""Agents: a program of the user holds sessions with the policy, and returns their rewards."""

import asyncio
import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tba.child import Child
from tba.config.errors import is_secret
from tba.engines import Engine, EngineError, RewardError
from tba.models.pretrained import Tokenizer
from tba.prompt import Answer, Prompt
from tba.search.dialogue import Responses
from tba.search.endpoint import Endpoint, Live, live_session
from tba.search.session import Session
from tba.search.verdicts import DIED, Rejected, Verdict, parse_score
from tba.tasks import Itemized, Program
from tba.types import Completion, Sampling

MAIN = Path(__file__).with_name("agent_child.py")
GRACE = 2.0
"""Seconds after which a session that was told to end counts as stuck."""
LONGEST_LINE = 2**24
"""Most bytes of a result."""
NO_CALL = Rejected("no_call", "the program has not called the policy")


@dataclass(frozen=True)
class Held:
    """A session that has ended, and its reward."""

    session: Session
    verdict: Verdict


class Agents:
    """Holds the sessions of searches. The endpoint and the program's process start with the first.

    `fixed` says why the program may not choose temperature or top_p, if so.
    """

    def __init__(
        self, engine: Engine, text: Tokenizer, program: Program, fixed: str, max_memory: float,
        start_deadline: float,
    ):  # fmt: skip
        self._text = text
        self._program = program
        self._endpoint = Endpoint(engine, text, fixed)
        self._process = AgentProcess(program, max_memory, start_deadline)
        self._slots = asyncio.Semaphore(program.concurrency)

    def hold(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, seconds: float
    ) -> Responses:
        """Hold `sampling.samples` sessions about each prompt, which end within so many seconds."""
        until = time.monotonic() + seconds
        numbers = count()
        started = []
        for prompt in prompts:
            row = {**prompt.columns, "prompt": prompt.text}
            for _ in range(sampling.samples):
                session = Session(self._program.history)
                number = next(numbers)
                live = live_session(session, sampling, seed, number, self._program.max_calls)
                holding = self._hold(row, live, until)
                started.append(asyncio.run_coroutine_threadsafe(holding, self._endpoint.loop))
        while not all(each.done() for each in started):
            self._endpoint.turns.work(0.05)
        failure = self._endpoint.failure
        if failure is not None:
            raise failure
        held = [each.result() for each in started]
        s = sampling.samples
        groups = [held[i : i + s] for i in range(0, len(held), s)]
        return self._responses(groups)

    def counts(self) -> Mapping[str, int]:
        """Return the calls since the last time, by metric."""
        counts = dict(self._endpoint.counts)
        self._endpoint.counts.clear()
        return counts

    def close(self) -> None:
        """End the endpoint and the process."""
        self._process.close()
        self._endpoint.close()

    async def _hold(self, row: Mapping[str, Any], live: Live, until: float) -> Held:
        """Hold one session, and return it with the verdict on it."""
        async with self._slots:
            seconds = min(self._program.deadline, until - time.monotonic())
            url = self._endpoint.open(live)
            try:
                verdict = await self._process.run(url, row, seconds)
            finally:
                self._endpoint.end(url)
        if not live.session.exchanges and not isinstance(verdict, Rejected):
            verdict = NO_CALL
        return Held(live.session, verdict)

    def _responses(self, groups: Sequence[Sequence[Held]]) -> Responses:
        """Return sessions by prompt, whose tokens are what all sessions about it begin with."""
        # in place of a prompt or a session that does not exist; nothing is made of it
        nothing = np.array([self._text.eos_id], np.int32)
        empty = Completion(nothing, np.zeros(1, np.float32), False, 0)
        prompts = []
        completions = []
        for group in groups:
            begun = [held.session.prompt for held in group if held.session.exchanges]
            prompt = common(begun) if begun else nothing
            prompts.append(prompt)
            own = []
            for held in group:
                called = held.session.exchanges
                own.append(held.session.completion(len(prompt)) if called else empty)
            completions.append(own)
        verdicts = [[held.verdict for held in group] for group in groups]
        forks = sum(held.session.forks for group in groups for held in group)
        self._endpoint.counts["agents/forks"] += forks
        if not self._program.scored:
            return Responses(prompts, completions, verdicts)
        answers = [[self._answer(held) for held in group] for group in groups]
        return Responses(prompts, completions, answers, rewards=verdicts)

    def _answer(self, held: Held) -> Answer | Verdict:
        """Return a session as what reward functions see."""
        if isinstance(held.verdict, Rejected):
            return held.verdict
        last = held.session.exchanges[-1]
        messages = [*last.asked.messages, json.loads(last.keys[-1])]
        turn = last.turn
        answer = self._text.answer(turn.tokens, turn.finished, (), turn.version)
        return replace(answer, messages=messages)


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
        self._results: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._stuck: set[int] = set()  # sessions that were told to end, and have not
        self._worked = False

    async def run(self, url: str, row: Mapping[str, Any], seconds: float) -> Verdict:
        """Run the program for a session; return its reward, or why it has none."""
        if seconds <= 0:
            return Rejected("timeout", "not tried: the time of its search was up")
        try:
            line = json.dumps({"base_url": url, "row": row}, allow_nan=False, default=str)
        except ValueError as error:
            return Rejected("raised", f"the row cannot be sent as JSON: {error}")
        await self._ready()
        number = next(self._numbers)
        result: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._results[number] = result
        self._send(number, line)
        try:
            message = await asyncio.wait_for(asyncio.shield(result), seconds)
        except TimeoutError:
            self._send(number, "{}")
            self._stuck.add(number)
            asyncio.get_running_loop().call_later(GRACE, self._end_stuck)
            limit = f"task.deadline = {self._program.deadline:g} s"
            return Rejected("timeout", f"the session did not end within {seconds:g} s ({limit})")
        return verdict_of(message)

    def close(self) -> None:
        """End the process, and what it has started."""
        if self._child is not None:
            self._child.kill()

    def _send(self, number: int, line: str) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps({"session": number, **json.loads(line)}).encode() + b"\n")

    async def _ready(self) -> None:
        """Start the process unless it runs. RewardError if it does not start.

        EngineError, which restarts the searcher, if it has worked before.
        """
        async with self._starting:
            if self._reading is not None and not self._reading.done():
                return
            why = await self._start()
        if why:
            kind = EngineError if self._worked else RewardError
            raise kind(f"task.rollout = {self._program.rollout!r} did not start: {why}")
        self._worked = True

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
        try:
            first = await asyncio.wait_for(reader.readline(), self._start_deadline)
        except TimeoutError:
            self._child.kill()
            return f"not within runtime.start_deadline = {self._start_deadline:g} s"
        if not first:
            self._child.kill()
            return f"its process ended with status {self._child.status}"
        message = json.loads(first)
        if "failed" in message:
            self._child.kill()
            return f"\n{message['failed']}"
        self._reading = asyncio.create_task(self._read(reader, self._child))
        return ""

    async def _read(self, reader: asyncio.StreamReader, child: Child) -> None:
        """Receive results until the process ends; then the sessions it held have died."""
        try:
            while line := await reader.readline():
                message = json.loads(line)
                self._stuck.discard(message["session"])
                result = self._results.pop(message["session"], None)
                if result is not None and not result.done():
                    result.set_result(message)
        except (ValueError, KeyError, ConnectionError):  # the program wrote to our socket
            pass
        finally:
            assert self._writer is not None
            self._writer.close()
        await asyncio.to_thread(child.kill)
        self._stuck.clear()
        how = f"the agent process ended with status {child.status}"
        for result in self._results.values():
            if not result.done():
                result.set_result({"died": how})
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
        case {"died": how}:
            return Rejected(DIED, str(how))
        case {"raised": text}:
            return Rejected("raised", str(text))
        case {"returned": dict(by_name)}:
            numbers = {str(name): float(value) for name, value in by_name.items()}
            if "reward" not in numbers:
                return Rejected("none", "rollout returned a dict without `reward`")
            items = {f"rewards/{n}": x for n, x in numbers.items() if n != "reward"}
            return parse_score(Itemized(numbers["reward"], items, {}))
        case {"returned": None}:
            return Rejected("none", "rollout returned None")
        case {"returned": value}:
            return parse_score(float(value))
    return Rejected("raised", f"the agent process sent {message!r:.200}")


def common(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Return the longest beginning that all of these tokens share."""
    shortest = min(map(len, sequences))
    same = np.ones(shortest, bool)
    for sequence in sequences:
        same &= sequence[:shortest] == sequences[0][:shortest]
    return sequences[0][: shortest if same.all() else int(same.argmin())]


def environment(python: str) -> dict[str, str]:
    """Return the environment of a program: no secrets, and nothing of this Python for another."""
    inherited = {name: value for name, value in os.environ.items() if not is_secret(name)}
    if python == sys.executable:
        return inherited
    return {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
