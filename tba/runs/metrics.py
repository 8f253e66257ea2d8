"""The metrics of a run, from metrics.toml: the twelve panels, and the sections of the report."""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from math import isfinite
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

EACH_REWARD = re.compile(r"rewards/(.+)/mean")
"""Metric of each reward function."""
FORMS = {"number": "{:.3f}", "positive": "{:.3f}", "share": "{:.1%}", "count": "{:,.0f}"}
"""Formats of values by their axis."""


@dataclass(frozen=True)
class Metric:
    """A metric. A `*` in its name stands for any name, which is then the label.

    The axis of `number` fits the values; others begin at 0.
    """

    name: str
    meaning: str
    label: str = ""
    chart: str = ""
    axis: Literal["number", "positive", "share", "count"] = "positive"
    form: str = ""
    """Format of a value, if it is not the one of the axis."""

    def text(self, value: float) -> str:
        return (self.form or FORMS[self.axis]).format(value)

    def labels(self, names: Collection[str]) -> dict[str, str]:
        """Return the label of each of the names that the metric stands for."""
        before, star, after = self.name.partition("*")
        if not star:
            return {self.name: self.label} if self.name in names else {}
        matched = matching(names, self.name)
        return {name: name.removeprefix(before).removesuffix(after) for name in matched}


@dataclass(frozen=True)
class Panel:
    """One chart of the first screen, with the metrics that belong together."""

    title: str
    healthy: str  # what a healthy run shows, as in the table of docs/watching.md
    metrics: Sequence[Metric]


@dataclass(frozen=True)
class Section:
    """A section of the report."""

    title: str
    about: str
    metrics: Sequence[Metric]


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PANELS = TypeAdapter(list[Panel]).validate_python(TABLE["panels"])
SECTIONS = TypeAdapter(list[Section]).validate_python(TABLE["sections"])


def shown(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """Yield name, label and text of each metric that the panels show."""
    for panel in PANELS:
        for metric in panel.metrics:
            for name, label in metric.labels(metrics.keys()).items():
                if isfinite(metrics[name]):
                    yield name, label, metric.text(metrics[name])
