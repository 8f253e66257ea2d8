"""Ends what a killed run leaves behind. Ray's own agents outlive a driver that died by SIGKILL, some of them for minutes.

A small process holds one end of a pipe. When the other end closes, because the run ended or was killed, it kills every
process that carries the run's mark in its environment and removes Ray's session folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "TBA_RUN_MARK"


@dataclass
class Reaper:
    """The watching process, from the run's side."""

    process: subprocess.Popen[str]

    def session(self, folder: str) -> None:
        """Names Ray's session folder, to be removed at the end."""
        assert self.process.stdin is not None
        print(folder, file=self.process.stdin, flush=True)

    def finish(self) -> None:
        """Has it clean up now; returns when that is done."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def watch() -> Reaper:
    """Marks this process, so that all its descendants carry the mark, and starts the watcher outside its process group."""
    os.environ[MARK] = uuid.uuid4().hex
    command = [sys.executable, __file__, os.environ[MARK], str(os.getpid())]  # by its path: it imports nothing else of ours
    return Reaper(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True, stdout=subprocess.DEVNULL))


def reap(mark: str, spare: set[int]) -> None:
    """Kills every process of this user with that mark, except those in `spare`."""
    for process in psutil.process_iter():
        try:
            if process.pid not in spare and process.environ().get(MARK) == mark:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def main() -> None:
    sessions = [line.strip() for line in sys.stdin]  # until the run has ended, however it did
    reap(mark=sys.argv[1], spare={os.getpid(), int(sys.argv[2])})
    for session in sessions:
        if Path(session).name.startswith("session_"):
            shutil.rmtree(session, ignore_errors=True)


if __name__ == "__main__":
    main()
