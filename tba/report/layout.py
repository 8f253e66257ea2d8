"""Layout of a grid: which runs are averaged, and which keys make lines, panels and axes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tba.studies.results import SEED, Settings, Trial, curve, phrase, read_metrics

Value = str | int | float
"""Value on an axis; lists, tables and booleans are shown as JSON."""


@dataclass(frozen=True)
class Layout:
    """A grid. Its settings are numbered in the order of the study; runs of one differ in the seed.

    Lines are the text axis with the most values, which usually is the objective; all other keys
    make panels.
    """

    name: str
    axes: Sequence[Mapping[str, Value]]
    """The values of each setting."""
    values: Mapping[str, Sequence[Value]]
    """All values of each key that varies, except the seed; numbers are sorted."""
    lines: str | None
    rows: pd.DataFrame
    """The rows of `results.json`, with a column `setting`."""
    ends: pd.DataFrame
    """Mean, standard error, min and max of `last`, `seconds`, … over the finished runs.

    One row for each setting, and columns such as `("last", "mean")`. Without finished runs: NaN.
    """
    curves: pd.DataFrame
    """Learning curves by setting and step: samples trained on, and mean, min and max of the score.

    Only steps at which all finished runs of the setting were evaluated.
    """

    @property
    def keys(self) -> list[str]:
        """Return the keys that make panels, and then the one that makes lines."""
        return sorted(self.values, key=lambda key: key == self.lines)

    @property
    def number(self) -> str | None:
        """Return the key of the number axis: that with the most values, preferably not of lines."""
        numeric = [key for key in self.values if numbers(self.values[key])]
        rank = {key: (key != self.lines, len(self.values[key])) for key in numeric}
        return max(numeric, key=lambda key: rank[key], default=None)

    def line_values(self) -> Sequence[Value]:
        return [] if self.lines is None else self.values[self.lines]

    def title(self, setting: int, keys: Sequence[str]) -> str:
        return ", ".join(phrase(key, self.axes[setting][key]) for key in keys)

    def panels(self, *left_out: str | None) -> dict[str, list[int]]:
        """Return the settings that agree in all keys but these, by a title with the values."""
        keys = [key for key in self.values if key not in left_out]

        def place(setting: int) -> list[int]:
            return [self.values[key].index(self.axes[setting][key]) for key in keys]

        panels: dict[str, list[int]] = {}
        for setting in sorted(range(len(self.axes)), key=place):
            panels.setdefault(self.title(setting, keys), []).append(setting)
        return panels

    def best(self, settings: Sequence[int]) -> int | None:
        """Return the setting with the fewest failed runs, and of those the highest mean score."""
        own = self.rows[self.rows["setting"].isin(settings)]
        failed = (own["status"] == "failed").groupby(own["setting"]).sum()
        means = self.ends["last", "mean"].reindex(settings).dropna()
        means = means[failed[means.index] == failed[means.index].min()]
        return None if means.empty else int(means.idxmax())

    def edges(self, setting: int) -> list[str]:
        """Return the keys of the number axes that end at the value of this setting."""
        numeric = [key for key in self.keys if numbers(self.values[key])]
        ends = {key: (self.values[key][0], self.values[key][-1]) for key in numeric}
        return [key for key in numeric if self.axes[setting][key] in ends[key]]


def lay_out(
    folder: Path, name: str, trials: Sequence[Trial], rows: pd.DataFrame, metric: str
) -> Layout:
    """Return the layout of the grid `name`. `rows` are those of all trials, in the same order."""
    at = [i for i, trial in enumerate(trials) if trial.grid == name]
    every = [_plain(trials[i].axes) for i in at]
    axes = list({json.dumps(own): own for own in every}.values())
    own_rows = rows.iloc[at].assign(setting=[axes.index(own) for own in every])
    values = _values(axes)
    texts = [key for key in values if not numbers(values[key])]
    lines = max(texts or values, key=lambda key: len(values[key]), default=None)
    ended = own_rows[own_rows["status"] == "finished"]
    measures = ended.select_dtypes("number").drop(columns="setting")
    ends = measures.astype(float).groupby(ended["setting"]).agg(["mean", "sem", "min", "max"])
    ends = ends.reindex(range(len(axes)))
    return Layout(name, axes, values, lines, own_rows, ends, _curves(folder, ended, metric))


def numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _plain(axes: Settings) -> dict[str, Value]:
    shown = {key: value for key, value in axes.items() if key != SEED}
    return {k: v if isinstance(v, str) or numbers([v]) else json.dumps(v) for k, v in shown.items()}


def _values(axes: Sequence[Mapping[str, Value]]) -> dict[str, Sequence[Value]]:
    """Return the values of each key that varies. Of keys that vary together, the first is kept."""
    values: dict[str, Sequence[Value]] = {}
    partitions = []
    for key in axes[0]:
        column = [own[key] for own in axes]
        distinct = list(dict.fromkeys(column))
        partition = [distinct.index(v) for v in column]
        if len(distinct) > 1 and partition not in partitions:
            values[key] = sorted(distinct) if numbers(distinct) else distinct
            partitions.append(partition)
    return values


def _curves(folder: Path, ended: pd.DataFrame, metric: str) -> pd.DataFrame:
    by_run = []
    for row in ended.itertuples():
        by_run.append(curve(read_metrics(folder / row.folder, "samples_trained"), metric))
        by_run[-1]["setting"] = row.setting
    if not by_run:
        return pd.DataFrame(columns=["samples", "mean", "min", "max"])
    evaluations = pd.concat(by_run).reset_index()
    at = evaluations.groupby(["setting", "step"])
    curves = at["score"].agg(["mean", "min", "max", "size"])
    curves["samples"] = at["samples_trained"].mean()
    runs = ended.groupby("setting").size()
    return curves[curves["size"] == runs.reindex(curves.index, level="setting")]
