"""Ctrl-C and SIGTERM: once, save and leave; twice, leave now."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Stop:
    """While it is open, the first signal sets `requested` and the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def is_requested(self) -> bool:
        return self.requested

    def install(self) -> None:
        """Signals can be handled from the main thread only; elsewhere the host program decides when to stop."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._handle)
                self._before.setdefault(number, before)

    def __enter__(self) -> Stop:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print(
            "\nstopping: finishing this step and saving; once more to leave at once",
            file=sys.stderr,
            flush=True,
        )
