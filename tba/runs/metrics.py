"""Metrics of a run, read from metrics.toml: the twelve panels, and the sections of the report."""

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
"""Format of the values of each kind of axis."""


@dataclass(frozen=True)
class Metric:
    """A metric. A `*` in its name matches any text, which is then the label.

    The axis of a `number` fits the values; all others start at 0.
    """

    name: str
    meaning: str
    label: str = ""
    chart: str = ""
    axis: Literal["number", "positive", "share", "count"] = "positive"
    form: str = ""
    """Format of a value, if it differs from the format of the axis."""

    def text(self, value: float) -> str:
        return (self.form or FORMS[self.axis]).format(value)

    def labels(self, names: Collection[str]) -> dict[str, str]:
        """Return the label of each name that matches the metric."""
        before, star, after = self.name.partition("*")
        if not star:
            return {self.name: self.label} if self.name in names else {}
        matched = matching(names, self.name)
        return {name: name.removeprefix(before).removesuffix(after) for name in matched}


@dataclass(frozen=True)
class Panel:
    """One chart of the first screen: metrics that belong together."""

    title: str
    healthy: str  # the curve of a healthy run, as in the table of docs/watching.md
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


def panel_values(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, label and text of each metric that the panels show."""
    for panel in PANELS:
        for metric in panel.metrics:
            for name, label in metric.labels(metrics.keys()).items():
                if isfinite(metrics[name]):
                    yield name, label, metric.text(metrics[name])
