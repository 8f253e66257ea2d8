"""Figures of a study: learning curves, scores against a number that was varied, and costs."""

from collections.abc import Mapping, Sequence
from math import ceil
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tba.report.draw import COLOURS, GREY, dress, plain, short
from tba.report.layout import Layout, Value
from tba.studies.results import phrase

COSTS = {"sampled_kl": "KL to the reference at the end (nats)", "seconds": "time of a run (s)"}
Style = Mapping[str, Any]
Styles = Mapping[Value | None, Style]
STYLES: Sequence[Style] = [
    {"color": colour, "marker": marker, "linestyle": "-" if i < 7 else (0, (4, 1.5))}
    for i, (colour, marker) in enumerate(zip(COLOURS, "osD^vPXosD^v", strict=True))
]


def styles_for(values: Sequence[Value]) -> dict[Value | None, Style]:
    """Return a style for each line, and for a grid without lines; the first twelve are distinct."""
    return {None: STYLES[0]} | {v: STYLES[i % len(STYLES)] for i, v in enumerate(values)}


def draw_grid(layout: Layout, styles: Styles, metric: str) -> dict[str, Figure]:
    """Draw all figures that the grid has data for."""
    figures = {
        "curves": _curves(layout, styles, metric),
        "against": _against(layout, styles, metric),
        "fronts": _fronts(layout, styles, metric),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _curves(layout: Layout, styles: Styles, metric: str) -> Figure | None:
    """Draw a line for each setting, and a panel for each value of what else was varied."""
    drawn = set(layout.curves.index.get_level_values(0))
    panels = {title: drawn & set(own) for title, own in layout.panels(layout.lines).items()}
    panels = {title: own for title, own in panels.items() if own}
    if not panels:
        return None
    figure, all_axes = _axes(len(panels), metric, layout, styles)
    for axes, (title, settings) in zip(all_axes, panels.items(), strict=True):
        dress(axes, title, "samples trained on")
        for s in sorted(settings):
            points = layout.curves.loc[s]
            _line(axes, points["samples"], points, styles[layout.line(s)])
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    return figure


def _against(layout: Layout, styles: Styles, metric: str) -> Figure | None:
    """Draw the metric at the end against a number that was varied, if there is one."""
    key, last = layout.number, layout.ends["last"].dropna(subset="mean")
    if key is None or last.empty:
        return None
    if key == layout.lines:
        styles = {None: STYLES[0]}
    panels = layout.panels(layout.lines, key)
    figure, all_axes = _axes(len(panels), metric, layout, styles)
    for axes, (title, settings) in zip(all_axes, panels.items(), strict=True):
        dress(axes, title, key)
        for line in layout.panels(key).values():
            own = last.index.intersection(line).intersection(settings)
            if len(own):
                x = pd.Series([float(layout.axes[s][key]) for s in own], own).sort_values()
                _line(axes, x, last.loc[x.index], styles.get(layout.line(own[0]), STYLES[0]))
        _number_axis(axes, [float(v) for v in layout.values[key]])
    return figure


def _fronts(layout: Layout, styles: Styles, metric: str) -> Figure | None:
    """Draw the metric against its cost, with the settings that no other beats in both."""
    points = {}
    for cost in COSTS:
        if cost in layout.ends:
            both = layout.ends[[cost, "last"]].dropna(subset=[(cost, "mean"), ("last", "mean")])
            if len(both) > 1:
                points[cost] = both
    if not points:
        return None
    figure, all_axes = _axes(len(points), metric, layout, styles)
    for axes, (cost, both) in zip(all_axes, points.items(), strict=True):
        dress(axes, "", COSTS[cost])
        x, y = both[cost, "mean"], both["last", "mean"]
        spread = both.xs("sem", axis=1, level=1).fillna(0)
        for s in both.index:
            style = {**styles[layout.line(s)], "linestyle": "none", "markersize": 6}
            axes.errorbar(x[s], y[s], spread["last"][s], spread[cost][s], **style, elinewidth=0.6)
        front = pareto(x, y)
        steps: Style = {"drawstyle": "steps-post", "color": GREY, "linewidth": 1.1, "zorder": 1.5}
        axes.plot(x[front], y[front], **steps)
        names = [layout.title(s, layout.keys[::-1]) for s in front]
        unbroken = "  ·  ".join(name.replace(" ", "\N{NO-BREAK SPACE}") for name in names)
        axes.set_title(plain(fill(f"front: {unbroken}", 92)), loc="left", fontsize=8.5, color=GREY)
        if x.min() > 0 and x.max() >= 10 * x.min():
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    return figure


def pareto(costs: pd.Series, scores: pd.Series) -> list[int]:
    """Return the labels of the points that score higher than all cheaper ones, cheapest first."""
    points = pd.DataFrame({"cost": costs, "score": scores})
    points = points.sort_values(["cost", "score"], ascending=[True, False])
    cheaper = points["score"].cummax().shift(fill_value=float("-inf"))
    return list(points.index[points["score"] > cheaper])


def _line(axes: Axes, x: pd.Series, scores: pd.DataFrame, style: Style) -> None:
    """Draw the mean over seeds, and a band from the lowest to the highest."""
    band = {"color": style["color"], "alpha": 0.13, "linewidth": 0}
    axes.fill_between(x, scores["min"], scores["max"], **band)
    axes.plot(x, scores["mean"], **style, linewidth=1.6, markersize=4)


def _axes(count: int, metric: str, layout: Layout, styles: Styles) -> tuple[Figure, list[Axes]]:
    """Return axes that share the scale of the scores, with a legend of the lines above them."""
    columns = 3 if count > 4 or count == 3 else min(2, count)
    rows = ceil(count / columns)
    lines = [v for v in layout.line_values if v in styles]
    height = 0.5 + 0.28 * ceil(len(lines) / 6) + (2.9 if columns == 3 else 3.8) * rows
    figure = Figure(figsize=(12, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid[:, 0]:
        axes.set_ylabel(metric.replace("_", " "), color=GREY)
    for axes in grid.flat[count:]:
        axes.remove()
    percent = FuncFormatter(lambda v, _: f"{100 * v:g}%")
    grid[0, 0].yaxis.set_major_formatter(percent if "pass@" in metric else FuncFormatter(short))
    for axes in grid.flat[:count]:
        axes.xaxis.set_tick_params(labelbottom=True)
    if lines:
        handles = [Line2D([], [], **styles[v], linewidth=1.8, markersize=5) for v in lines]
        names = [plain(phrase(layout.lines or "", v)[-40:]) for v in lines]
        place: Style = {"loc": "outside upper left", "ncols": 6}
        figure.legend(handles, names, **place, frameon=False, handlelength=3.2)
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
    axes.xaxis.set_major_formatter(FuncFormatter(short))
