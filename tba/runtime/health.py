"""Watch over Ray's own processes on this machine, which a run cannot do without."""

import threading
from contextlib import suppress
from typing import Any

import psutil

from tba.runtime.deadline import Calls

EVERY = 0.5
"""Seconds between two looks."""


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
