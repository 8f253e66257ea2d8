"""Calls to Ray with a deadline, monitoring of Ray's processes, and Ray's environment.

A call to Ray may never return if Ray's processes have been stopped or killed. Python cannot
interrupt such a call, and signals have no effect while the main thread is in it. Therefore another
thread makes the call, and the caller waits for its result in Python.
"""

import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import psutil

from tba.errors import ClusterLostError

T = TypeVar("T")

EVERY = 0.5
"""Seconds between checks of Ray's processes."""

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's documented switch: 1 listens on the machine's address, to join a cluster; 0 on loopback."""


class Calls:
    """Makes calls to Ray. After a call is late or Ray is `lost`, it makes no more calls."""

    def __init__(self, deadline: float):
        self.deadline = deadline  # default, in seconds
        self._lost: Future[str] = Future()
        self._waiting: SimpleQueue[Any] = SimpleQueue()  # calls; None ends the threads
        self._idle = threading.Semaphore(0)
        """Threads that wait for a call. They never end: Linux kills the children of a thread that
        ends (PR_SET_PDEATHSIG), and one of them has started Ray."""
        self._processes: Mapping[str, psutil.Process] = {}
        self._stopped: Counter[str] = Counter()
        """Number of consecutive checks that found each process stopped."""

    @property
    def lost(self) -> bool:
        return self._lost.done()

    def lose(self, reason: str) -> None:
        """End all calls, including waiting ones, because Ray is lost for this reason."""
        with suppress(InvalidStateError):  # keep the first reason
            self._lost.set_result(reason)

    def check(self) -> None:
        """Raise ClusterLostError if Ray is lost."""
        if self.lost:
            raise ClusterLostError(f"Ray is lost: {self._lost.result()}")

    def __call__(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a call, with a deadline of `runtime.cluster_deadline` seconds."""
        return self.within(self.deadline, what, function, *args)

    def within(self, seconds: float, what: str, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a call; ClusterLostError if it takes longer than `seconds`."""
        self.check()
        future = self._begin(partial(function, *args))
        either: list[Future[Any]] = [future, self._lost]
        wait(either, seconds, FIRST_COMPLETED)
        if not future.done():
            # a late call may still change Ray's state: no other call may rely on it
            self.lose(f"it did not {what} within {seconds:g} s")
            self.check()
        if future.exception() is not None:
            self.look(self.deadline)  # the call may have failed because Ray has died
            self.check()
        return future.result()

    def attempt(self, seconds: float, function: Callable[..., Any]) -> bool:
        """Make a call even if Ray is lost; return whether it ended in time, even with an error."""
        future = self._begin(function)
        wait([future], seconds)
        return future.done()

    def watch(self, processes: Mapping[str, psutil.Process]) -> None:
        """Mark Ray as lost once one of these processes (by name) dies or is stopped too long."""
        self._processes = processes
        threading.Thread(target=self._watch, daemon=True, name="watch over ray").start()

    def look(self, patience: float) -> None:
        """Mark Ray as lost if a process has died or was stopped for `patience` seconds."""
        for name, process in self._processes.items():
            try:
                status = process.status()
            except psutil.NoSuchProcess:
                status = psutil.STATUS_DEAD
            if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
                self.lose(f"its {name} (process {process.pid}) has died")
            elif status != psutil.STATUS_STOPPED:
                self._stopped[name] = 0
            elif self._stopped[name] * EVERY >= patience:
                self.lose(f"its {name} (process {process.pid}) is stopped")
            else:  # not by the clock: this process may have been stopped, too, by Ctrl-Z
                self._stopped[name] += 1

    def close(self) -> None:
        """End the threads that wait for a call; the others are abandoned."""
        self.lose("this process has left it")
        self._waiting.put(None)

    def _watch(self) -> None:
        while not self.lost:
            time.sleep(EVERY)
            self.look(self.deadline)

    def _begin(self, function: Callable[[], T]) -> "Future[T]":
        """Call the function in a waiting thread, or in a new one if none is waiting."""
        future: Future[T] = Future()
        self._waiting.put((future, function))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, daemon=True, name="ray call").start()
        return future

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # from Ray: raised by the waiting caller
                future.set_exception(error)
            del call, future, function  # they may keep weights alive
            self._idle.release()
        self._waiting.put(None)  # for the next thread


def processes_of_ray(session: str, raylet: str) -> dict[str, psutil.Process]:
    """Return Ray's processes on this machine, by name.

    `raylet` is the raylet's socket. The GCS of a cluster may be on another machine.
    """
    marks = {"gcs_server": session, "raylet": raylet}
    found = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        name = process.info["name"]
        if name in marks and any(marks[name] in word for word in process.info["cmdline"] or ()):
            found[name] = process
    return found


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
        # without a token, Ray writes one to the home folder, which may be read-only or visible to
        # others
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # by default, a driver without its GCS ends after a minute, too soon to save a large model
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "3600")
    # a raylet may take longer than Ray's 30 s to start; `runtime.start_deadline` is the limit
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "3600")
    # if a driver's parent is process 1, Ray concludes that the raylet is dead and ends the driver;
    # with this, it checks this process instead
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
