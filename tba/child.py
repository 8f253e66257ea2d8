"""Child processes that end when this process does, also if it is killed.

`Child("package.module:function", *arguments)` calls that function in a new process, which has a
session of its own: Ctrl-C does not reach it, and a kill reaches its whole group. Standard input is
the child's link to its parent. It carries the arguments, and then nothing: when its other end
closes, the parent is gone. What the child does then is decided by the function, which calls
`kill_with_parent` (the kernel ends the group at once) or `wait_for_parent` (in a thread, if it has
other work). A child that needs further messages gets a descriptor of its own, see `pass_fds`.
"""

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

MARK = "TBA_CHILD"
"""Environment variable of a child, which all processes that it starts inherit."""

STARTED = 0
"""Number of the first reply of a child that answers calls."""

# not multiprocessing, which would run the user's script again and forbid processes of its own
CODE = """
import json, pkgutil, sys
with open(0, "rb", buffering=0, closefd=False) as parent:
    path, arguments = json.loads(parent.readline())
sys.path[:] = path or sys.path
pkgutil.resolve_name(sys.argv[1])(*arguments)
"""


class Child:
    """A process that calls `function` ("package.module:name") with arguments that JSON can hold.

    OSError if it cannot start: no memory, or too many processes or open files.
    """

    def __init__(
        self,
        function: str,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        output: IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        inherited: Mapping[str, str] | None = None,
        python: str | None = None,
    ):
        """`inherited` replaces this process's environment; `python`, its interpreter and path."""
        self._mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [python or sys.executable, "-P", "-c", CODE, function],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            pass_fds=pass_fds,
            start_new_session=True,
            env={**(inherited or os.environ), **(environment or {}), MARK: self._mark},
        )
        assert self.process.stdin is not None
        self._link = self.process.stdin
        with suppress(BrokenPipeError):  # it has died at once, which its status says
            path = sys.path if python is None else []
            self._link.write(json.dumps([path, arguments]).encode() + b"\n")
            self._link.flush()

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self.process.poll()

    def end(self, seconds: float) -> None:
        """Close the link, wait these seconds for the process to end, and kill what is left."""
        self._close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Kill the process, its group, and the processes that it has started in other groups."""
        started = started_by(self.process.pid, self._mark)
        if self.status is None:  # else another process may have its number
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        kill(started)
        self._close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def _close(self) -> None:
        with suppress(BrokenPipeError):
            self._link.close()


def started_by(pid: int, mark: str) -> list[psutil.Process]:
    """Return the processes that this one has started, and the processes that they have started.

    A process whose parent has ended is found by the mark in its environment.
    """
    processes: list[psutil.Process] = []
    with suppress(psutil.Error, OSError):  # it has ended, or too many files are open
        processes += psutil.Process(pid).children(recursive=True)
    with suppress(OSError):
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it ended, or belongs to another user
                if process.pid != pid and process.environ().get(MARK) == mark:
                    processes.append(process)
    return processes


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill these processes, also those that left the group by a session of their own."""
    for process in processes:
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            process.kill()


def kill_with_parent() -> None:
    """In a child: let the kernel end the whole group when the parent ends.

    When the parent's end of the link closes, the kernel sends a signal to the group, which ends it
    even if a function holds the interpreter lock. On Linux it is SIGKILL, which nothing can ignore.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # mask and ignored signals are inherited
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    link = _take_link()
    fcntl.fcntl(link, fcntl.F_SETOWN, -os.getpgrp())
    if sys.platform == "linux":
        fcntl.fcntl(link, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(link, fcntl.F_SETFL, os.O_ASYNC)


def wait_for_parent() -> None:
    """In a child: return when the parent has ended."""
    os.read(_take_link(), 1)


def _take_link() -> int:
    """Return the link. Standard input is empty from now on, also for processes started later."""
    link = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return link


def clean_up_after_parent(mark: str, folder: str, parent: int) -> None:
    """Main function of a watcher: end what a parent that was killed has left."""
    wait_for_parent()
    clean_up(mark, Path(folder), spared=parent)
    if not psutil.pid_exists(parent):
        time.sleep(1.0)
        clean_up(mark, Path(folder), spared=parent)  # what it was about to start


def clean_up(mark: str, folder: Path, spared: int) -> None:
    """Kill the processes with this mark and those that write to the folder, and remove it.

    A process that shows a title instead of its command line has no environment to read a mark from.
    The process of number `spared` stays.
    """
    until = time.monotonic() + 5.0
    while (left := _left(mark, folder) - {spared, os.getpid()}) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _left(mark: str, folder: Path) -> set[int]:
    """Return the numbers of the processes with this mark, and of those that write to the folder."""
    left = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            written = (Path(file.path) for file in process.open_files() if file.mode != "r")
            marked = process.environ().get(MARK) == mark
            if marked or any(file.is_relative_to(folder) for file in written):
                left.add(process.pid)
    return left
