"""Ends what a killed run leaves behind. Ray's own agents outlive a driver that died by SIGKILL, some of them for minutes.

A small process holds one end of a pipe and remembers the processes of the run's Ray. When the other end closes, because
the run ended or was killed, it kills those that are left and removes Ray's session folder.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

EVERY = 2.0
"""Seconds between two looks at which processes there are."""


@dataclass
class Reaper:
    """The watching process, from the run's side."""

    process: subprocess.Popen[str]

    def finish(self) -> None:
        """Has it clean up now; returns when that is done."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def watch(session: str) -> Reaper:
    """Starts the watcher over the Ray with this session folder, outside this process group. By its path: it imports nothing else of ours."""
    command = [sys.executable, __file__, str(os.getpid()), session]
    return Reaper(
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )
    )


def family(driver: int, session: str) -> set[psutil.Process]:
    """The driver's children, but for this process, that name the session in their command line, and all their descendants."""
    found: set[psutil.Process] = set()
    try:
        children = psutil.Process(driver).children()
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            if child.pid != os.getpid() and any(session in word for word in child.cmdline()):
                found |= {child, *child.children(recursive=True)}
        except psutil.Error:  # it ended, or is a zombie
            continue
    return found


def main() -> None:
    driver, session = int(sys.argv[1]), sys.argv[2]
    known = family(driver, session)
    while not select.select([sys.stdin], [], [], EVERY)[
        0
    ]:  # readable only once the pipe has closed
        known |= family(driver, session)
    for process in known:
        try:
            for left in [process, *process.children(recursive=True)]:
                left.kill()
        except psutil.Error:
            continue
    if Path(session).name.startswith("session_"):
        shutil.rmtree(session, ignore_errors=True)


if __name__ == "__main__":
    main()
