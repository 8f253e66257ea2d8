"""Reports of runs and studies: an HTML page without external files.

This package does not import torch, so a report takes only seconds.
"""

from collections.abc import Sequence
from pathlib import Path

from tba.tools.report.runs import report_runs
from tba.tools.report.study import report_study
from tba.tools.study import STUDY

__all__ = ["report"]


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of one or more runs or of one study, and return its path.

    Raises ValueError if there are no data.
    """
    out = out and out.expanduser().resolve()  # a symlink that the user names is followed
    if len(folders) == 1 and (folders[0].expanduser() / STUDY).is_file():
        return report_study(folders[0].expanduser(), out)
    return report_runs(folders, out)
