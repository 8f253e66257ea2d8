"""Figures of runs: the metrics on each panel, and how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from tba.report.draw import COLOURS, GREY, dress, plain, short
from tba.report.record import Record

Form = Literal["number", "positive", "share", "count"]
AXES = {"time": "time (s)", "step": "steps", "samples_generated": "samples generated"}
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)))
LOWEST_TOP = {"positive": 1e-9, "share": 0.1, "count": 1.0}
"""Least height of an axis that begins at 0, so that small shares look small."""
MAX_POINTS = 4000


@dataclass(frozen=True)
class Panel:
    """Axes with at most two metrics, the second dashed, each ± its `spread`.

    Metrics of steps are smoothed, and drawn over the values of each step, unless they are counts.
    Evaluations are points.
    """

    title: str
    metrics: tuple[str, ...]
    form: Form = "number"
    labels: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    x: str = "step"
    evaluations: bool = False

    def rows(self, run: Record) -> pd.DataFrame:
        return run.evaluations if self.evaluations else run.steps

    def shows(self, run: Record) -> bool:
        """Return whether the run has values, or has counted anything."""
        rows = self.rows(run)
        values = rows[[name for name in self.metrics if name in rows]]
        if self.form == "count":
            values = values.replace(0, float("nan"))
        return bool(values.notna().any(axis=None))


KL_PANEL = Panel(
    "held-out KL to the reference (nats)", ("eval/sampled_kl",), "positive", evaluations=True
)
EVICTED = ("buffer/evicted_per_prompt", "buffer/evicted_capacity")
RESTARTS = ("searchers/restarts", "searchers/rejected")
FIGURES = {
    "trained_on": (
        Panel(
            "lag (steps)", ("off_policy/lag_mean", "off_policy/lag_max"), "positive",
            ("mean", "max"),
        ),
        Panel("reward, mean ± standard deviation", ("reward",), spread=("reward_std",)),
        Panel("log(pi / ref) of the batches (nats)", ("kl",)),
        KL_PANEL,
        Panel("entropy (nats per token)", ("entropy",), "positive"),
        Panel("response length (tokens)", ("completions/mean_length",), "positive"),
    ),
    "buffer": (
        Panel("responses held", ("buffer/size",), "count"),
        Panel("prompts held", ("buffer/prompts",), "count"),
        Panel("samples", ("buffer/added", "buffer/duplicates"), "count", ("added", "duplicates")),
        Panel("evicted", EVICTED, "count", ("limit of a prompt", "capacity")),
        Panel("groups with repeated samples", ("buffer/short_groups",), "count"),
        Panel("distinct responses in a group", ("buffer/distinct_per_group",), "positive"),
    ),
    "waits": (
        Panel("trainer waits (share of its time)", ("wait/trainer",), "share"),
        Panel("searchers wait (share of their time)", ("wait/searchers",), "share"),
        Panel("optimizer step (s)", ("step_time",), "positive"),
        Panel("publishing the weights (s)", ("sync/seconds",), "positive"),
        Panel("logp, engine − trainer, after a sync", ("sync/logp_gap",), "positive"),
        Panel(
            "searchers restarted, samples rejected", RESTARTS, "count", ("restarted", "rejected")
        ),
    ),
}  # fmt: skip


def draw_panels(panels: Sequence[Panel], runs: Sequence[Record]) -> Figure:
    """Draw three panels a row. Panels without data are left out."""
    panels = [p for p in panels if any(p.shows(run) for run in runs)]
    rows = ceil(len(panels) / 3)
    figure = Figure(figsize=(12, 0.4 + 2.8 * rows), layout="constrained")
    several = len(runs) > 1
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, 3, i + 1)
        dress(axes, panel.title, AXES[panel.x])
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        share = panel.form == "share"
        axes.yaxis.set_major_formatter(PercentFormatter(1) if share else FuncFormatter(short))
        for run in runs:
            _draw(axes, panel, panel.rows(run), [run.colour] * 2 if several else COLOURS)
        _legend(axes, panel.labels, [GREY] * 2 if several else COLOURS)
        if panel.form in LOWEST_TOP:
            axes.set_ylim(0, max(axes.get_ylim()[1], LOWEST_TOP[panel.form]))
    if several:
        handles = [Line2D([], [], color=run.colour, linewidth=3) for run in runs]
        names = [plain(run.name[-60:]) for run in runs]
        figure.legend(handles, names, loc="outside upper left", ncols=4, frameon=False)
    return figure


def smooth(values: pd.Series) -> pd.Series:
    """Return means over a centred window of a twenty-fifth of the run; gaps are left out."""
    window = 2 * (len(values) // 50) + 1
    return values.rolling(window, center=True, min_periods=1).mean()


def _legend(axes: Axes, labels: Sequence[str], colours: Sequence[str]) -> None:
    keys = [
        Line2D([], [], color=colour, linestyle=dash)
        for colour, dash in zip(colours, DASHES, strict=False)
    ]
    if labels:
        axes.legend(keys, labels, handlelength=2.4, frameon=False)


def _draw(axes: Axes, panel: Panel, rows: pd.DataFrame, colours: Sequence[str]) -> None:
    rows = rows[:: 1 + len(rows) // MAX_POINTS]
    x = rows[panel.x]
    nothing = pd.Series(float("nan"), rows.index)
    for i, metric in enumerate(panel.metrics):
        look = {"color": colours[i], "linestyle": DASHES[i]}
        y = rows.get(metric, nothing)
        spread = rows.get(panel.spread[i], nothing) if panel.spread else None
        if panel.evaluations:
            points: dict[str, Any] = {
                "marker": "o",
                "markersize": 4.5,
                "capsize": 2.5,
                "elinewidth": 1,
            }
            face = "white" if i else colours[0]
            axes.errorbar(x, y, spread, **look, **points, markerfacecolor=face)
            continue
        y = y.fillna(0) if panel.form == "count" else y
        line = y if panel.form == "count" else smooth(y)
        axes.plot(x, y, color=colours[i], alpha=0.22, linewidth=0.8)
        axes.plot(x, line, **look, linewidth=1.7)
        if spread is not None:
            low, high = line - smooth(spread), line + smooth(spread)
            axes.fill_between(x, low, high, color=colours[i], alpha=0.12, linewidth=0)
