"""Handling of Ctrl-C and SIGTERM: the first saves and stops, the second stops at once."""

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Stop:
    """Context manager in which a signal sets `requested`, and a second one interrupts."""

    def __init__(self) -> None:
        self.requested = False
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        message = "stopping: finishing this step and saving; interrupt again to stop at once"
        print(f"\n{message}", file=sys.stderr, flush=True)
