"""Reports of runs and of studies: an HTML page without external files.

This package imports no torch, so that a report is drawn within seconds.
"""

from collections.abc import Sequence
from pathlib import Path

from tba.report.runs import report_runs
from tba.report.study import report_study
from tba.studies.study import STUDY

__all__ = ["report"]


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the page of runs or of one study, and return its path; ValueError without data."""
    out = out and out.expanduser().resolve()  # a link that the user names is meant
    if len(folders) == 1 and (folders[0].expanduser() / STUDY).is_file():
        return report_study(folders[0].expanduser(), out)
    return report_runs(folders, out)
