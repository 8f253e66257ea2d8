"""The process of one run of a sweep: `python -m tba.studies.worker`, with the job on stdin.

The job is one line of JSON. The environment must set `OMP_NUM_THREADS` before torch is imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from tba.config.loading import parse
from tba.config.schema import Config
from tba.studies.results import write_failed


def main() -> None:
    sweep = os.dup(sys.stdin.fileno())
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_sweep, args=(sweep,), daemon=True).start()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())  # the processes of the run read nothing here
    sys.path[:] = job["paths"]  # the plug-ins of the study are found where the sweep found them
    resume = None if job["resume"] is None else Path(job["resume"])
    _carry_out(parse(job["config"]), resume, tuple(job["cores"]))


def _carry_out(config: Config, resume: Path | None, cores: tuple[int, ...]) -> None:
    """Run to the end. Whatever the outcome is, the run's folder has it."""
    from tba.run import run
    from tba.runtime.placement import Place

    Place("cpu", cores).take()
    try:
        run(config, resume)
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
