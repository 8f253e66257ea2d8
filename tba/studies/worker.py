"""The process of one run of a sweep: `python -m tba.studies.worker`, with its job on stdin."""

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from tba.config.schema import parse
from tba.studies.results import write_failed


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
