"""Page of a study: for each grid, learning curves, scores against a number, and a table."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from tba.display import duration
from tba.runs.folder import Row
from tba.tools.report.compare import CLEAR, STAR
from tba.tools.report.page import NotBegun, script, with_stderr, write_page
from tba.tools.study import SEED, curve, phrase, read_ledger, read_metrics, write_results

COLUMNS = {
    "last": ("end", ""),
    "peak": ("peak", ""),
    "drop": ("drop after it", ""),
    "sampled_log_ratio": ("log(pi / ref) at the end (nats)", "{:.3f}"),
    "sampled_perplexity": ("perplexity at the end", "{:.2f}"),
    "sampled_perplexity_with_prompt": ("with prompt tokens", "{:.3f}"),
    "lag_mean": ("lag (steps)", "{:.1f}"),
    "ess": ("effective share", "{:.1%}"),
    "seconds": ("time (s)", "{:.0f}"),
}
"""Heading and format of the columns of a grid's table; the default format is the metric's."""
Colours = Mapping[Any, int]
FEW = 8
"""Maximum number of values for which each value gets a tick on the axis."""


@dataclass(frozen=True)
class Layout:
    """Layout of a grid. Runs of one setting differ only in the seed."""

    settings: pd.DataFrame
    """One row per setting and one column per key that varies; numbers are sorted."""
    lines: str | None
    """Key with a line per value: the text axis with the most values. Other keys make panels."""
    rows: pd.DataFrame  # the rows of `results.json`, with a column `setting`
    ends: pd.DataFrame
    """One row per setting; columns such as `("last", "mean")` over its finished runs, or NaN."""
    curves: pd.DataFrame
    """Samples trained on, and mean, min and max of the score, indexed by setting and step."""

    @property
    def metric(self) -> str:
        return str(self.rows["metric"].iloc[0])

    @property
    def keys(self) -> list[str]:
        """Return the keys that make panels, followed by the key that makes lines."""
        return sorted(self.settings, key=lambda key: key == self.lines)

    @property
    def numeric(self) -> list[str]:
        return [key for key in self.keys if numbers(self.settings[key])]

    @property
    def number(self) -> str | None:
        """Return the numeric key with the most values, preferably other than `lines`, or None."""
        count = self.settings.nunique()
        return max(self.numeric, key=lambda key: (key != self.lines, count[key]), default=None)

    @property
    def line_values(self) -> list[Any]:
        return [] if self.lines is None else list(self.settings[self.lines].unique())

    def line(self, setting: int) -> Any:
        return None if self.lines is None else self.settings[self.lines][setting]

    def best(self, settings: pd.Index) -> int | None:
        """Return the setting with the fewest failed runs; ties go to the highest mean score."""
        failed = (self.rows["status"] == "failed").groupby(self.rows["setting"]).sum()
        ranks = pd.DataFrame({"failed": failed, "mean": self.ends["last", "mean"]}).loc[settings]
        ranks = ranks.dropna().sort_values(["failed", "mean"], ascending=[True, False])
        return None if ranks.empty else int(ranks.index[0])

    def is_clear(self, best: int, settings: pd.Index) -> bool:
        """Return whether a setting is more than two standard errors above every other one.

        False for a single setting, or with one seed, as the spread over seeds is then unknown.
        """
        ends = self.ends["last"].loc[settings].dropna(subset="mean")
        others = ends.drop(index=best)
        errors = np.hypot(others["sem"], ends["sem"][best])
        clear = ends["mean"][best] - others["mean"] > CLEAR * errors
        return len(others) > 0 and bool(clear.all())

    def texts(self, name: str) -> pd.Series:
        """Return the mean and standard error of a column for each setting, as text."""
        of_metric = "{:.1%}" if "pass@" in self.metric else "{:.3f}"
        form = COLUMNS[name][1] or of_metric
        return self.ends[name].apply(lambda end: with_stderr(end["mean"], end["sem"], form), axis=1)


def lay_out(folder: Path, rows: pd.DataFrame) -> Layout:
    """Return the layout of a grid from its rows of the results, including `axes`."""
    axes = rows["axes"].map(_plain)
    setting, first = axes.map(json.dumps).factorize()
    rows = rows.assign(setting=setting)
    values = pd.DataFrame(list(first.map(json.loads)), dtype=object)
    partitions = pd.DataFrame({key: column.factorize()[0] for key, column in values.items()})
    varied = partitions.loc[:, partitions.any()].T.drop_duplicates().index
    settings = values[varied]  # of keys that vary together, only the first
    settings = settings.sort_values(
        list(varied), key=lambda column: column if numbers(column) else column.factorize()[0]
    )
    texts = [key for key in varied if not numbers(settings[key])]
    lines = max(texts or varied, key=lambda key: settings[key].nunique(), default=None)
    ended = rows[rows["status"] == "finished"]
    measures = ended.select_dtypes("number").astype(float).groupby(ended["setting"])
    ends = measures.agg(["mean", "sem", "min", "max"]).reindex(settings.index)
    return Layout(settings, lines, rows, ends, _curves(folder, ended))


def panels(settings: pd.DataFrame, *left_out: str | None) -> dict[str, pd.DataFrame]:
    """Group the settings by all keys except `left_out`; the title of a group lists the values."""
    kept = settings[[key for key in settings if key not in left_out]]
    titles = [title(setting) for _, setting in kept.iterrows()]
    return dict(list(settings.groupby(pd.Series(titles, settings.index, str), sort=False)))


def title(setting: pd.Series) -> str:
    return ", ".join(phrase(key, value) for key, value in setting.items())


def section(layout: Layout) -> dict[str, Any]:
    """Return the template values of the grid's section, except its figures."""
    failed = layout.rows[layout.rows["status"] == "failed"]
    return {
        "counts": counts(layout.rows["status"]),
        "table": _table(layout),
        "failures": failed.set_index("folder")["error"].to_dict(),
    }


def _table(layout: Layout) -> pd.DataFrame:
    """Return a table with a row for each setting.

    For each combination of the text axes, the best setting of the number axes is marked.
    """
    shown = layout.settings[layout.keys].map(lambda v: v if isinstance(v, str) else f"{v:g}")
    shown = shown.rename(columns=lambda key: key.removesuffix(".use"))
    shown["runs"] = layout.rows.groupby("setting")["status"].agg(counts)
    for name, (head, _) in COLUMNS.items():
        if name in layout.ends:
            shown[head] = layout.texts(name)
    blocks = panels(layout.settings, *(layout.numeric or layout.keys)).values()
    for block in blocks:
        best = layout.best(block.index)
        if len(block) > 1 and best is not None and layout.is_clear(best, block.index):
            shown.loc[best, "end"] += STAR
    return shown.loc[pd.concat(blocks).index, (shown != "–").any()]


def counts(status: pd.Series) -> str:
    """Return a text such as `30 finished, 2 failed`."""
    count = status.replace("pending", "to come").value_counts()
    names = [name for name in ("finished", "failed", "to come") if name in count]
    return ", ".join(f"{count[name]} {name}" for name in names)


def numbers(values: Iterable[Any]) -> bool:
    return all(type(v) in (int, float) for v in values)


def _plain(axes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without the seed, and with lists, tables and booleans as JSON."""
    shown = {key: value for key, value in axes.items() if key != SEED}
    for key, value in shown.items():
        if not (isinstance(value, str) or numbers([value])):
            shown[key] = json.dumps(value)
    return shown


def _curves(folder: Path, ended: pd.DataFrame) -> pd.DataFrame:
    by_run = []
    for row in ended.itertuples():
        metrics = read_metrics(folder / row.folder, "samples_trained")
        by_run.append(curve(metrics, row.metric).assign(setting=row.setting))
    if not by_run:
        return pd.DataFrame(columns=["samples", "mean", "min", "max"])
    # only steps at which all finished runs of a setting were evaluated
    at = pd.concat(by_run).reset_index().groupby(["setting", "step"])
    curves = at["score"].agg(["mean", "min", "max", "size"])
    curves["samples"] = at["samples_trained"].mean()
    runs = ended.groupby("setting").size()
    return curves[curves["size"] == runs.reindex(curves.index, level="setting")]


def report_study(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a study, by default to its folder `report`, and update `results.json`."""
    ledger = read_ledger(folder)
    rows = write_results(folder)
    page = out or folder / "report"
    begun = rows[rows.groupby("grid")["peak"].transform("count") > 0]
    if begun.empty:
        raise NotBegun(
            f"{folder} has no evaluations yet; type `tba report {folder}` again after its first run"
        )
    layouts = {grid: lay_out(folder, some) for grid, some in begun.groupby("grid", sort=False)}
    texts = [v for g in layouts.values() if not numbers(g.line_values) for v in g.line_values]
    shared = colours_of(texts)  # an objective has the same colour in all grids
    sections = []
    for grid, layout in layouts.items():
        colours = colours_of(layout.line_values) if numbers(layout.line_values) else shared
        figures = {
            "curves": _learning_curves(layout, colours),
            "against": _against(layout, colours),
        }
        shown = {kind: charts for kind, charts in figures.items() if charts}
        runs = layout.rows[["folder", "status"]].to_dict("records")
        links = [{**run, "link": link_to(folder / run["folder"], page)} for run in runs]
        sections.append({"name": grid, "figures": shown, "runs": links, **section(layout)})
    metric = rows["metric"][0].replace("_", " ")
    missing = "" if ledger.metric in (None, rows["metric"][0]) else f"; no run has {ledger.metric}"
    facts = {
        "Runs": str(len(rows)),
        "Status": counts(rows["status"]),
        "Compared by": metric + missing,
        "Time of all runs": duration(rows["seconds"].sum()),
    }
    values = {
        "title": ledger.name, "facts": facts, "sections": sections, "metric": metric,
        "data": {"axes": {}, "runs": []}, "script": script("uplot.min.js", "charts.js"),
    }  # fmt: skip
    return write_page(page, "study.html", values)


def link_to(run: Path, page: Path) -> str:
    """Return the link from the study to the page of a run or, without a page, to its folder."""
    index = run / "report" / "index.html"
    return quote(relpath(index if index.is_file() else run, page))


def colours_of(values: list[Any]) -> Colours:
    """Return the colour number of each line; None stands for the only line of a chart."""
    return {None: 0, **{v: i for i, v in enumerate(dict.fromkeys(values))}}


def _learning_curves(layout: Layout, colours: Colours) -> list[Row]:
    """Return a chart per panel of the grid, with a line for each setting."""
    settings = layout.settings
    drawn = layout.curves.index.unique(0)
    charts = []
    for panel, group in panels(settings[settings.index.isin(drawn)], layout.lines).items():
        curves = {s: layout.curves.loc[s] for s in group.index}
        lines = [_band(layout, colours, s, c["samples"], c) for s, c in curves.items()]
        charts.append(_chart(layout, panel, lines, {"label": "samples trained on"}))
    return charts


def _against(layout: Layout, colours: Colours) -> list[Row]:
    """Return charts of the final metric against a numeric key that was varied, if one exists."""
    key = layout.number
    last = layout.ends["last"].dropna(subset="mean")
    if key is None or last.empty:
        return []
    values = sorted(layout.settings[key].astype(float).unique())
    axis: Row = {"label": key, "log": bool(values[0] > 0 and values[-1] >= 10 * values[0])}
    if len(values) <= FEW:
        axis["ticks"] = values
    charts = []
    for panel, group in panels(layout.settings.loc[last.index], layout.lines, key).items():
        lines = []
        for line in panels(group, key).values():
            x = line[key].astype(float).sort_values()
            lines.append(_band(layout, colours, x.index[0], x, last.loc[x.index]))
            if key == layout.lines:
                lines[-1] |= {"name": key, "colour": 0}
        charts.append(_chart(layout, panel, lines, axis))
    return charts


def _band(
    layout: Layout, colours: Colours, setting: int, x: pd.Series, scores: pd.DataFrame
) -> Row:
    """Return a line of means over seeds, with a band from the lowest to the highest value."""
    value = layout.line(setting)
    name = layout.metric if value is None else phrase(layout.lines or "", value)[-40:]
    ends = {"low": list(scores["min"]), "high": list(scores["max"])}
    return {"name": name, "colour": colours[value], "x": list(x), "y": list(scores["mean"]), **ends}


def _chart(layout: Layout, panel: str, lines: list[Row], axis: Row) -> Row:
    """Return a chart as JSON. All charts of a grid have the same score axis."""
    name = layout.metric.replace("_", " ")
    form = "share" if "pass@" in layout.metric else "number"
    scores = pd.concat(
        [layout.curves[["min", "max"]].stack(), layout.ends["last"][["min", "max"]].stack()]
    )
    return {
        "title": f"{name}: {panel}" if panel else name,
        "form": form, "lines": lines, "x": axis,
        "most": [float(scores.min()), float(scores.max())],
    }  # fmt: skip
