"""The page of a study: for each grid its curves, scores against a number, costs, and tables."""

from collections.abc import Iterable, Mapping
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from tba.report.layout import Layout, counts, lay_out, numbers, panels, section, title
from tba.report.page import duration, script, write_page
from tba.runs.log import Row
from tba.studies.results import phrase, read_ledger, write_results

COSTS = {
    "sampled_log_ratio": "log(pi / ref) at the end (nats per response)",
    "sampled_perplexity": "perplexity under the reference at the end",
    "sampled_perplexity_with_prompt": "perplexity at the end, prompt tokens counted",
    "seconds": "time of a run (s)",
}
Colours = Mapping[Any, int]
Published = Mapping[str, Mapping[str, float]]
FEW = 8
"""Most values of a number that each have a tick on its axis."""


def report_study(folder: Path, out: Path | None = None) -> Path:
    """Draw the page of a study, by default into its folder `report`, and update `results.json`."""
    ledger, rows, page = read_ledger(folder), write_results(folder), out or folder / "report"
    begun = rows[rows.groupby("grid")["peak"].transform("count") > 0]
    if begun.empty:
        raise ValueError(
            f"{folder} has no evaluations yet; type `tba report {folder}` again after its first run"
        )
    layouts = {grid: lay_out(folder, own) for grid, own in begun.groupby("grid", sort=False)}
    texts = [v for g in layouts.values() if not numbers(g.line_values) for v in g.line_values]
    shared = colours_of(texts)  # an objective looks the same in all grids
    sections = []
    for grid, layout in layouts.items():
        own = colours_of(layout.line_values) if numbers(layout.line_values) else shared
        figures = {
            "curves": _curves(layout, own),
            "against": _against(layout, own),
            "fronts": _fronts(layout, own, ledger.published),
        }
        shown = {kind: charts for kind, charts in figures.items() if charts}
        runs = layout.rows[["folder", "status"]].to_dict("records")
        links = [{**run, "link": link_to(folder / run["folder"], page)} for run in runs]
        sections.append({"name": grid, "figures": shown, "runs": links, **section(layout)})
    metric = rows["metric"][0].replace("_", " ")
    facts = {
        "Runs": str(len(rows)),
        "Status": counts(rows["status"]),
        "Compared by": metric,
        "Time of all runs": duration(rows["seconds"].sum()),
    }
    values = {
        "title": ledger.name, "facts": facts, "sections": sections, "metric": metric,
        "data": {"axes": {}, "runs": []}, **script("uplot.min.js", "charts.js"),
    }  # fmt: skip
    return write_page(page, "study.html", values)


def link_to(run: Path, page: Path) -> str:
    """Return the link from the study to the page of a run or, if it has none, to its folder."""
    own = run / "report" / "index.html"
    return quote(relpath(own if own.is_file() else run, page))


def colours_of(values: list[Any]) -> Colours:
    """Return the number of the colour of each line; None is the only line of a chart."""
    return {None: 0, **{v: i for i, v in enumerate(dict.fromkeys(values))}}


def _curves(layout: Layout, colours: Colours) -> list[Row]:
    """Return a chart for each value of what else was varied, with a line for each setting."""
    settings, drawn = layout.settings, layout.curves.index.unique(0)
    charts = []
    for panel, own in panels(settings[settings.index.isin(drawn)], layout.lines).items():
        curves = {s: layout.curves.loc[s] for s in own.index}
        lines = [_band(layout, colours, s, c["samples"], c) for s, c in curves.items()]
        charts.append(_chart(layout, panel, lines, {"label": "samples trained on"}))
    return charts


def _against(layout: Layout, colours: Colours) -> list[Row]:
    """Return charts of the metric at the end against a number that was varied, if there is one."""
    key, last = layout.number, layout.ends["last"].dropna(subset="mean")
    if key is None or last.empty:
        return []
    values = sorted(layout.settings[key].astype(float).unique())
    axis: Row = {"label": key, "log": _spans_a_decade(values)}
    if len(values) <= FEW:
        axis["ticks"] = values
    charts = []
    for panel, own in panels(layout.settings.loc[last.index], layout.lines, key).items():
        lines = []
        for line in panels(own, key).values():
            x = line[key].astype(float).sort_values()
            lines.append(_band(layout, colours, x.index[0], x, last.loc[x.index]))
            if key == layout.lines:
                lines[-1] |= {"name": key, "colour": 0}
        charts.append(_chart(layout, panel, lines, axis))
    return charts


def _fronts(layout: Layout, colours: Colours, published: Published) -> list[Row]:
    """Return charts of the metric against each cost: settings, the Pareto front, and `published`.

    A published result is drawn where it has both scores.
    """
    charts = []
    for cost, label in COSTS.items():
        both = layout.ends[[cost, "last"]] if cost in layout.ends else pd.DataFrame()
        both = both.dropna(subset=[(cost, "mean"), ("last", "mean")]) if len(both) else both
        if len(both) < 2:
            continue
        x, y = both[cost, "mean"].sort_values(), both["last", "mean"]
        spread = both.xs("sem", axis=1, level=1).fillna(0)
        lines = []
        for s in x.index:
            name, colour = title(layout.settings.loc[s, layout.keys[::-1]]), layout.line(s)
            ends = {"left": x[s] - spread[cost][s], "right": x[s] + spread[cost][s]}
            ends |= {"low": y[s] - spread["last"][s], "high": y[s] + spread["last"][s]}
            bars = {key: [value] for key, value in ends.items()}
            lines.append({**_points(name, colours[colour], [x[s]], [y[s]]), **bars})
        front = pareto(x, y)
        lines.append({**_points("front", None, x[front], y[front]), "points": False, "steps": True})
        for name, own in published.items():
            if {cost, layout.metric} <= own.keys():
                point = _points(name, None, [own[cost]], [own[layout.metric]])
                lines.append({**point, "hollow": True})
        cheapest = "  ·  ".join(title(layout.settings.loc[s, layout.keys[::-1]]) for s in front)
        axis = {"label": label, "log": _spans_a_decade(list(x))}
        charts.append(_chart(layout, label, lines, axis) | {"note": f"front: {cheapest}"})
    return charts


def pareto(costs: pd.Series, scores: pd.Series) -> list[int]:
    """Return the labels of the points that score higher than all cheaper ones, cheapest first."""
    points = pd.DataFrame({"cost": costs, "score": scores})
    points = points.sort_values(["cost", "score"], ascending=[True, False])
    cheaper = points["score"].cummax().shift(fill_value=float("-inf"))
    return list(points.index[points["score"] > cheaper])


def _spans_a_decade(values: list[float]) -> bool:
    """Return whether an axis of these values, from the lowest to the highest, is logarithmic."""
    return bool(values[0] > 0 and values[-1] >= 10 * values[0])


def _points(name: str, colour: int | None, x: Iterable[float], y: Iterable[float]) -> Row:
    return {"name": name, "colour": colour, "x": list(x), "y": list(y), "points": True}


def _band(
    layout: Layout, colours: Colours, setting: int, x: pd.Series, scores: pd.DataFrame
) -> Row:
    """Return a line of means over seeds, with a band from the lowest to the highest."""
    value = layout.line(setting)
    name = layout.metric if value is None else phrase(layout.lines or "", value)[-40:]
    ends = {"low": list(scores["min"]), "high": list(scores["max"]), "points": False}
    return {**_points(name, colours[value], x, scores["mean"]), **ends}


def _chart(layout: Layout, panel: str, lines: list[Row], axis: Row) -> Row:
    """Return a chart as JSON. All charts of a grid have the same scale of scores."""
    name, form = layout.metric.replace("_", " "), "share" if "pass@" in layout.metric else "number"
    scores = pd.concat(
        [layout.curves[["min", "max"]].stack(), layout.ends["last"][["min", "max"]].stack()]
    )
    return {
        "title": f"{name}: {panel}" if panel else name,
        "form": form, "lines": lines, "x": axis,
        "most": [float(scores.min()), float(scores.max())],
    }  # fmt: skip
