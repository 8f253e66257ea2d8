"""Figures of runs: the metrics on each panel, and how they are drawn."""

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
from tba.report.record import LAG, MODES, Measure, Record

Form = Literal["number", "positive", "share", "count"]
AXES = {"time": "time (s)", "step": "steps", "samples_generated": "samples generated"}
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)))
LOWEST_TOP: dict[Form, float] = {"positive": 1e-9, "share": 0.1, "count": 1.0}
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
    held_out: bool = False

    def rows(self, run: Record) -> pd.DataFrame:
        return run.evaluations if self.held_out else run.steps

    def shows(self, run: Record) -> bool:
        """Return whether the run has values, or has counted anything."""
        rows = self.rows(run)
        values = rows[[name for name in self.metrics if name in rows]]
        if self.form == "count":
            values = values.replace(0, float("nan"))
        return bool(values.notna().any(axis=None))


FIGURES = {
    "trained_on": (
        Panel("lag (steps)", LAG, "positive", ("mean", "max")),
        Panel("reward, mean ± standard deviation", ("reward",), spread=("reward_std",)),
        Panel("log(pi / ref) of the batches (nats)", ("kl",)),
        Panel(
            "held-out KL to the reference (nats)", ("eval/sampled_kl",), "positive", held_out=True
        ),
        Panel("entropy (nats per token)", ("entropy",), "positive"),
        Panel("response length (tokens)", ("completions/mean_length",), "positive"),
    ),
    "buffer": (
        Panel("responses held", ("buffer/size",), "count"),
        Panel("prompts held", ("buffer/prompts",), "count"),
        Panel("samples", ("buffer/added", "buffer/duplicates"), "count", ("added", "duplicates")),
        Panel(
            "evicted", ("buffer/evicted_per_prompt", "buffer/evicted_capacity"), "count",
            ("limit of a prompt", "capacity"),
        ),
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
            "searchers restarted, samples rejected", ("searchers/restarts", "searchers/rejected"),
            "count", ("restarted", "rejected"),
        ),
    ),
}  # fmt: skip


def rewards(measure: Measure) -> list[Panel]:
    """Return the panels of training and of held-out rewards, over each of `AXES`."""
    values, stderrs = zip(*(measure.names(mode) for mode in MODES), strict=True)
    title = f"held-out {measure.label} ± standard error"
    form: Form = "share" if measure.share else "number"
    training = [Panel("training reward", ("reward",), x=x) for x in AXES]
    return training + [Panel(title, values, form, MODES, stderrs, x, True) for x in AXES]


def draw_panels(panels: Sequence[Panel], runs: Sequence[Record]) -> Figure:
    """Draw three panels a row. Panels without data are left out."""
    panels = [p for p in panels if any(p.shows(run) for run in runs)]
    rows, several = ceil(len(panels) / 3), len(runs) > 1
    figure = Figure(figsize=(12, 0.4 + 2.8 * rows), layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, 3, i + 1)
        dress(axes, panel.title, AXES[panel.x])
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        share = panel.form == "share"
        axes.yaxis.set_major_formatter(PercentFormatter(1) if share else FuncFormatter(short))
        for run in runs:
            _draw(axes, panel, panel.rows(run), [run.colour] * 2 if several else COLOURS)
        if panel.labels:
            colours = [GREY] * 2 if several else COLOURS
            keys = [Line2D([], [], color=colours[j], linestyle=DASHES[j]) for j in (0, 1)]
            axes.legend(keys, panel.labels, handlelength=2.4, frameon=False)
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


def _draw(axes: Axes, panel: Panel, rows: pd.DataFrame, colours: Sequence[str]) -> None:
    rows = rows[:: 1 + len(rows) // MAX_POINTS]
    rows = rows.reindex(columns=[panel.x, *panel.metrics, *panel.spread])
    x, count = rows[panel.x], panel.form == "count"
    for i, metric in enumerate(panel.metrics):
        look = {"color": colours[i], "linestyle": DASHES[i]}
        y = rows[metric].fillna(0) if count else rows[metric]
        spread = rows[panel.spread[i]] if panel.spread else None
        if panel.held_out:
            points: dict[str, Any] = {"marker": "o", "markersize": 4.5, "elinewidth": 1}
            points["markerfacecolor"] = "white" if i else colours[0]
            axes.errorbar(x, y, spread, **look, **points, capsize=2.5)
            continue
        line = y if count else smooth(y)
        axes.plot(x, y, color=colours[i], alpha=0.22, linewidth=0.8)
        axes.plot(x, line, **look, linewidth=1.7)
        if spread is not None:
            low, high = line - smooth(spread), line + smooth(spread)
            axes.fill_between(x, low, high, color=colours[i], alpha=0.12, linewidth=0)
