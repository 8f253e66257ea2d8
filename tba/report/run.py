"""The report of one run, or of several side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from math import nan
from pathlib import Path

import numpy as np
import pandas as pd

from tba.report.draw import COLOURS, number, png, write_page
from tba.report.panels import AXES, FIGURES, Form, Panel, draw_panels
from tba.report.record import MODES, PASS, REWARD, Measure, Record, read_record
from tba.studies.results import flat


def report_runs(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the page into `out` and return its path. ValueError for a folder with nothing to draw.

    By default, `out` is the folder `report` of the run or, for several, of the working directory.
    """
    records = _records(list(dict.fromkeys(p.expanduser().resolve() for p in runs)))
    folder = out or (runs[0].expanduser() / "report" if len(records) == 1 else Path("report"))
    folder.mkdir(parents=True, exist_ok=True)
    passes = [
        e.get(PASS.value.format("sampled"), nan) for r in records for e in r.evaluation_rows()
    ]
    measure = PASS if passes and not np.isnan(passes).any() else REWARD
    figures = {
        name: png(draw_panels(panels, records), folder / f"{name}.png")
        for name, panels in {"reward": _rewards(measure), **FIGURES}.items()
    }
    values = {
        "runs": records,
        "measure": measure,
        "modes": MODES,
        "figures": figures,
        "differences": _differences(records),
        "number": number,
        "nan": nan,
    }
    return write_page(folder, "report.html", values)


def _records(paths: Sequence[Path]) -> list[Record]:
    if not paths:
        raise ValueError("name at least one run: tba report RUN")
    count = Counter(p.name for p in paths)
    records = []
    for i, path in enumerate(paths):
        name = path.name if count[path.name] == 1 else str(path)
        records.append(read_record(path, name, COLOURS[i % len(COLOURS)]))
    return records


def _rewards(measure: Measure) -> list[Panel]:
    values, stderrs = zip(*(measure.names(mode) for mode in MODES), strict=True)
    title = f"held-out {measure.label} ± standard error"
    training = [Panel("training reward", ("reward",), x=x) for x in AXES]
    form: Form = "share" if measure.share else "number"
    held_out = [Panel(title, values, form, MODES, stderrs, x, True) for x in AXES]
    return training + held_out


def _differences(records: Sequence[Record]) -> pd.DataFrame:
    """Return the config keys in which the runs differ, with a column for each run."""
    configs = [{key: json.dumps(v) for key, v in flat(r.config).items()} for r in records]
    table = pd.DataFrame(configs).drop(columns="run.folder").fillna("–").T
    return table[table.nunique(axis=1) > 1]
