"""Tables of a grid: which runs are averaged, and which keys make lines, panels and axes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tba.report.draw import with_stderr
from tba.studies.results import SEED, Settings, Trial, curve, phrase, read_metrics

BEST = " ★"
COLUMNS = {
    "last": ("end", ""),
    "peak": ("peak", ""),
    "drop": ("drop after it", ""),
    "sampled_kl": ("KL at the end (nats)", "{:.3f}"),
    "lag_mean": ("lag (steps)", "{:.1f}"),
    "ess": ("effective share", "{:.1%}"),
    "seconds": ("time (s)", "{:.0f}"),
}
"""Head and format of the columns of a grid's table; those without a format show the metric."""

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
    def numeric(self) -> list[str]:
        return [key for key in self.keys if numbers(self.values[key])]

    @property
    def number(self) -> str | None:
        """Return the key of the number axis: that with the most values, preferably not of lines."""
        rank = {key: (key != self.lines, len(self.values[key])) for key in self.numeric}
        return max(rank, key=lambda key: rank[key], default=None)

    @property
    def line_values(self) -> Sequence[Value]:
        return [] if self.lines is None else self.values[self.lines]

    def line(self, setting: int) -> Value | None:
        return None if self.lines is None else self.axes[setting][self.lines]

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
        failed = (self.rows["status"] == "failed").groupby(self.rows["setting"]).sum()
        ranks = pd.DataFrame({"failed": failed, "mean": self.ends["last", "mean"]}).loc[settings]
        ranks = ranks.dropna().sort_values(["failed", "mean"], ascending=[True, False])
        return None if ranks.empty else int(ranks.index[0])

    def text(self, setting: int, name: str) -> str:
        """Return a mean and its standard error in the format of the column."""
        if name not in self.ends:
            return "–"
        of_metric = "{:.1%}" if "pass@" in self.rows["metric"].iloc[0] else "{:.3f}"
        ends = self.ends[name].loc[setting]
        return with_stderr(ends["mean"], ends["sem"], COLUMNS[name][1] or of_metric)


def lay_out(
    folder: Path, name: str, trials: Sequence[Trial], rows: pd.DataFrame, metric: str
) -> Layout:
    """Return the layout of the grid `name`. `rows` are those of all trials, in the same order."""
    every = [_plain(trial.axes) for trial in trials if trial.grid == name]
    axes = list({json.dumps(own): own for own in every}.values())
    setting = [axes.index(own) for own in every]
    own_rows = rows[[trial.grid == name for trial in trials]].assign(setting=setting)
    values = _values(axes)
    texts = [key for key in values if not numbers(values[key])]
    lines = max(texts or values, key=lambda key: len(values[key]), default=None)
    ended = own_rows[own_rows["status"] == "finished"]
    measures = ended.select_dtypes("number").drop(columns="setting")
    ends = measures.astype(float).groupby(ended["setting"]).agg(["mean", "sem", "min", "max"])
    ends = ends.reindex(range(len(axes)))
    return Layout(name, axes, values, lines, own_rows, ends, _curves(folder, ended, metric))


def table(layout: Layout) -> pd.DataFrame:
    """Return a row for each setting. The best of each panel is marked."""
    rows = []
    status = layout.rows.groupby("setting")["status"]
    for settings in layout.panels(layout.lines).values():
        best = layout.best(settings) if len(settings) > 1 else None
        for setting in settings:
            row = {}
            for key in layout.keys:
                value = layout.axes[setting][key]
                row[key.removesuffix(".use")] = f"{value:g}" if numbers([value]) else str(value)
            row["runs"] = counts(status.get_group(setting))
            row |= {head: layout.text(setting, name) for name, (head, _) in COLUMNS.items()}
            row["end"] += BEST * (setting == best)
            rows.append(row)
    shown = pd.DataFrame(rows)
    return shown.loc[:, (shown != "–").any()]


def best_table(layout: Layout) -> pd.DataFrame:
    """Return the best setting for each combination of the text axes, as TOML for the next study."""
    settings = layout.rows.groupby("setting")["settings"].first()
    keys = dict.fromkeys(key for own in settings for key in own if key != SEED)
    varied = [key for key in keys if any(s.get(key) != settings[0].get(key) for s in settings)]
    rows = []
    for name, group in layout.panels(*(layout.numeric or layout.values)).items():
        setting = layout.best(group)
        if setting is not None and layout.values:
            own, axes = settings[setting], layout.axes[setting]
            toml = ", ".join(f'"{key}" = {_toml(own[key])}' for key in varied if key in own)
            edges = []
            for key in layout.numeric:
                low, *_, high = layout.values[key]
                if axes[key] in (low, high):
                    edges.append(key)
            advice = f"best at the edge of the grid ({', '.join(edges)}): extend it"
            rows.append([name, toml, layout.text(setting, "last"), advice * bool(edges)])
    return pd.DataFrame(rows, columns=["", "settings", "end", "advice"])


def counts(status: pd.Series) -> str:
    """Return a text such as `30 finished, 2 failed`."""
    count = status.replace("pending", "to come").value_counts()
    names = [name for name in ("finished", "failed", "to come") if name in count]
    return ", ".join(f"{count[name]} {name}" for name in names)


def numbers(values: Sequence[Any]) -> bool:
    return all(type(v) in (int, float) for v in values)


def _plain(axes: Settings) -> dict[str, Value]:
    shown: dict[str, Value] = {}
    for key, value in axes.items():
        if key != SEED:
            is_plain = isinstance(value, str) or numbers([value])
            shown[key] = value if is_plain else json.dumps(value)
    return shown


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
    at = pd.concat(by_run).reset_index().groupby(["setting", "step"])
    curves = at["score"].agg(["mean", "min", "max", "size"])
    curves["samples"] = at["samples_trained"].mean()
    runs = ended.groupby("setting").size()
    return curves[curves["size"] == runs.reindex(curves.index, level="setting")]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{key} = {_toml(inner)}" for key, inner in value.items()]
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(value)
