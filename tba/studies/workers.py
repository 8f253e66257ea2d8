"""Processes of a sweep, one for each run. `tba.studies.worker` is what they execute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tba.config.schema import Config

Worker = subprocess.Popen[str]


def start(config: Config, resume: Path | None, cores: Sequence[int], log: Path) -> Worker:
    """Start a run, or continue the one in `resume`; its output goes to the file `log`.

    The process has a session of its own, so that Ctrl-C reaches the sweep only, which then asks
    each run to stop once. It ends when its standard input is closed: a sweep that was killed leaves
    no runs behind.
    """
    threads = str(len(cores))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    job = {
        "config": config.nested(),
        "resume": None if resume is None else str(resume),
        "cores": list(cores),
        "paths": sys.path,
    }
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tba.studies.worker"], stdin=subprocess.PIPE, stdout=file,
            stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # a process that died at once is noticed by its exit status
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    return process


def has_ended(process: Worker) -> bool:
    if process.poll() is None:
        return False
    assert process.stdin is not None
    process.stdin.close()
    return True


def close(processes: Iterable[Worker], seconds: float = 30.0) -> None:
    """Ask the processes to save and to stop, and kill those that have not ended in time."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)
        has_ended(process)
