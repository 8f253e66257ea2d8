"""The figures of a study: learning curves, the metric against a number that was varied, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tba.report.draw import COLOURS, GREY, dress, plain, short
from tba.report.layout import Layout, Mean, Setting, Value
from tba.studies.results import phrase

COSTS = {"sampled_kl": "KL to the reference at the end (nats)", "seconds": "time of a run (s)"}
NO_BREAK = "\N{NO-BREAK SPACE}"
Style = Mapping[str, Any]
STYLES: Sequence[Style] = [
    {"color": colour, "marker": marker, "linestyle": dash}
    for colour, marker, dash in zip(
        COLOURS, "osD^vPXosD^v", ["-"] * 7 + [(0, (4, 1.5))] * 5, strict=True
    )
]


def styles_for(values: Sequence[Value]) -> dict[Value, Style]:
    """One for each line: the first dozen are all told apart."""
    return {value: STYLES[i % len(STYLES)] for i, value in enumerate(values)}


def draw(layout: Layout, styles: Mapping[Value, Style], metric: str) -> dict[str, Figure]:
    """All figures that the grid has something for."""
    figures = {
        "curves": curves(layout, styles, metric),
        "against": against(layout, styles, metric),
        "fronts": fronts(layout, styles, metric),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def curves(layout: Layout, styles: Mapping[Value, Style], metric: str) -> Figure | None:
    """A line for each setting, a panel for each value of what else was varied; None while no run has finished."""
    panels = {
        title: with_curves
        for title, settings in layout.panels(layout.lines).items()
        if (with_curves := [s for s in settings if s.evaluations()])
    }
    if not panels:
        return None
    figure, all_axes = _axes(len(panels), metric, layout, styles)
    for axes, (title, settings) in zip(all_axes, panels.items(), strict=True):
        dress(axes, title, "samples trained on")
        for s in settings:
            _line(axes, s.evaluations(), _style(layout, styles, s))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    return figure


def against(layout: Layout, styles: Mapping[Value, Style], metric: str) -> Figure | None:
    """The metric at the end against a number that was varied; None where no number was, or no run has ended."""
    key = layout.number
    if key is None or not any(s.values("last") for s in layout.settings):
        return None
    lines: list[Value | None] = [None] if key == layout.lines else list(layout.line_values())
    panels = layout.panels(layout.lines, key)
    figure, all_axes = _axes(len(panels), metric, layout, {} if key == layout.lines else styles)
    for axes, (title, settings) in zip(all_axes, panels.items(), strict=True):
        dress(axes, title, key)
        for line in lines:
            own = [
                s
                for s in settings
                if s.values("last") and (line is None or s.axes[str(layout.lines)] == line)
            ]
            points = sorted((float(s.axes[key]), s.values("last")) for s in own)
            _line(axes, points, STYLES[0] if line is None else styles[line])
        _number_axis(axes, [float(v) for v in layout.values[key]])
    return figure


def fronts(layout: Layout, styles: Mapping[Value, Style], metric: str) -> Figure | None:
    """The metric against what it costs, with the settings that no other beats in both."""
    points = {
        cost: [(c, v, s) for s in layout.settings if (c := s.mean(cost)) and (v := s.mean("last"))]
        for cost in COSTS
    }
    points = {cost: at for cost, at in points.items() if len(at) > 1}
    if not points:
        return None
    figure, all_axes = _axes(len(points), metric, layout, styles)
    for axes, (cost, at) in zip(all_axes, points.items(), strict=True):
        dress(axes, "", COSTS[cost])
        for c, v, s in at:
            axes.errorbar(
                c.mean,
                v.mean,
                v.stderr,
                c.stderr,
                **{**_style(layout, styles, s), "linestyle": "none"},
                markersize=6,
                elinewidth=0.6,
            )
        front = pareto(at)
        axes.plot(
            [c.mean for c, _, _ in front],
            [v.mean for _, v, _ in front],
            drawstyle="steps-post",
            color=GREY,
            linewidth=1.1,
            zorder=1.5,
        )
        names = (
            ", ".join(phrase(k, s.axes[k]) for k in reversed(layout.keys)).replace(" ", NO_BREAK)
            for _, _, s in front
        )
        axes.set_title(
            plain(fill("front: " + "  ·  ".join(names), 92)), loc="left", fontsize=8.5, color=GREY
        )
        costs = [c.mean for c, _, _ in at]
        if min(costs) > 0 and max(costs) >= 10 * min(costs):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(short))
    return figure


def pareto(points: Sequence[tuple[Mean, Mean, Setting]]) -> list[tuple[Mean, Mean, Setting]]:
    """Those that cost less than all that score as much, from the cheapest on."""
    front: list[tuple[Mean, Mean, Setting]] = []
    for point in sorted(points, key=lambda p: (p[0].mean, -p[1].mean)):
        if not front or point[1].mean > front[-1][1].mean:
            front.append(point)
    return front


def _line(axes: Axes, points: Sequence[tuple[float, list[float]]], style: Style) -> None:
    """The mean over seeds, and a band from the least to the greatest."""
    at = [x for x, _ in points]
    axes.fill_between(
        at,
        [min(v) for _, v in points],
        [max(v) for _, v in points],
        color=style["color"],
        alpha=0.13,
        linewidth=0,
    )
    axes.plot(at, [fmean(v) for _, v in points], **style, linewidth=1.6, markersize=4)


def _style(layout: Layout, styles: Mapping[Value, Style], setting: Setting) -> Style:
    return STYLES[0] if layout.lines is None else styles[setting.axes[layout.lines]]


def _axes(
    count: int, metric: str, layout: Layout, styles: Mapping[Value, Style]
) -> tuple[Figure, list[Axes]]:
    """Axes with the same scores at the same height, and a legend of the grid's lines above them."""
    columns = 3 if count > 4 or count == 3 else min(2, count)
    rows = ceil(count / columns)
    lines = [v for v in layout.line_values() if v in styles]
    figure = Figure(
        figsize=(12, 0.5 + 0.28 * ceil(len(lines) / 6) + (2.9 if columns == 3 else 3.8) * rows),
        layout="constrained",
    )
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid[:, 0]:
        axes.set_ylabel(metric.replace("_", " "), color=GREY)
    for axes in grid.flat[count:]:
        axes.remove()
    for axes in grid.flat[:count]:
        axes.yaxis.set_major_formatter(
            FuncFormatter((lambda v, _: f"{100 * v:g}%") if "pass@" in metric else short)
        )
        axes.xaxis.set_tick_params(labelbottom=True)
    handles = [Line2D([], [], **styles[v], linewidth=1.8, markersize=5) for v in lines]
    if handles:
        names = [plain(phrase(layout.lines or "", v)[-40:]) for v in lines]
        figure.legend(
            handles, names, loc="outside upper left", ncols=6, frameon=False, handlelength=3.2
        )
    return figure, list(grid.flat[:count])


def _number_axis(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where the values span a decade; a tick at each of a few values."""
    positive = [v for v in values if v > 0]
    if positive and max(positive) >= 10 * min(positive):
        axes.set_xscale("log") if len(positive) == len(values) else axes.set_xscale(
            "symlog", linthresh=min(positive)
        )
    if len(values) <= 8:
        axes.xaxis.set_major_locator(FixedLocator(list(values)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(short))
