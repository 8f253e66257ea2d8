"""Cleanup after a run that was killed: Ray's agents outlive a driver that ended by SIGKILL.

A small process, which starts before Ray, holds one end of a pipe. When the other end closes,
because the run ended or was killed, it kills what is left of the run's Ray and removes its session
folder.
"""

import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

SESSION = re.compile(r"session_(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6})_(\d+)")
"""Name of a session folder: the time at which Ray was started, and the process that did it."""

EVERY = 5.0
"""Seconds between two looks at the processes of Ray. Younger ones end by themselves."""


class Reaper:
    """A watcher over the Ray that this process starts from now on, outside its process group.

    Ray makes the folders of its sessions in `home`.
    """

    def __init__(self, home: Path):
        since = f"{datetime.now():%Y-%m-%d_%H-%M-%S_%f}"
        # by its path, so that it imports nothing else of the package
        self._command = [sys.executable, __file__, str(os.getpid()), str(home), since]
        self._session = ""
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self.follow(self._session)

    def follow(self, session: str) -> None:
        """Tell the watcher the folder of the session, which it finds by its name until then."""
        self._session = session
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has been killed
            os.write(self._process.stdin.fileno(), session.encode())

    def keep(self) -> None:
        """Start the watcher again if it has been killed."""
        if self._process.poll() is not None:
            self._process.communicate()  # closes the pipe
            self._start()

    def finish(self) -> None:
        """Clean up now, and return when that is done."""
        self.keep()
        self._process.communicate(timeout=30)  # closes the pipe


def sessions(driver: int, home: Path, since: str) -> list[Path]:
    """Return the folders of sessions that a driver of this number has started since this time."""
    named = [(SESSION.fullmatch(path.name), path) for path in home.glob(f"session_*_{driver}")]
    return [path for match, path in named if match and match[1] >= since]


def family(driver: int, sessions: Iterable[Path]) -> set[psutil.Process]:
    """Return children of the driver whose command names a session, and their descendants."""
    members: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):  # the driver has ended
        for child in psutil.Process(driver).children():
            if _names(child, sessions):
                members |= {child, *_descendants(child)}
    return members


def left(known: Set[psutil.Process], sessions: Iterable[Path], driver: int) -> set[psutil.Process]:
    """Return which known processes still run, others of the sessions, and their descendants.

    The driver, which may still run, is not one of them.
    """
    others = (process for process in psutil.process_iter() if process.pid != driver)
    found = {*known, *(p for p in others if _names(p, sessions) or _writes(p, sessions))}
    for process in tuple(found):
        found.update(_descendants(process))
    return {process for process in found if _runs(process)}


def _names(process: psutil.Process, sessions: Iterable[Path]) -> bool:
    """Return whether an option of the process names a session, as those of Ray's agents do."""
    with suppress(psutil.Error):  # it ended, or is a zombie, or another user's
        options = [word for word in process.cmdline() if word.startswith("-")]
        return any(str(session) in option for option in options for session in sessions)
    return False


def _writes(process: psutil.Process, sessions: Iterable[Path]) -> bool:
    """Return whether the process writes to a file of a session, as Ray's agents do to their logs.

    They replace their command line by a title, and have lost their parent if it has ended.
    """
    with suppress(psutil.Error, OSError):
        written = [Path(file.path) for file in process.open_files() if file.mode != "r"]
        return any(path.is_relative_to(session) for path in written for session in sessions)
    return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def main() -> None:
    driver, home, since = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    known: set[psutil.Process] = set()
    before: list[int] = []
    told = b""

    def started() -> list[Path]:
        return [Path(os.fsdecode(told))] if told else sessions(driver, home, since)

    while True:
        if select.select([sys.stdin], [], [], EVERY)[0]:
            read = os.read(sys.stdin.fileno(), 4096)
            if not read:  # the other end is closed
                break
            told = read
        now = psutil.pids()
        if now != before:  # looking at each process takes longer
            known, before = known | family(driver, started()), now
    clean_up(known | family(driver, started()), started(), driver)
    if not psutil.pid_exists(driver):
        time.sleep(1.0)
        clean_up(set(), started(), driver)  # what it was about to start when it was killed


def clean_up(known: Set[psutil.Process], started: Sequence[Path], driver: int) -> None:
    """Kill what is left of these sessions, and remove their folders."""
    until = time.monotonic() + 5.0
    while (remaining := left(known, started, driver)) and time.monotonic() < until:
        for process in remaining:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    for session in started:
        shutil.rmtree(session, ignore_errors=True)


if __name__ == "__main__":
    main()
