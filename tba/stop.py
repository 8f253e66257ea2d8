"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first saves and stops, the second exits at once."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tba.child import STOPS
from tba.display import printable
from tba.errors import Interruption

TWICE = 0.5
"""Seconds in which a repeated signal is ignored: `timeout` signals a process, then its group."""


class Stop:
    """Context manager in which a signal sets `requested`.

    The second signal ends the process at once; its child processes then exit by themselves. Inside
    `starting`, the first signal raises KeyboardInterrupt, and inside `interrupting`, Interruption.
    """

    def __init__(self) -> None:
        self.requested = False
        self._starting = False
        self._interrupting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            handlers = {number: signal.getsignal(number) for number in STOPS}
            # ignored signals stay ignored, as with nohup
            self._before = {n: h for n, h in handlers.items() if h is not signal.SIG_IGN}
            self.install()
        return self

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context of the code before the first step, when there is nothing to save."""
        self._starting = True
        yield
        self._starting = False

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Context of work that can be repeated: a signal before or in it raises Interruption."""
        self._interrupting = True
        try:
            if self.requested:
                raise Interruption
            yield
        finally:
            self._interrupting = False

    def install(self) -> None:
        """Install the signal handlers. Call it again after a library has installed its own."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def print(self, line: str) -> None:
        """Print a line. If standard output was closed, as by `| head`, request a save and stop."""
        try:
            print(printable(line), flush=True)
        except BlockingIOError:  # a program started by a reward set the shared file non-blocking
            os.set_blocking(sys.stdout.fileno(), True)
            sys.stdout.flush()
        except OSError:  # also when a terminal was closed
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())  # else buffered text raises again at exit
            os.close(nothing)
            self._request("standard output was closed: finishing this step, saving, and stopping")

    def _request(self, message: str) -> None:
        self.requested = True
        with suppress(OSError):  # standard error may be closed as well
            print(f"\n{message}", file=sys.stderr, flush=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # first: a signal that is repeated at once is the same one
        for each in self._before:
            signal.signal(each, lambda *_: None)
        told = "stopping: finishing this step and saving; interrupt again to stop at once"
        self._request("stopped before the first step" if self._starting else told)
        time.sleep(TWICE)
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        if self._starting:
            raise KeyboardInterrupt
        if self._interrupting:
            raise Interruption
