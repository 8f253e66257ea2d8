"""How the runs of a grid are set out: which are averaged, what makes a line, a panel and a number axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tba.log import METRICS, read
from tba.results import Row, Told, curve

SEED = "run.seed"


@dataclass(frozen=True)
class Value:
    """A mean over seeds and its standard error, which takes two of them."""

    mean: float
    stderr: float | None


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed only: rows of `results.json`, and the evaluations of each."""

    axes: Mapping[str, Any]
    rows: Sequence[Row]
    curves: Sequence[Sequence[Row]]

    def value(self, name: str) -> Value | None:
        """Over the runs that have come to their end."""
        values = self.values(name)
        if not values:
            return None
        return Value(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)

    def values(self, name: str) -> list[float]:
        return [float(r[name]) for r in self.rows if r["status"] == "finished" and r.get(name) is not None]

    def count(self, status: str) -> int:
        return sum(r["status"] == status for r in self.rows)

    def average(self, x: str) -> tuple[list[float], list[float], list[float], list[float]]:
        """x, mean, least and greatest score at each evaluation that all finished runs have had."""
        ended = [{p["step"]: p for p in c} for r, c in zip(self.rows, self.curves, strict=True) if r["status"] == "finished"]
        steps = sorted(set.intersection(*(set(c) for c in ended))) if ended else []
        scores = [[float(c[step]["score"]) for c in ended] for step in steps]
        return [fmean(c[step][x] for c in ended) for step in steps], [fmean(s) for s in scores], [min(s) for s in scores], [max(s) for s in scores]

    def cut_short(self, x: str) -> list[tuple[list[float], list[float]]]:
        """x and score of each run that failed."""
        failed = [c for r, c in zip(self.rows, self.curves, strict=True) if r["status"] == "failed" and c]
        return [([float(p[x]) for p in c], [float(p["score"]) for p in c]) for c in failed]


@dataclass(frozen=True)
class Layout:
    """A grid. Lines are what most strings tell apart, which is the objective as a rule; the other keys make panels."""

    name: str
    settings: Sequence[Setting]
    values: Mapping[str, Sequence[Any]]
    """Of each key that varies, seeds aside; numbers are in order."""
    lines: str | None

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(key for key in self.values if key != self.lines)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Keys whose values are numbers, that with the most first."""
        found = [key for key, values in self.values.items() if all(_number(v) for v in values)]
        return tuple(sorted(found, key=lambda key: -len(self.values[key])))

    def line(self, setting: Setting) -> Any:
        return None if self.lines is None else setting.axes.get(self.lines)

    def line_values(self) -> Sequence[Any]:
        return [None] if self.lines is None else self.values[self.lines]

    def panels(self, keys: Sequence[str]) -> dict[str, list[Setting]]:
        """Settings that agree in `keys`, under a title that says so, in the order of the keys' values."""
        order = {key: {_hashable(v): i for i, v in enumerate(self.values[key])} for key in keys}
        found: dict[str, list[Setting]] = {}
        for s in sorted(self.settings, key=lambda s: [order[key].get(_hashable(s.axes.get(key)), -1) for key in keys]):
            found.setdefault(", ".join(told(key, s.axes.get(key)) for key in keys), []).append(s)
        return found


def lay_out(folder: Path, name: str, runs: Sequence[Told], rows: Sequence[Row], metric: str) -> Layout:
    """The grid's settings in the order of the study."""
    groups: dict[str, list[tuple[Told, Row]]] = {}
    for run, row in zip(runs, rows, strict=True):
        if run.grid == name:
            groups.setdefault(repr([(k, v) for k, v in run.axes.items() if k != SEED]), []).append((run, row))
    settings = [
        Setting(
            {k: v for k, v in members[0][0].axes.items() if k != SEED},
            [row for _, row in members],
            [curve(read(folder / run.folder / METRICS), metric) for run, _ in members],
        )
        for members in groups.values()
    ]
    keys = list(dict.fromkeys(key for s in settings for key in s.axes))
    values = {key: _distinct([s.axes[key] for s in settings if key in s.axes]) for key in keys}
    varying = _apart({key: found for key, found in values.items() if len(found) > 1}, settings)
    texts = [key for key, found in varying.items() if not all(_number(v) for v in found)]
    lines = max(texts or varying, key=lambda key: len(varying[key]), default=None)
    return Layout(name, settings, varying, lines)


def told(key: str, value: Any) -> str:
    """`tb` for objective.use, `lag 4` for runtime.lag."""
    last = key.rpartition(".")[2]
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if last in ("use", "variant") else f"{last} {text}"


def _apart(values: Mapping[str, Sequence[Any]], settings: Sequence[Setting]) -> dict[str, Sequence[Any]]:
    """Without keys that go hand in hand with one before, such as the samples of a prompt with the size of a group: they are one axis."""
    found: dict[tuple[int, ...], str] = {}
    for key in values:
        seen: dict[str, int] = {}
        found.setdefault(tuple(seen.setdefault(_hashable(s.axes.get(key)), len(seen)) for s in settings), key)
    return {key: values[key] for key in found.values()}


def _distinct(values: Sequence[Any]) -> list[Any]:
    found = list({_hashable(v): v for v in values}.values())
    return sorted(found) if all(_number(v) for v in found) else found


def _hashable(value: Any) -> str:
    return repr(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
