"""Reports of runs and of studies: an HTML page without external files, and its figures as PNGs.

This package imports no torch, so that a report is drawn within seconds.
"""

import json
from collections import Counter
from collections.abc import Sequence
from math import nan
from pathlib import Path

import pandas as pd

from tba.report.draw import COLOURS, number, write_page
from tba.report.panels import FIGURES, draw_panels, rewards
from tba.report.record import MODES, PASS, REWARD, Record, read_record
from tba.report.study import report_study
from tba.studies.results import STUDY, flat

__all__ = ["report", "report_runs", "report_study"]


def report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the page of one or several runs, or of one study, and return its path.

    ValueError for a folder with nothing to draw.
    """
    studies = [f for f in folders if (f.expanduser() / STUDY).is_file()]
    if not studies:
        return report_runs(folders, out)
    if len(folders) > 1:
        raise ValueError(
            f"{studies[0]} is a study, which has a page of its own: type `tba report {studies[0]}`,"
            " and report the other folders separately"
        )
    return report_study(studies[0].expanduser(), out)


def report_runs(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the page into `out` and return its path. ValueError for a folder with nothing to draw.

    By default, `out` is the folder `report` of the run or, for several, of the working directory.
    """
    paths = list(dict.fromkeys(path.expanduser().resolve() for path in runs))
    if not paths:
        raise ValueError("name at least one run: tba report RUN")
    count = Counter(path.name for path in paths)
    records = []
    for i, path in enumerate(paths):
        name = path.name if count[path.name] == 1 else str(path)
        records.append(read_record(path, name, COLOURS[i % len(COLOURS)]))
    folder = out or (runs[0].expanduser() / "report" if len(paths) == 1 else Path("report"))
    passes = pd.concat(r.evaluations.reindex(columns=[PASS.names("sampled")[0]]) for r in records)
    graded = not passes.empty and bool(passes.notna().all(axis=None))
    measure = PASS if graded else REWARD
    panels = {"reward": rewards(measure), **FIGURES}
    figures = {name: draw_panels(own, records) for name, own in panels.items()}
    values = {
        "runs": records,
        "measure": measure,
        "modes": MODES,
        "differences": _differences(records),
        "number": number,
        "nan": nan,
    }
    return write_page(folder, "report.html", values, figures)


def _differences(records: Sequence[Record]) -> pd.DataFrame:
    """Return the config keys in which the runs differ, with a column for each run."""
    configs = [{key: json.dumps(v) for key, v in flat(r.config).items()} for r in records]
    keys = pd.DataFrame(configs).drop(columns="run.folder").fillna("–").T
    return keys[keys.nunique(axis=1) > 1]
