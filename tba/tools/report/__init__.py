"""Reports of runs and studies: an HTML page without external files.

This package does not import torch, so a report takes only seconds.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tba.runs.status import status_of
from tba.tools.report.page import NotBegun
from tba.tools.report.runs import report_runs
from tba.tools.report.study import report_study
from tba.tools.study import STUDY

__all__ = ["report", "watch"]

EVERY = 5.0
"""Minimum number of seconds between two versions of a page that is watched."""
SHARE = 0.01
"""Largest share of a core that writing them takes."""


def report(folders: Sequence[Path], out: Path | None = None, reload: float = 0.0) -> Path:
    """Write the page of one or more runs or of one study, and return its path.

    With `reload`, an open page of runs loads itself again after that many seconds. Raises
    ValueError if there are no data.
    """
    out = out and out.expanduser().resolve()  # a symlink that the user names is followed
    if len(folders) == 1 and _is_study(folders[0]):
        return report_study(folders[0].expanduser(), out)
    return report_runs(folders, out, reload)


def watch(
    folders: Sequence[Path], out: Path | None, tell: Callable[[str], None], every: float = EVERY
) -> Path:
    """Write the page again and again until no run is running, or until an interrupt.

    `tell` receives the state of the runs after each version. The last version of the page does not
    reload. Raises ValueError as `report` does.
    """
    for study in filter(_is_study, folders):
        raise ValueError(f"--watch is for runs; type `tba report {study}/GRID/* --watch`")
    pause = every
    try:
        while running := [path for path in folders if status_of(path.expanduser()).is_running]:
            began = time.process_time()
            try:
                report(folders, out, pause)
                states = {path: status_of(path.expanduser()) for path in folders}
                tell("; ".join(f"{path} {state.progress}" for path, state in states.items()))
            except NotBegun:
                tell(f"waiting for the first step of {running[0]}")
            pause = max(every, (time.process_time() - began) / SHARE)
            time.sleep(pause)
    except KeyboardInterrupt:
        tell("no longer watching")
    return report(folders, out)


def _is_study(folder: Path) -> bool:
    return (folder.expanduser() / STUDY).is_file()
