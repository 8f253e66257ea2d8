"""Child processes that end when this process does, even if it is killed.

`Child("package.module:function", *arguments)` calls the function in a new process with its own
session: Ctrl-C does not reach it, and a kill reaches its whole group. Standard input links the
child to its parent. It carries only the arguments; when its other end closes, the parent has ended.
To react, the function calls `scoring.worker.kill_with_parent` (the kernel ends the group at once)
or `wait_for_parent` (in a thread, if it has other work). Further messages to a child need a
separate descriptor, see `pass_fds`.
"""

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
"""Environment variable that marks a child and all processes that it starts."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""

# not multiprocessing, which would rerun the user's script and forbid the child to start processes
CODE = """
import json, os, pkgutil, signal, sys
with open(0, "rb", buffering=0, closefd=False) as parent:
    path, ignored, arguments = json.loads(parent.readline())
sys.path[:] = path or sys.path
def handle(handler=signal.SIG_DFL):
    for number in ignored: signal.signal(number, handler)
handle(lambda *_: None)  # programs that it starts do not inherit it, unlike SIG_IGN
os.register_at_fork(after_in_child=handle)
pkgutil.resolve_name(sys.argv[1])(*arguments)
"""


class Child:
    """Process that calls `function` ("package.module:name") with JSON-serialisable arguments.

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
        ignored: Sequence[int] = STOPS,
    ):
        """`inherited` replaces this process's environment, and `python` its interpreter.

        Only the same interpreter gets this process's module path. The `ignored` signals may be
        sent to every process of a job; this process reacts to them, and the child ends with it.
        """
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
        with suppress(BrokenPipeError):  # it died at once, as its status says
            path = module_path() if python in (None, sys.executable) else []
            self._link.write(json.dumps([path, ignored, arguments]).encode() + b"\n")
            self._link.flush()

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self.process.poll()

    def end(self, seconds: float) -> None:
        """Close the link, wait up to `seconds` for the process to end, and kill the rest."""
        self._close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Kill the process, its group, and the processes that it started in other groups."""
        started = started_by(self.process.pid, self._mark)  # first: orphans lose their parent
        if self.status is None:  # else another process may have its PID
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        kill(started)
        self._close()  # after the kill, so that nothing of the child reacts to it
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def _close(self) -> None:
        with suppress(BrokenPipeError):
            self._link.close()


def module_path() -> list[str]:
    """Return the entries of `sys.path`, without those that imports ignore, such as a Path."""
    return [each for each in sys.path if isinstance(each, str)]


def started_by(pid: int, mark: str) -> list[psutil.Process]:
    """Return all descendants of a process.

    A descendant whose parent has ended is found by the mark in its environment.
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
    """Kill these processes, including any that left the group for a new session."""
    for process in processes:
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            process.kill()


def wait_for_parent() -> None:
    """In a child: return when the parent has ended."""
    link = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # standard input is empty, also for processes started later
    os.close(nothing)
    os.read(link, 1)


def clean_up_after_parent(mark: str, folder: str, parent: int) -> None:
    """Main function of a watcher: clean up after a parent that was killed."""
    wait_for_parent()
    clean_up(mark, Path(folder), spared=parent)
    if not psutil.pid_exists(parent):
        time.sleep(1.0)
        clean_up(mark, Path(folder), spared=parent)  # processes that it was just starting


def clean_up(mark: str, folder: Path, spared: int) -> None:
    """Kill the processes that have this mark or write to the folder, and remove the folder.

    The mark cannot be read from a process that has replaced its command line with a title.
    The process with PID `spared` is left alone.
    """
    until = time.monotonic() + 5.0
    killed = True
    while killed and time.monotonic() < until:
        killed = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
                if process.status() == psutil.STATUS_ZOMBIE or process.pid in (spared, os.getpid()):
                    continue
                written = (Path(file.path) for file in process.open_files() if file.mode != "r")
                marked = process.environ().get(MARK) == mark
                if marked or any(file.is_relative_to(folder) for file in written):
                    killed = True
                    process.kill()
        time.sleep(0.05 * killed)
    shutil.rmtree(folder, ignore_errors=True)
