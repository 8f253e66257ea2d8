"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first saves and stops, the second leaves at once."""

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

LEAVE = 5.0
"""Seconds after the second signal in which the process can leave in an orderly way."""


class Stop:
    """Context manager in which a signal sets `requested`, and a second one interrupts.

    If the main thread does not leave the context `LEAVE` seconds after the second signal, or at the
    third, the process ends, whatever it is doing. What it has started then ends by itself.
    """

    def __init__(self) -> None:
        self.requested = False
        self._signalled = False
        self._before: dict[int, Any] = {}
        self._pipe: int | None = None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # only it can do so
            # Python runs handlers between two instructions of the main thread, which may be in a
            # call that does not return; it writes the numbers of signals to a pipe at once
            reader, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            self._wakeup = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            threading.Thread(target=_end, args=[reader], name="signals", daemon=True).start()
            handlers = {number: signal.getsignal(number) for number in NUMBERS}
            # what is ignored stays so, as with nohup
            self._before = {n: h for n, h in handlers.items() if h is not signal.SIG_IGN}
            self.install()
        return self

    def install(self) -> None:
        """Install the signal handlers; again after a library has installed its own."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._pipe)

    def print(self, line: str) -> None:
        """Print a line. If standard output was closed, as by `| head`, ask to save and stop."""
        try:
            print(line, flush=True)
        except UnicodeEncodeError:  # the locale lacks a character
            print(line.encode("ascii", "backslashreplace").decode(), flush=True)
        except BlockingIOError:  # a program that a reward has started shares it, and changed it
            os.set_blocking(sys.stdout.fileno(), True)
            sys.stdout.flush()
        except OSError:  # also of a terminal that was closed
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())  # else what is buffered raises again at the end
            os.close(nothing)
            self._request("standard output was closed: finishing this step, saving, and stopping")

    def _request(self, message: str) -> None:
        self.requested = True
        with suppress(OSError):  # standard error may be closed as well
            print(f"\n{message}", file=sys.stderr, flush=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        self._request("stopping: finishing this step and saving; interrupt again to stop at once")


def _end(reader: int) -> None:
    """End the process at the third signal, or some time after the second, unless it has left."""
    with os.fdopen(reader, "rb", buffering=0) as signals:
        asked = 0
        while asked < 3:
            if asked == 2 and not select.select([signals], [], [], LEAVE)[0]:
                break
            byte = signals.read(1)
            if not byte:  # the context has been left
                return
            asked += byte[0] in NUMBERS
        os._exit(128 + signal.SIGINT)
