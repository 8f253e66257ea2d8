"""Handling of Ctrl-C and SIGTERM: the first saves and stops, the second stops at once."""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any


class Stop:
    """Context manager in which a signal sets `requested`, and a second one interrupts."""

    def __init__(self) -> None:
        self.requested = False
        self._signalled = False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Install the signal handlers, which only the main thread can do."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before.setdefault(number, signal.signal(number, self._handle))

    def __enter__(self) -> "Stop":
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def print(self, line: str) -> None:
        """Print a line. If standard output was closed, as by `| head`, ask to save and stop."""
        try:
            print(line, flush=True)
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())  # else what is buffered raises again at the end
            os.close(nothing)
            self._request("standard output was closed: finishing this step, saving, and stopping")
        except BlockingIOError:  # a program that a reward has started shares it, and changed it
            os.set_blocking(sys.stdout.fileno(), True)
            sys.stdout.flush()

    def _request(self, message: str) -> None:
        self.requested = True
        with suppress(OSError):  # standard error may be closed as well
            print(f"\n{message}", file=sys.stderr, flush=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        self._request("stopping: finishing this step and saving; interrupt again to stop at once")
