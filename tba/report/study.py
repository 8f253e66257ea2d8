"""The page of a study: for each grid its curves, scores against a number, costs, and tables."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from os.path import relpath
from pathlib import Path
from textwrap import fill
from typing import Any
from urllib.parse import quote

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from tba.report.layout import Layout, counts, lay_out, numbers, panels, section, title
from tba.report.page import write_page
from tba.runs.files import own_folder
from tba.studies.results import phrase, read_ledger, write_results

COSTS = {
    "sampled_log_ratio": "log(pi / ref) at the end (nats per response)",
    "sampled_perplexity": "perplexity under the reference at the end",
    "sampled_perplexity_with_prompt": "perplexity at the end, prompt tokens counted",
    "seconds": "time of a run (s)",
}
# after Okabe and Ito, for colour-blind readers
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#c2578f", "#e69f00", "#4ba6dc", "#6b4fa0",
    "#22262d", "#8c5a3c", "#7f8c1f", "#e8a0bf", "#17a2a2",
)  # fmt: skip
GREY, RULE = "#5b6472", "#e4e8ee"
Styles = Mapping[Any, dict[str, Any]]
Published = Mapping[str, Mapping[str, float]]
STYLES: list[dict[str, Any]] = [
    {"color": colour, "marker": marker, "linestyle": "-" if i < 7 else (0, (4, 1.5))}
    for i, (colour, marker) in enumerate(zip(COLOURS, "osD^vPXosD^v", strict=True))
]


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
    shared = styles_for(texts)  # an objective looks the same in all grids
    sections = []
    figures: dict[str, Figure] = {}
    for grid, layout in layouts.items():
        own = styles_for(layout.line_values) if numbers(layout.line_values) else shared
        drawn = {
            "curves": _curves(layout, own),
            "against": _against(layout, own),
            "fronts": _fronts(layout, own, ledger.published),
        }
        shown = {kind: figure for kind, figure in drawn.items() if figure is not None}
        figures |= {f"{grid}_{kind}": figure for kind, figure in shown.items()}
        runs = layout.rows[["folder", "status"]].to_dict("records")
        links = [{**run, "link": link_to(folder / run["folder"], page)} for run in runs]
        sections.append({"name": grid, "figures": list(shown), "runs": links, **section(layout)})
    metric = rows["metric"][0].replace("_", " ")
    facts = {
        "Runs": str(len(rows)),
        "Status": counts(rows["status"]),
        "Compared by": metric,
        "Time of all runs": f"{rows['seconds'].sum() / 3600:.2f} h",
    }
    values = {"name": ledger.name, "facts": facts, "sections": sections, "metric": metric}
    return write_page(page, "study.html", {**values, "pictures": write_pictures(page, figures)})


def write_pictures(folder: Path, figures: Mapping[str, Figure]) -> dict[str, str]:
    """Write each figure as `NAME.png`, and return the files in base64, for the page."""
    own_folder(folder).mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, figure in figures.items():
        (folder / f"{name}.png").unlink(missing_ok=True)  # it may be a link
        figure.savefig(folder / f"{name}.png", dpi=150)
        pictures[name] = b64encode((folder / f"{name}.png").read_bytes()).decode()
    return pictures


def link_to(run: Path, page: Path) -> str:
    """Return the link from the study to the page of a run or, if it has none, to its folder."""
    own = run / "report" / "index.html"
    return quote(relpath(own if own.is_file() else run, page))


def styles_for(values: Iterable[Any]) -> Styles:
    """Return a style for each line, and for None; the first twelve are distinct."""
    styles = {v: STYLES[i % len(STYLES)] for i, v in enumerate(dict.fromkeys(values))}
    return {None: STYLES[0], **styles}


def _curves(layout: Layout, styles: Styles) -> Figure | None:
    """Draw a line for each setting, and a panel for each value of what else was varied."""
    settings, drawn = layout.settings, layout.curves.index.unique(0)
    by_title = panels(settings[settings.index.isin(drawn)], layout.lines)
    if not by_title:
        return None
    figure, all_axes = _axes(len(by_title), layout, styles)
    for axes, (panel, own) in zip(all_axes, by_title.items(), strict=True):
        dress(axes, panel, "samples trained on")
        for s in own.index:
            points = layout.curves.loc[s]
            _line(axes, points["samples"], points, styles[layout.line(s)])
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(short)
    return figure


def _against(layout: Layout, styles: Styles) -> Figure | None:
    """Draw the metric at the end against a number that was varied, if there is one."""
    key, last = layout.number, layout.ends["last"].dropna(subset="mean")
    if key is None or last.empty:
        return None
    by_title = panels(layout.settings.loc[last.index], layout.lines, key)
    of_lines: Styles = {} if key == layout.lines else styles
    figure, all_axes = _axes(len(by_title), layout, of_lines)
    for axes, (panel, own) in zip(all_axes, by_title.items(), strict=True):
        dress(axes, panel, key)
        for line in panels(own, key).values():
            x = line[key].astype(float).sort_values()
            _line(axes, x, last.loc[x.index], of_lines.get(layout.line(x.index[0]), STYLES[0]))
        _number_axis(axes, sorted(layout.settings[key].astype(float).unique()))
    return figure


def _fronts(layout: Layout, styles: Styles, published: Published) -> Figure | None:
    """Draw the metric against its cost, with the settings that no other beats in both."""
    points = {}
    for cost in COSTS:
        if cost in layout.ends:
            both = layout.ends[[cost, "last"]].dropna(subset=[(cost, "mean"), ("last", "mean")])
            if len(both) > 1:
                points[cost] = both
    if not points:
        return None
    figure, all_axes = _axes(len(points), layout, styles)
    for axes, (cost, both) in zip(all_axes, points.items(), strict=True):
        dress(axes, "", COSTS[cost])
        x, y = both[cost, "mean"], both["last", "mean"]
        spread = both.xs("sem", axis=1, level=1).fillna(0)
        for s in both.index:
            style = {**styles[layout.line(s)], "linestyle": "none", "markersize": 6}
            axes.errorbar(x[s], y[s], spread["last"][s], spread[cost][s], **style, elinewidth=0.6)
        front = pareto(x, y)
        axes.plot(x[front], y[front], drawstyle="steps-post", color=GREY, linewidth=1.1, zorder=1.5)
        names = [title(layout.settings.loc[s, layout.keys[::-1]]) for s in front]
        unbroken = "  ·  ".join(name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)
        axes.set_title(plain(fill(f"front: {unbroken}", 92)), loc="left", fontsize=8.5, color=GREY)
        _others(axes, cost, layout.metric, published)
        if x.min() > 0 and x.max() >= 10 * x.min():
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(short)
    return figure


def _others(axes: Axes, cost: str, metric: str, published: Published) -> None:
    """Draw the published results that have both scores, with hollow markers."""
    both = {name: own for name, own in published.items() if {cost, metric} <= own.keys()}
    for i, (name, own) in enumerate(both.items()):
        marker = STYLES[i % len(STYLES)]["marker"]
        look = {"marker": marker, "markerfacecolor": "none", "markersize": 8, "linestyle": "none"}
        axes.plot(own[cost], own[metric], **look, color=GREY, label=plain(name))
    if both:
        axes.legend(fontsize=8, frameon=False)


def pareto(costs: pd.Series, scores: pd.Series) -> list[int]:
    """Return the labels of the points that score higher than all cheaper ones, cheapest first."""
    points = pd.DataFrame({"cost": costs, "score": scores})
    points = points.sort_values(["cost", "score"], ascending=[True, False])
    cheaper = points["score"].cummax().shift(fill_value=float("-inf"))
    return list(points.index[points["score"] > cheaper])


def _line(axes: Axes, x: pd.Series, scores: pd.DataFrame, style: dict[str, Any]) -> None:
    """Draw the mean over seeds, and a band from the lowest to the highest."""
    band = {"color": style["color"], "alpha": 0.13, "linewidth": 0}
    axes.fill_between(x, scores["min"], scores["max"], **band)
    axes.plot(x, scores["mean"], **style, linewidth=1.6, markersize=4)


def _axes(count: int, layout: Layout, styles: Styles) -> tuple[Figure, list[Axes]]:
    """Return axes that share the scale of the scores, with a legend of the lines above them."""
    columns = 3 if count > 4 or count == 3 else min(2, count)
    rows = ceil(count / columns)
    lines = [v for v in layout.line_values if v in styles]
    height = 0.5 + 0.28 * ceil(len(lines) / 6) + (2.9 if columns == 3 else 3.8) * rows
    figure = Figure(figsize=(12, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid[:, 0]:
        axes.set_ylabel(layout.metric.replace("_", " "), color=GREY)
    for axes in grid.flat[count:]:
        axes.remove()
    grid[0, 0].yaxis.set_major_formatter(PercentFormatter(1) if "pass@" in layout.metric else short)
    if lines:
        handles = [Line2D([], [], **styles[v], linewidth=1.8, markersize=5) for v in lines]
        names = [plain(phrase(layout.lines or "", v)[-40:]) for v in lines]
        figure.legend(
            handles, names, loc="outside upper left", ncols=6, frameon=False, handlelength=3.2
        )
    return figure, list(grid.flat[:count])


def _number_axis(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic scale if the values span a decade, and a tick at each of a few values."""
    positive = [v for v in values if v > 0]
    if positive and max(positive) >= 10 * min(positive):
        if len(positive) == len(values):
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=min(positive))
    if len(values) <= 8:
        axes.xaxis.set_major_locator(FixedLocator(list(values)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(short)


def dress(axes: Axes, title: str, below: str) -> None:
    """Set title, label, grid and colours of the axes."""
    shown = title if len(title) <= 52 else f"{title[:51]}…"
    axes.set_title(plain(shown), loc="left", fontsize=10.5)
    axes.set_xlabel(below, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bec8")
    axes.tick_params(which="both", length=0, labelcolor=GREY)
    axes.grid(color=RULE)
    axes.set_axisbelow(True)


def plain(text: str) -> str:
    """Escape dollars, which begin a formula, and a leading `_`, which hides a legend's entry."""
    return text.lstrip("_").replace("$", r"\$")


def short(value: float, _: float) -> str:
    """Format a tick: 20k, 0.5, 1e-4."""
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if size >= 1e3 else f"{value:g}"
