"""Figures of a study: learning curves, scores against a number that was varied, and costs."""

from __future__ import annotations

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
NO_BREAK = "\N{NO-BREAK SPACE}"
MARKERS = "osD^vPXosD^v"
DASHES = ["-"] * 7 + [(0, (4, 1.5))] * 5
Style = Mapping[str, Any]
STYLES: Sequence[Style] = [
    {"color": colour, "marker": marker, "linestyle": dash}
    for colour, marker, dash in zip(COLOURS, MARKERS, DASHES, strict=True)
]


def styles_for(values: Sequence[Value]) -> dict[Value, Style]:
    """Return a style for each line; those of the first twelve are distinct."""
    return {value: STYLES[i % len(STYLES)] for i, value in enumerate(values)}


def draw(layout: Layout, styles: Mapping[Value, Style], metric: str) -> dict[str, Figure]:
    """Draw all figures that the grid has data for."""
    figures = {
        "curves": _curves(layout, styles, metric),
        "against": _against(layout, styles, metric),
        "fronts": _fronts(layout, styles, metric),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _curves(layout: Layout, styles: Mapping[Value, Style], metric: str) -> Figure | None:
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
            _line(axes, points["samples"], points, _style(layout, styles, s))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    return figure


def _against(layout: Layout, styles: Mapping[Value, Style], metric: str) -> Figure | None:
    """Draw the metric at the end against a number that was varied, if there is one."""
    key, last = layout.number, layout.ends["last"].dropna(subset="mean")
    if key is None or last.empty:
        return None
    panels = layout.panels(layout.lines, key)
    legend = {} if key == layout.lines else styles
    figure, all_axes = _axes(len(panels), metric, layout, legend)
    for axes, (title, settings) in zip(all_axes, panels.items(), strict=True):
        dress(axes, title, key)
        lines: dict[Value | None, list[int]] = {}
        for s in last.index.intersection(settings):
            line = None if key == layout.lines else layout.axes[s][str(layout.lines)]
            lines.setdefault(line, []).append(s)
        for line, own in lines.items():
            x = pd.Series([float(layout.axes[s][key]) for s in own], own).sort_values()
            _line(axes, x, last.loc[x.index], STYLES[0] if line is None else styles[line])
        _number_axis(axes, [float(v) for v in layout.values[key]])
    return figure


def _fronts(layout: Layout, styles: Mapping[Value, Style], metric: str) -> Figure | None:
    """Draw the metric against its cost, with the settings that no other beats in both."""
    points = {}
    for cost in COSTS:
        if cost in layout.ends:
            needed = [(cost, "mean"), ("last", "mean")]
            points[cost] = layout.ends[[cost, "last"]].dropna(subset=needed)
    points = {cost: table for cost, table in points.items() if len(table) > 1}
    if not points:
        return None
    figure, all_axes = _axes(len(points), metric, layout, styles)
    for axes, (cost, table) in zip(all_axes, points.items(), strict=True):
        dress(axes, "", COSTS[cost])
        at, last = table[cost], table["last"]
        for s in table.index:
            style = {**_style(layout, styles, s), "linestyle": "none"}
            spreads = last["sem"].fillna(0)[s], at["sem"].fillna(0)[s]
            x, y = at["mean"][s], last["mean"][s]
            axes.errorbar(x, y, *spreads, **style, markersize=6, elinewidth=0.6)
        front = pareto(at["mean"], last["mean"])
        x, y = at["mean"][front], last["mean"][front]
        axes.plot(x, y, drawstyle="steps-post", color=GREY, linewidth=1.1, zorder=1.5)
        names = [layout.title(s, layout.keys[::-1]).replace(" ", NO_BREAK) for s in front]
        text = plain(fill("front: " + "  ·  ".join(names), 92))
        axes.set_title(text, loc="left", fontsize=8.5, color=GREY)
        if at["mean"].min() > 0 and at["mean"].max() >= 10 * at["mean"].min():
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


def _style(layout: Layout, styles: Mapping[Value, Style], setting: int) -> Style:
    return STYLES[0] if layout.lines is None else styles[layout.axes[setting][layout.lines]]


def _axes(
    count: int, metric: str, layout: Layout, styles: Mapping[Value, Style]
) -> tuple[Figure, list[Axes]]:
    """Return axes that share the scale of the scores, with a legend of the lines above them."""
    columns = 3 if count > 4 or count == 3 else min(2, count)
    rows = ceil(count / columns)
    lines = [v for v in layout.line_values() if v in styles]
    height = 0.5 + 0.28 * ceil(len(lines) / 6) + (2.9 if columns == 3 else 3.8) * rows
    figure = Figure(figsize=(12, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid[:, 0]:
        axes.set_ylabel(metric.replace("_", " "), color=GREY)
    for axes in grid.flat[count:]:
        axes.remove()
    shown = list(grid.flat[:count])
    for axes in shown:
        percent = FuncFormatter(lambda v, _: f"{100 * v:g}%")
        axes.yaxis.set_major_formatter(percent if "pass@" in metric else FuncFormatter(short))
        axes.xaxis.set_tick_params(labelbottom=True)
    if lines:
        handles = [Line2D([], [], **styles[v], linewidth=1.8, markersize=5) for v in lines]
        names = [plain(phrase(layout.lines or "", v)[-40:]) for v in lines]
        place: Style = {"loc": "outside upper left", "ncols": 6}
        figure.legend(handles, names, **place, frameon=False, handlelength=3.2)
    return figure, shown


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
