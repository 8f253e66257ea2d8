"""How the runs of a grid are set out: which are averaged, what makes a line, a panel and a number axis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tba.runs.log import METRICS, read
from tba.studies.results import SEED, Row, Trial, curve, phrase, stderr

Value = str | int | float
"""Of a setting; what is neither text nor a number stands for itself as text."""


@dataclass(frozen=True)
class Mean:
    """Over seeds; the standard error takes two of them."""

    mean: float
    stderr: float | None


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed only: rows of `results.json`, and the evaluations of each."""

    axes: Mapping[str, Value]
    rows: Sequence[Row]
    curves: Sequence[Sequence[Row]]

    def mean(self, name: str) -> Mean | None:
        values = self.values(name)
        return Mean(fmean(values), stderr(values)) if values else None

    def values(self, name: str) -> list[float]:
        """Of the runs that have come to their end."""
        return [
            float(r[name])
            for r in self.rows
            if r["status"] == "finished" and r.get(name) is not None
        ]

    def count(self, status: str) -> int:
        return sum(r["status"] == status for r in self.rows)

    def evaluations(self) -> list[tuple[float, list[float]]]:
        """Samples trained on, and the score of each finished run, at every step where all of them were evaluated."""
        ended = [
            {p["step"]: p for p in c}
            for r, c in zip(self.rows, self.curves, strict=True)
            if r["status"] == "finished"
        ]
        steps = sorted(set.intersection(*(set(c) for c in ended))) if ended else []
        return [
            (fmean(c[step]["samples_trained"] for c in ended), [c[step]["score"] for c in ended])
            for step in steps
        ]


@dataclass(frozen=True)
class Layout:
    """A grid. Lines are what most strings tell apart, which is the objective as a rule; the other keys make panels."""

    name: str
    settings: Sequence[Setting]
    values: Mapping[str, Sequence[Value]]
    """Of each key that varies, seeds aside; numbers are in order."""
    lines: str | None

    @property
    def keys(self) -> list[str]:
        """Those that make panels, and last the one that makes lines."""
        return [
            *(key for key in self.values if key != self.lines),
            *([] if self.lines is None else [self.lines]),
        ]

    @property
    def number(self) -> str | None:
        """The key for a number axis: that with the most values, and the lines' own only if there is no other."""
        numeric = [key for key in self.values if numbers(self.values[key])]
        return max(
            numeric, key=lambda key: (key != self.lines, len(self.values[key])), default=None
        )

    def line_values(self) -> Sequence[Value]:
        return [] if self.lines is None else self.values[self.lines]

    def panels(self, *left_out: str | None) -> dict[str, list[Setting]]:
        """Settings that agree in all keys but these, under a title that says so, in the order of the keys' values."""
        keys = [key for key in self.values if key not in left_out]
        panels: dict[str, list[Setting]] = {}
        for s in sorted(
            self.settings, key=lambda s: [self.values[key].index(s.axes[key]) for key in keys]
        ):
            panels.setdefault(", ".join(phrase(key, s.axes[key]) for key in keys), []).append(s)
        return panels


def lay_out(
    folder: Path, name: str, trials: Sequence[Trial], rows: Sequence[Row], metric: str
) -> Layout:
    """The grid's settings in the order of the study."""
    groups: dict[str, list[tuple[Trial, Row]]] = {}
    for trial, row in zip(trials, rows, strict=True):
        if trial.grid == name:
            groups.setdefault(
                repr([(k, v) for k, v in trial.axes.items() if k != SEED]), []
            ).append((trial, row))
    settings = [
        Setting(
            {
                k: v if isinstance(v, str) or numbers([v]) else json.dumps(v)
                for k, v in members[0][0].axes.items()
                if k != SEED
            },
            [row for _, row in members],
            [curve(read(folder / trial.folder / METRICS), metric) for trial, _ in members],
        )
        for members in groups.values()
    ]
    values: dict[str, Sequence[Value]] = {}
    partitions = []
    for key in settings[0].axes:
        every = [s.axes[key] for s in settings]
        distinct = list(dict.fromkeys(every))
        partition = [distinct.index(v) for v in every]
        if (
            len(distinct) > 1 and partition not in partitions
        ):  # of keys that go hand in hand, as group_size and samples may, the first is enough
            values[key] = sorted(distinct) if numbers(distinct) else distinct
            partitions.append(partition)
    texts = [key for key in values if not numbers(values[key])]
    return Layout(
        name, settings, values, max(texts or values, key=lambda key: len(values[key]), default=None)
    )


def numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
