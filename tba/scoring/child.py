"""Main program of a scoring process. It imports torch only if the task does.

Requests arrive as pickles through a socket, and replies are sent as lines of JSON: the number of
the call, a kind, and a value. Sync functions run in the main thread, because some graders set
alarms; async functions run in an event loop in another thread.
"""

import asyncio
import json
import math
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable
from contextlib import suppress
from functools import cached_property
from inspect import isawaitable
from pathlib import Path
from typing import Any

import psutil

from tba.child import MARK, STARTED, kill, kill_with_parent, started_by
from tba.scoring.verdicts import Rejected, awaited, parse_score, rejection, to_json
from tba.tasks import Task, listed, scorer_of

SLICE = 0.1
"""Most seconds that count against a call's deadline while the event loop is blocked."""


def serve(end: int) -> None:
    """Score for the searcher at the other end of a socket, until the socket is closed."""
    kill_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(end, False)  # a process that inherits it would hide the end of this one
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, end))
    _limit(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # out of memory, Linux kills this process instead of the trainer
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    try:
        ScoringServer(socket.socket(fileno=end)).serve()
    except (EOFError, OSError):  # the searcher has ended
        pass
    except BaseException:
        traceback.print_exc()
    finally:  # even if a user's function has broken what the first call needs
        try:
            kill(started_by(os.getpid(), os.environ[MARK]))
        finally:
            os.killpg(0, signal.SIGKILL)  # with threads that hang


def _limit(kind: int, most: float) -> None:
    """Limit a resource of this process; keep the system's limit if it is lower."""
    _, hard = resource.getrlimit(kind)
    if math.isfinite(most):
        wanted = math.ceil(most)
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (soft, hard))


class ScoringServer:
    """The tasks, and the connection to the searcher."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._sending = threading.Lock()  # both threads reply, and lines must not mix
        self._pid = os.getpid()

    def serve(self) -> None:
        """Build the tasks, and answer requests. Raises EOFError when the searcher has ended."""
        requests = self._connection.makefile("rb")
        max_memory, builds = pickle.load(requests)
        tasks: dict[str, Task] = {}
        try:
            for name, build in pickle.loads(builds).items():
                tasks[name] = build()
        except BaseException as error:
            self._reply(STARTED, "failed", rejection(error).detail)
            return
        # limit written memory, not address space, of which torch and CUDA reserve much more; set
        # the limit only now, because a judge of billions of parameters is loaded to the CPU first
        in_use = psutil.Process().memory_info().data if sys.platform == "linux" else 0
        _limit(resource.RLIMIT_DATA, in_use + max_memory * 1e9)
        self._reply(STARTED, "started")
        while True:
            number, seconds, group = pickle.load(requests)
            until = time.monotonic() + seconds
            try:
                name, prompt, answers = pickle.loads(group)
                scores: Any = scorer_of(tasks, name).score(prompt, answers)
                if not isawaitable(scores):
                    scores = listed(scores)
            except BaseException as error:  # untrusted: only the searcher may end this process
                scores = rejection(error)
            if isinstance(scores, list | Rejected):
                self._send(number, scores)
            else:
                left = until - time.monotonic()
                self._reply(number, "awaits", left)  # first: verdicts must not overtake it
                asyncio.run_coroutine_threadsafe(self._await(number, scores, left), self._loop)

    async def _await(self, number: int, scores: Awaitable[Any], left: float) -> None:
        """Send awaited scores. The deadline pauses while another call blocks the event loop."""
        call = asyncio.ensure_future(awaited(scores))
        while left > 0 and not call.done():
            began = time.monotonic()
            most = min(left, SLICE)
            await asyncio.wait([call], timeout=most)
            left -= min(time.monotonic() - began, most)
        if call.done():
            self._send(number, call.result())
        else:
            call.cancel()
            self._reply(number, "late")

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()

        def run() -> None:
            while True:
                # what a function raises ends `run_forever`, and is also stored in its task
                with suppress(SystemExit, KeyboardInterrupt):
                    return loop.run_forever()

        threading.Thread(target=run, daemon=True).start()
        return loop

    def _send(self, number: int, scores: list[Any] | Rejected) -> None:
        """Send a verdict on each score, or one rejection of all.

        If a function closes standard output, its group is lost: the searcher starts a new process.
        """
        if sys.stdout.closed:  # later functions could not print
            os._exit(1)
        if isinstance(scores, list):
            try:
                verdicts = [to_json(parse_score(score)) for score in scores]
                return self._reply(number, "verdicts", verdicts)
            except Exception as error:  # a score may be an object that raises
                scores = rejection(error)
        return self._reply(number, "rejected", to_json(scores))

    def _reply(self, number: int, kind: str, value: Any = None) -> None:
        if os.getpid() != self._pid:  # a user's function has forked, and both processes return
            os._exit(1)
        line = json.dumps([number, kind, value]) + "\n"
        with self._sending:
            self._connection.sendall(line.encode())
