"""Reports of runs and of studies: an HTML page without external files.

This package imports no torch, so that a report is drawn within seconds.
"""

from collections.abc import Sequence
from pathlib import Path

from tba.report.runs import report_runs
from tba.report.study import report_study
from tba.studies.results import STUDY

__all__ = ["report"]


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the page of runs or of one study, and return its path; ValueError without data."""
    out = out and out.expanduser().resolve()  # a link that the user names is meant
    studies = [f for f in folders if (f.expanduser() / STUDY).is_file()]
    if not studies:
        return report_runs(folders, out)
    if len(folders) > 1:
        raise ValueError(
            f"{studies[0]} is a study, which has a page of its own: type `tba report {studies[0]}`,"
            " and report the other folders separately"
        )
    return report_study(studies[0].expanduser(), out)
