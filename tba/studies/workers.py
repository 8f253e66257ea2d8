"""A process of its own for each run of a study."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from tba.config.schema import Config
from tba.studies.results import write_failed


def start(config: Config, resume: Path | None, cores: Sequence[int], log: Path) -> BaseProcess:
    """Begins the run, or goes on with the one in `resume`. How it ends is in its folder; what it prints goes to `log`: the terminal is the study's."""
    process = multiprocessing.get_context("spawn").Process(
        target=_carry_out, args=(config, resume, cores, log), name=f"tba-{log.stem}"
    )
    resource_tracker.ensure_running()  # or it would begin with the process, and unblock the signal
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # Ctrl-C is for the study, which then asks each run to stop, once
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def close(processes: Iterable[BaseProcess], seconds: float = 30.0) -> None:
    """Ends runs that are under way; they have so long to save."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(5.0)


def _carry_out(config: Config, resume: Path | None, cores: Sequence[int], log: Path) -> None:
    """In the process: before torch is imported, what it reads from the environment."""
    os.setsid()  # a terminal that closes ends the study, which has its runs save first
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(len(cores))
    from tba.run import run
    from tba.runtime.placement import Place

    Place("cpu", tuple(cores)).take()
    try:
        run(config, resume)
    except Exception as error:
        last = " ".join(traceback.format_exception_only(error)[-1].split())
        write_failed(
            Path(config.run.folder),
            last.removeprefix(f"{type(error).__module__}."),
            traceback.format_exc(),
        )


def _leave_with_parent() -> None:
    """A study that was killed leaves no runs behind: they save and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        parent.join(timeout=5.0)
    os.kill(os.getpid(), signal.SIGTERM)
