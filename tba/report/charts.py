"""Charts on the page of runs: which metrics stand together, and their numbers as JSON."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any, Literal

import numpy as np
import pandas as pd

from tba.report.page import MODES, names
from tba.runs.metrics import EACH_REWARD, PANELS, SECTIONS, Metric

AXES = {"step": "steps", "time": "time (s)", "samples_generated": "samples generated"}
"""Columns that the chart of rewards is drawn over, and their names on the switch."""
POINTS = 1000
"""Largest number of points of a line. The points of a longer run are means over several steps."""
OTHERS = SECTIONS[-1].title
SCORE = re.compile(r"eval/(?:(.+)/)?(sampled|greedy)_(.+)")
"""Name of a score: its subset, how answers were generated, and what is measured."""
SHARES = {"pass@1", "win_rate", "finished", "rejected"}
"""Scores that are shares."""


@dataclass(frozen=True)
class Chart:
    """A chart of a few metrics, each with its dashes, and ± its `spread`.

    The axis of `number` fits the values; others begin at 0. Metrics of steps are smoothed, unless
    they are counts. Evaluations are points. `shares` have a second axis.
    """

    title: str
    metrics: Sequence[str]
    form: Literal["number", "positive", "share", "count"] = "number"
    labels: Sequence[str] = ()
    spread: Sequence[str] = ()
    shares: Sequence[str] = ()
    note: str = ""
    flat: bool = False
    """Whether there are no values, or only 0."""


def reward_chart() -> Chart:
    """Return the chart of rewards, of training batches and of held-out prompts."""
    values, stderrs = zip(*(names("reward", mode) for mode in MODES), strict=True)
    labels = ("training batches", *(f"held-out, {mode}" for mode in MODES))
    return Chart("reward", ("reward", *values), "number", labels, ("", *stderrs))


class Charts:
    """Charts as JSON of the metrics that some runs have, in the order of their tables."""

    def __init__(self, tables: Sequence[pd.DataFrame]):
        ends = pd.concat([table.agg(["min", "max"]).T for table in tables]).dropna()
        self._least = {
            str(name): float(v) for name, v in ends["min"].groupby(level=0).min().items()
        }
        self._filled = {str(name) for name in ends.index[(ends != 0).any(axis=1)]}

    def panels(self) -> list[dict[str, Any]]:
        """Return a chart for each panel of the first screen."""
        charts = (self._chart(p.title, p.metrics, f"healthy: {p.healthy}") for p in PANELS)
        return [asdict(chart) for chart in charts]

    def sections(self) -> dict[str, tuple[str, list[dict[str, Any]]]]:
        """Return for each section a sentence and the charts that have values.

        The last section has each metric that no other shows.
        """
        charts = {
            "Reward functions": ("Each reward function alone, before its weight.", self._rewards()),
            "Held-out prompts": ("Evaluations, ± standard errors over prompts.", self._scores()),
        }
        for section in SECTIONS[:-1]:
            by_title: dict[str, list[Metric]] = {}
            for metric in section.metrics:
                by_title.setdefault(metric.chart or metric.name, []).append(metric)
            drawn = [self._chart(title, metrics) for title, metrics in by_title.items()]
            charts[section.title] = section.about, drawn
        used = {*AXES, "requested", "samples_trained", *reward_chart().metrics}
        for panel in PANELS:
            used.update(*(metric.labels(self._least) for metric in panel.metrics))
        for _, drawn in charts.values():
            used.update(*({*chart.metrics, *chart.spread} for chart in drawn))
        left = (name for name in sorted(self._least) if name not in used)
        others = [Chart(name, (name,)) for name in left if not name.endswith("stderr")]
        charts[OTHERS] = SECTIONS[-1].about, others
        shown = {}
        for title, (about, drawn) in charts.items():
            known = [chart for chart in drawn if not self._least.keys().isdisjoint(chart.metrics)]
            # a count that is always 0 has nothing to show
            kept = [asdict(chart) for chart in known if not (chart.form == "count" and chart.flat)]
            if kept:
                shown[title] = about, kept
        return shown

    def _chart(self, title: str, metrics: Sequence[Metric], note: str = "") -> Chart:
        """Return a chart of what there is of these metrics.

        Only a metric that has been negative needs an axis that does not begin at 0.
        """
        labels: dict[str, str] = {}
        shares: list[str] = []
        form: Any = "positive"
        for metric in metrics:
            present = metric.labels(self._least)
            labels |= present
            if metric.axis == "share":
                shares += present
            elif metric.axis == "count":
                form = "count"
            elif metric.axis == "number" or any(self._least[name] < 0 for name in present):
                form = "number"
        if len(shares) == len(labels):
            form = "share"
            shares = []
        return Chart(
            title=title,
            metrics=tuple(labels),
            form=form,
            labels=tuple(labels.values()),
            shares=tuple(shares),
            note=note,
            flat=self._filled.isdisjoint(labels),
        )

    def _rewards(self) -> list[Chart]:
        """Return a chart for each reward function."""
        charts = []
        for name in sorted(self._least):
            if match := EACH_REWARD.fullmatch(name):
                title = f"{match[1]}, mean ± standard deviation"
                charts.append(Chart(title, (name,), spread=(f"rewards/{match[1]}/std",)))
        return charts

    def _scores(self) -> list[Chart]:
        """Return a chart for each score of evaluations, of sampled and of greedy answers."""
        of_k = [name for name in sorted(self._least) if re.fullmatch(r"eval/(pass|avg)@\d+", name)]
        labels = [name.removeprefix("eval/") for name in of_k]
        charts = [Chart("pass@k and avg@k", of_k, "share", labels, [f"{n}_stderr" for n in of_k])]
        measured: dict[tuple[str, str], None] = {}
        for name in self._least:
            match = SCORE.fullmatch(name)
            if match and not name.endswith("stderr"):
                measured[match[1] or "", match[3]] = None
        for subset, measure in sorted(measured):
            values, stderrs = zip(*(names(measure, mode, subset) for mode in MODES), strict=True)
            title = f"{subset} {measure.replace('_', ' ')}".strip()
            form: Any = "share" if measure in SHARES else "number"
            charts.append(Chart(title, values, form, MODES, stderrs))
        return charts


def columns(table: pd.DataFrame) -> dict[str, list[float | None]]:
    """Return the columns of a table that have values, with at most `POINTS` rows."""
    if len(table) > POINTS:
        table = table.groupby(np.arange(len(table)) * POINTS // len(table)).mean()
    filled = table.dropna(axis=1, how="all")
    return {
        str(name): [None if isnan(v) else float(f"{v:.6g}") for v in values.tolist()]
        for name, values in filled.items()
    }
