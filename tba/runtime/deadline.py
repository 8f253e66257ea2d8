"""Watch over Ray: its environment, calls to it with a deadline, and the health of its processes.

A call to Ray may never return, because its processes have been stopped or killed. Python cannot
interrupt such a call, and while the main thread is in it, signals have no effect. Another thread
therefore makes the call, and whoever needs its result waits in Python.
"""

import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import psutil

from tba.engines import SearchError

T = TypeVar("T")

EVERY = 0.5
"""Seconds between two looks."""

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's documented switch: 1 listens on the machine's address, to join a cluster; 0 on loopback."""
TOKEN = secrets.token_hex(32)
"""Key to a private Ray. Without one, Ray writes its own to the home folder, which may be
read-only or may show it to others."""


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


class Calls:
    """Makes calls to Ray. Once one of them is late, or Ray is `lost`, it makes no others."""

    def __init__(self, deadline: float):
        self.deadline = deadline  # seconds of a call that needs no time of its own
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
        wait(either, seconds, FIRST_COMPLETED)
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
                result = function()
                error = None
            except BaseException as raised:  # of Ray: whoever waits raises it
                result = None
                error = raised
            self._idle.append(calls)  # first: whoever waits may call again at once
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del call, future, function, result, error  # they may keep weights alive


class Health:
    """Thread that tells `calls` when a process of Ray has died or has been stopped too long."""

    def __init__(self, calls: Calls, session: str, raylet: str):
        self._calls = calls
        self._processes = processes_of_ray(session, raylet)
        self._stopped: dict[str, float] = {}
        """Seconds for which each process has been seen stopped, by its name."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)
        self._thread.start()
        calls.diagnose = self.check

    def check(self) -> None:
        """Look whether the processes run."""
        self._look(self._calls.deadline)

    def close(self) -> None:
        """End the thread, and look a last time: a process that is stopped cannot end Ray."""
        self._closing.set()
        self._thread.join(10)
        self._look(patience=0.0)

    def _watch(self) -> None:
        while not self._closing.wait(EVERY):
            self.check()

    def _look(self, patience: float) -> None:
        for name, process in self._processes.items():
            status = _status(process)
            if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
                self._calls.lose(f"its {name} (process {process.pid}) has died")
            elif status != psutil.STATUS_STOPPED:
                self._stopped.pop(name, None)
            elif self._stopped.setdefault(name, 0.0) >= patience:
                self._calls.lose(f"its {name} (process {process.pid}) is stopped")
            else:  # not by the clock: this process may have been stopped as well, as by Ctrl-Z
                self._stopped[name] += EVERY


def processes_of_ray(session: str, raylet: str) -> dict[str, psutil.Process]:
    """Return by name those of Ray's processes that run here.

    The raylet has the socket `raylet`. The GCS of a cluster may be on another machine.
    """
    marks = {"gcs_server": session, "raylet": raylet}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mark = marks.get(process.name())
            if mark is not None and any(mark in word for word in process.cmdline()):
                found[process.name()] = process
    return found


def _status(process: psutil.Process) -> Any:
    with suppress(psutil.NoSuchProcess):
        if process.is_running():
            return process.status()
    return psutil.STATUS_DEAD


def bind_ray(address: str | None) -> None:
    """Prepare the environment for a private Ray on loopback, or for the cluster at `address`."""
    wanted = "0" if address is None else "1"
    if "ray" in sys.modules and os.environ.get(VARIABLE) != wanted:
        raise ValueError(
            "ray was imported before the run began and would listen on the wrong address;"
            f" set {VARIABLE}={wanted} in the environment before `import ray`"
        )
    os.environ[VARIABLE] = wanted
    if address is None and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", TOKEN)
    elif os.environ.get("RAY_AUTH_TOKEN") == TOKEN:
        del os.environ["RAY_AUTH_TOKEN"]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # a driver without its GCS ends after a minute, before a large model can be saved
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "3600")
    # a raylet may take longer than Ray's 30 s to start; `runtime.start_deadline` is the limit
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "3600")
    # without its raylet it ends at once if its parent is process 1, which Ray takes for a sign
    # that the raylet is dead; it looks at this process instead
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
