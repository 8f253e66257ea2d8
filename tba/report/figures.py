"""The figures of a study: learning curves, the metric against numbers that were varied, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from tba.report.draw import COLOURS, GREY, dress, short, tick
from tba.report.layout import Layout, Setting, Value, told

X = Literal["samples_trained", "samples_generated", "step", "time"]
X_LABELS: Mapping[X, str] = {"samples_trained": "samples trained on", "samples_generated": "samples generated", "step": "steps", "time": "time (s)"}
COSTS = {"kl": "KL to the reference (nats)", "seconds": "time of a run (s)"}
NO_BREAK = "\N{NO-BREAK SPACE}"
MORE = (*COLOURS, "#22262d", "#8c5a3c", "#7f8c1f", "#e8a0bf", "#17a2a2")
MARKERS, DASHES = "osD^vPX", ("-", (0, (4, 1.5)), (0, (1, 1.2)))


@dataclass(frozen=True)
class Style:
    colour: str
    dash: Any
    marker: str
    face: str


Styles = Mapping[Any, Style]
PLAIN = Style(COLOURS[0], "-", "o", COLOURS[0])


def styles_for(values: Sequence[Any]) -> Styles:
    """One for each line, told apart by colour, dashes and markers; numbers have colours in order."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        colours = [to_hex(c) for c in matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(values)))]
        return {v: Style(c, "-", MARKERS[i % len(MARKERS)], c) for i, (v, c) in enumerate(zip(values, colours, strict=True))}
    n, styles = len(COLOURS), {}
    for i, value in enumerate(values):
        colour, filled = MORE[i % len(MORE)], i < n
        styles[_key(value)] = Style(colour, DASHES[i // n % len(DASHES)], MARKERS[(i + i // n) % len(MARKERS)], colour if filled else "white")
    return styles


def draw(layout: Layout, styles: Styles, metric: str) -> dict[str, Figure]:
    """All figures that the grid has something for."""
    drawn = {"curves": learning(layout, styles, metric), "against": against(layout, styles, metric), "fronts": fronts(layout, styles, metric)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def learning(layout: Layout, styles: Styles, metric: str, x: X = "samples_trained") -> Figure:
    """Mean over seeds and, as a band, the least and the greatest; runs that failed are drawn alone, up to a cross."""
    panels = {title: found for title, settings in layout.panels(layout.others).items() if (found := [s for s in settings if any(s.curves)])}
    figure, grid = _panels(len(panels), layout, styles)
    for axes, (title, settings) in zip(grid, panels.items(), strict=True):
        dress(axes, title, X_LABELS[x])
        for s in settings:
            style = styles[_key(layout.line(s))]
            at, mean, low, high = s.average(x)
            axes.fill_between(at, low, high, color=style.colour, alpha=0.13, linewidth=0)
            axes.plot(at, mean, color=style.colour, linestyle=style.dash, linewidth=1.6, marker=style.marker, markerfacecolor=style.face, markersize=3.5)
            for cut_at, scores in s.cut_short(x):
                axes.plot(cut_at, scores, color=style.colour, linestyle=style.dash, linewidth=0.8, alpha=0.6)
                axes.plot(cut_at[-1:], scores[-1:], color=style.colour, marker="x", markersize=7, markeredgewidth=1.8)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        _scores(axes, metric)
    return _share_y(figure, grid, metric)


def against(layout: Layout, styles: Styles, metric: str) -> Figure | None:
    """The metric at the end against a number that was varied, or as a heat map over two; None where no number was."""
    numbers = [key for key in layout.numbers if key != layout.lines] or list(layout.numbers)
    if len(numbers) >= 2:
        return _heat(layout, numbers[0], numbers[1], metric)
    if not numbers:
        return None
    key = numbers[0]
    panels = {
        title: found for title, settings in layout.panels([k for k in layout.others if k != key]).items() if (found := [s for s in settings if any(s.curves)])
    }
    lines = layout.line_values() if key != layout.lines else [None]
    styles = styles if key != layout.lines else {None: PLAIN}
    figure, grid = _panels(len(panels), layout, styles if key != layout.lines else None)
    for axes, (title, settings) in zip(grid, panels.items(), strict=True):
        dress(axes, title, key)
        for i, line in enumerate(lines):
            style = styles[_key(line)]
            ended = [(float(s.axes[key]), v, s) for s in settings if (line is None or layout.line(s) == line) and (v := s.value("last")) is not None]
            ended.sort(key=lambda found: found[0])
            at, mean, low, high = ([f(*e) for e in ended] for f in (_at, _mean, _low, _high))
            axes.fill_between(at, low, high, color=style.colour, alpha=0.13, linewidth=0)
            axes.plot(at, mean, color=style.colour, linestyle=style.dash, linewidth=1.6, marker=style.marker, markerfacecolor=style.face, markersize=5)
            _crosses(axes, [(x, v.mean) for x, v, s in ended if s.count("failed")])
            lost = [s.axes[key] for s in settings if (line is None or layout.line(s) == line) and s.count("failed") == len(s.rows)]
            axes.plot(lost, [0.03 * (1 + i)] * len(lost), "x", color=style.colour, markeredgewidth=1.8, transform=axes.get_xaxis_transform())
        _number_axis(axes, [float(v) for v in layout.values[key]])
        _scores(axes, metric)
    return _share_y(figure, grid, metric)


def fronts(layout: Layout, styles: Styles, metric: str) -> Figure | None:
    """The metric against what it costs. On the front stand settings that no other beats in both; they are numbered, and named above."""
    costs = [c for c in COSTS if any(s.value(c) is not None and s.value("last") is not None for s in layout.settings)]
    if not costs or len(layout.settings) < 2:
        return None
    figure, grid = _panels(len(costs), layout, styles, columns=2, height=4.2)
    for axes, cost in zip(grid, costs, strict=True):
        dress(axes, "", COSTS[cost])
        points = [(c, v, s) for s in layout.settings if (c := s.value(cost)) is not None and (v := s.value("last")) is not None]
        for c, v, s in points:
            style = styles[_key(layout.line(s))]
            axes.errorbar(c.mean, v.mean, v.stderr, c.stderr, color=style.colour, alpha=0.35, elinewidth=1, linestyle="none")
            axes.plot(c.mean, v.mean, color=style.colour, marker=style.marker, markerfacecolor=style.face, markersize=6, linestyle="none")
        front = _front(points)
        axes.plot([c.mean for c, _, _ in front], [v.mean for _, v, _ in front], drawstyle="steps-post", color=GREY, linewidth=1.1, zorder=1.5)
        _crosses(axes, [(c.mean, v.mean) for c, v, s in points if s.count("failed")])
        axes.margins(0.13, 0.1)
        for i, (c, v, _) in enumerate(front):
            axes.annotate(
                str(i + 1), (c.mean, v.mean), (-4, 4 + 8 * (i % 2)), textcoords="offset points", ha="right", fontsize=8.5, fontweight="bold", color=GREY
            )
        keys = [k for k in (layout.lines, *layout.others) if k is not None]
        names = [f"{i + 1} {', '.join(told(k, s.axes[k]) for k in keys if k in s.axes)}" for i, (_, _, s) in enumerate(front)]
        axes.set_title(fill("front:  " + "  ·  ".join(n.replace(" ", NO_BREAK) for n in names), 92), loc="left", fontsize=8.5, color=GREY)
        if points and min(c.mean for c, _, _ in points) > 0 and max(c.mean for c, _, _ in points) > 10 * min(c.mean for c, _, _ in points):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        _scores(axes, metric)
    return _share_y(figure, grid, metric)


def _front(points: Sequence[tuple[Value, Value, Setting]]) -> list[tuple[Value, Value, Setting]]:
    """Those that cost less than all that score as much, from the cheapest on."""
    front: list[tuple[Value, Value, Setting]] = []
    for point in sorted(points, key=lambda p: (p[0].mean, -p[1].mean)):
        if not front or point[1].mean > front[-1][1].mean:
            front.append(point)
    return front


def _crosses(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Over settings of which some runs failed: what is drawn is of those that did not."""
    for x, y in points:
        axes.plot(x, y, "x", color="black", markersize=9, markeredgewidth=1.2, zorder=5)


def _heat(layout: Layout, x: str, y: str, metric: str) -> Figure:
    panels = layout.panels([key for key in layout.values if key not in (x, y)])
    columns, rows = layout.values[x], layout.values[y]
    every = [v.mean for s in layout.settings if (v := s.value("last")) is not None]
    figure, grid = _panels(len(panels), layout, None, columns=min(4, len(panels)), height=0.8 + 0.45 * len(rows))
    for axes, (title, settings) in zip(grid, panels.items(), strict=True):
        dress(axes, title, x)
        axes.grid(visible=False)
        cells = np.full((len(rows), len(columns)), np.nan)
        for s in settings:
            at = rows.index(s.axes[y]), columns.index(s.axes[x])
            if (v := s.value("last")) is not None:
                cells[at] = v.mean
                dark = v.mean < (min(every) + max(every)) / 2
                spread = "" if v.stderr is None else f"\n± {_number(v.stderr, metric)}"
                axes.text(at[1], at[0], _number(v.mean, metric) + spread, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
            elif s.count("failed"):
                axes.text(at[1], at[0], "failed", ha="center", va="center", fontsize=7.5, color=GREY)
        axes.imshow(cells, aspect="auto", origin="lower", cmap="viridis", vmin=min(every, default=0), vmax=max(every, default=1))
        axes.set_xticks(range(len(columns)), [tick(float(v)) for v in columns])
        axes.set_yticks(range(len(rows)), [tick(float(v)) for v in rows])
        axes.set_ylabel(y, color=GREY)
    return figure


def _panels(count: int, layout: Layout, styles: Styles | None, columns: int = 3, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """Axes in rows, with a legend of the grid's lines above them."""
    columns = max(1, min(columns, count))
    rows = -(-count // columns)
    lines = [v for v in layout.line_values() if v is not None] if styles is not None else []
    legend_rows = -(-len(lines) // 6)
    figure = Figure(figsize=(12, 0.25 + 0.28 * legend_rows + height * rows), layout="constrained")
    grid = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    if styles is not None and lines:
        looks = [styles[_key(v)] for v in lines]
        handles = [Line2D([], [], color=s.colour, linestyle=s.dash, linewidth=1.8, marker=s.marker, markerfacecolor=s.face, markersize=5) for s in looks]
        names = [told(layout.lines or "", v)[-40:].lstrip("_").replace("$", r"\$") for v in lines]
        figure.legend(handles, names, loc="outside upper left", ncols=6, frameon=False, handlelength=3.2)
    return figure, grid


def _share_y(figure: Figure, grid: Sequence[Axes], metric: str) -> Figure:
    """The same scores at the same height in all panels; named at the first of each row."""
    low, high = (f(axes.get_ylim()[i] for axes in grid) for i, f in enumerate((min, max)))
    for axes in grid:
        axes.set_ylim(low, high)
        if axes.get_subplotspec() is not None and axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel(metric.replace("_", " "), color=GREY)
    return figure


def _scores(axes: Axes, metric: str) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(_percent if "pass@" in metric else short))


def _percent(value: float, _: int | None = None) -> str:
    return f"{100 * value:g}%"


def _number(value: float, metric: str) -> str:
    return f"{value:.1%}" if "pass@" in metric else f"{value:.3f}"


def _number_axis(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where the values span more than a decade; a tick at each of a few values."""
    positive = [v for v in values if v > 0]
    if positive and max(positive) > 10 * min(positive):
        axes.set_xscale("log") if len(positive) == len(values) else axes.set_xscale("symlog", linthresh=min(positive))
    if len(values) <= 8:
        axes.xaxis.set_major_locator(FixedLocator(list(values)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(tick))


def _at(x: float, value: Value, setting: Setting) -> float:
    return x


def _mean(x: float, value: Value, setting: Setting) -> float:
    return value.mean


def _low(x: float, value: Value, setting: Setting) -> float:
    return min(setting.values("last"))


def _high(x: float, value: Value, setting: Setting) -> float:
    return max(setting.values("last"))


def _key(value: Any) -> Any:
    """Lists and tables stand for themselves as text."""
    return value if isinstance(value, str | int | float | None) else repr(value)
