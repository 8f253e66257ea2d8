"""Calls to Ray, each with a deadline, in threads that can be abandoned.

A call to Ray may never return, because its processes have been stopped or killed. Python cannot
interrupt such a call, and while the main thread is in it, signals have no effect. Another thread
therefore makes the call, and whoever needs its result waits in Python.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from tba.engines import SearchError

T = TypeVar("T")

SLICE = 1.0
"""Seconds of the parts in which a thread waits."""
STOPPED = 10.0
"""Seconds between two looks at a clock after which this process counts as stopped."""


class NoAnswerError(TimeoutError):
    """Searchers that do not answer. The run is saved, which needs none of them, and ends."""


class ClusterLostError(NoAnswerError):
    """Ray has died, or does not answer."""


@contextmanager
def search_errors(problem: str) -> Iterator[None]:
    """Raise errors of searchers as SearchError, which `problem` begins: then the run is saved.

    The trainer is sound, whatever has happened to them.
    """
    try:
        yield
    except (SearchError, NoAnswerError):
        raise
    except Exception as error:
        raise search_error(problem, error) from error


def search_error(problem: str, error: Exception) -> Exception:
    """Return an error as one before which the run is saved; `problem` begins it."""
    if isinstance(error, SearchError | NoAnswerError):
        return error
    found = SearchError(f"{problem} ({type(error).__name__}): {error}")
    found.__cause__ = error
    return found


class Clock:
    """Clock for deadlines. Time in which this process itself is stopped, as by Ctrl-Z, is free.

    At most `STOPPED` seconds count between two calls, so that whoever waits calls it often.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = self._seconds = time.monotonic()

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._read, STOPPED)
            self._read = now
            return self._seconds


class Calls:
    """Makes calls to Ray. Once one of them is late, or Ray is `lost`, it makes no others."""

    def __init__(self, deadline: float):
        self.deadline = deadline  # seconds of a call that needs no time of its own
        self.clock = Clock()  # of deadlines for what searchers do
        self.diagnose: Callable[[], None] = lambda: None
        """Called after a call has failed; it tells `lose` if the reason is that Ray has died."""
        self._lost: Future[str] = Future()
        self._idle: list[SimpleQueue[Any]] = []
        """Of the threads that wait for a call. They stay: Linux kills what a thread has started
        when that thread ends (PR_SET_PDEATHSIG), and one of them has started Ray."""

    @property
    def lost(self) -> bool:
        return self._lost.done()

    def lose(self, reason: str) -> None:
        """End all calls, those that wait as well, because Ray is lost for this reason."""
        with suppress(InvalidStateError):  # the first reason counts
            self._lost.set_result(reason)

    def check(self) -> None:
        """Raise ClusterLostError if Ray is lost."""
        if self.lost:
            raise self._error()

    def _error(self) -> ClusterLostError:
        return ClusterLostError(f"Ray is lost: {self._lost.result()}")

    def __call__(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a call, which has `runtime.cluster_deadline` seconds."""
        return self.within(self.deadline, what, function, *args)

    def within(self, seconds: float, what: str, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a call, which has these seconds; ClusterLostError if it is late."""
        self.check()
        future = self._begin(partial(function, *args))
        either: list[Future[Any]] = [future, self._lost]
        left = seconds
        while left > 0 and not future.done() and not self.lost:
            # not all at once: time in which this process itself is stopped, as by Ctrl-Z, is free
            wait(either, min(left, SLICE), FIRST_COMPLETED)
            left -= SLICE
        if not future.done():
            self.lose(f"it did not {what} within {seconds:g} s")
            raise self._error()
        if future.exception() is not None:
            self.diagnose()
            self.check()
        return future.result()

    def attempt(self, seconds: float, function: Callable[..., Any]) -> bool:
        """Make a call even if Ray is lost, and return whether it has ended in time, as it may."""
        future = self._begin(function)
        wait([future], seconds)
        return future.done()

    def close(self) -> None:
        """End the threads that wait for a call; the others have been abandoned."""
        self.lose("this process has left it")
        for calls in self._idle:
            calls.put(None)

    def _begin(self, function: Callable[[], T]) -> "Future[T]":
        """Let a thread call the function: one that waits, or else a new one."""
        future: Future[T] = Future()
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(target=self._work, args=[calls], daemon=True, name="ray call").start()
        calls.put((future, function))
        return future

    def _work(self, calls: "SimpleQueue[Any]") -> None:
        while (call := calls.get()) is not None:
            future, function = call
            try:
                result, error = function(), None
            except BaseException as raised:  # of Ray: whoever waits raises it
                result, error = None, raised
            self._idle.append(calls)  # first: whoever waits may call again at once
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del call, future, function, result, error  # they may keep weights alive
