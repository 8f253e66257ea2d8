"""The process of one run of a sweep: `start` begins `python -m tba.studies.worker`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from tba.config.loading import parse
from tba.config.schema import Config
from tba.studies.results import write_failed

Worker = subprocess.Popen[str]


def start(config: Config, resume: Path | None, cores: Sequence[int], log: Path) -> Worker:
    """Start a run, or continue the one in `resume`; its output goes to the file `log`.

    The process has a session of its own, so that Ctrl-C reaches the sweep only, which then asks
    each run to stop once. It ends when its standard input is closed: a sweep that was killed leaves
    no runs behind.
    """
    threads = str(len(cores))  # read when torch is imported
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


def close(processes: Collection[Worker], seconds: float = 30.0) -> None:
    """Ask the processes to save and to stop, and kill those that have not ended in time."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate(timeout=5.0)


def main() -> None:
    """Carry out the job that standard input has. The run's folder has the outcome, also an error.

    The job is one line of JSON. After it, standard input stays open for as long as the sweep lives.
    """
    sweep = os.dup(sys.stdin.fileno())
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_sweep, args=(sweep,), daemon=True).start()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())  # the processes of the run read nothing here
    sys.path[:] = job["paths"]  # the plug-ins of the study are found where the sweep found them
    from tba.run import run
    from tba.runtime.placement import Place

    config, resume = parse(job["config"]), job["resume"]
    Place("cpu", tuple(job["cores"])).take()
    try:
        run(config, None if resume is None else Path(resume))
    except Exception as error:
        line = " ".join(traceback.format_exception_only(error)[-1].split())
        line = line.removeprefix(f"{type(error).__module__}.")
        write_failed(Path(config.run.folder), line, traceback.format_exc())


def _stop_with_sweep(sweep: int) -> None:
    """Save and end when the sweep is gone, which closes its end of the pipe."""
    os.read(sweep, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
