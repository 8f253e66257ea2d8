"""The report of a run, of several, or of a study: an HTML page that needs nothing beside itself, and its figures as PNG files.

This package imports no torch, so that a report is there in a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tba.report.run import FIGURES, report_runs
from tba.report.study import report_study
from tba.studies.results import STUDY

__all__ = ["FIGURES", "report", "report_runs", "report_study"]


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Draws the page of one or several runs, or of one study; returns its path. ValueError for a folder with nothing to draw."""
    studies = [f for f in folders if (f.expanduser() / STUDY).is_file()]
    if not studies:
        return report_runs(folders, out)
    if len(folders) > 1:
        raise ValueError(
            f"{studies[0]} is a study, which has a page of its own: type `tba report {studies[0]}`, and name the other folders apart"
        )
    return report_study(studies[0].expanduser(), out)
