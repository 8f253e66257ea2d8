"""The report of a study: learning curves, scores, costs and best settings of each grid."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tba.report.draw import png, with_stderr, write_page
from tba.report.figures import draw, styles_for
from tba.report.layout import Layout, lay_out, numbers
from tba.studies.results import SEED, read_ledger, write_results

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


@dataclass(frozen=True)
class Cell:
    text: str
    best: bool = False


@dataclass(frozen=True)
class Best:
    """The best of the settings that agree in all text axes."""

    name: str
    settings: Sequence[str]
    """Lines of TOML, for the next study."""
    score: str
    edges: Sequence[str]
    """Number axes of the grid that end at the best value."""


@dataclass(frozen=True)
class Section:
    """A grid on the page."""

    name: str
    counts: str
    pictures: Mapping[str, str]
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    best: Sequence[Best]
    failures: Mapping[str, str]


def report_study(folder: Path, out: Path | None = None) -> Path:
    """Draw the page of a study, by default into its folder `report`, and return the page's path.

    Also writes `results.json` again.
    """
    ledger, rows = read_ledger(folder), write_results(folder)
    begun = rows[rows["peak"].notna()]
    if begun.empty:
        raise ValueError(
            f"{folder} has no evaluations yet; type `tba report {folder}` again once its first run"
            " is done"
        )
    metric = rows["metric"][0]
    target = out or folder / "report"
    target.mkdir(parents=True, exist_ok=True)
    names = begun["grid"].unique()
    layouts = [lay_out(folder, name, ledger.runs, rows, metric) for name in names]
    texts = [v for g in layouts if not numbers(g.line_values()) for v in g.line_values()]
    shared = styles_for(list(dict.fromkeys(texts)))  # an objective looks the same in all grids
    sections = []
    for layout in layouts:
        lines = layout.line_values()
        figures = draw(layout, styles_for(lines) if numbers(lines) else shared, metric)
        pictures = {
            name: png(figure, target / f"{layout.name}_{name}.png")
            for name, figure in figures.items()
        }
        sections.append(_section(layout, pictures, metric))
    facts = {
        "Runs": str(len(rows)),
        "Status": _counts(rows["status"]),
        "Compared by": metric.replace("_", " "),
        "Time of all runs": f"{rows['seconds'].sum() / 3600:.2f} h",
    }
    values = {"name": ledger.name, "facts": facts, "sections": sections}
    return write_page(target, "study.html", {**values, "metric": metric.replace("_", " ")})


def _section(layout: Layout, pictures: Mapping[str, str], metric: str) -> Section:
    form = "{:.1%}" if "pass@" in metric else "{:.3f}"
    rows = layout.rows
    failed = rows[rows["status"] == "failed"]
    return Section(
        layout.name,
        _counts(rows["status"]),
        pictures,
        *_table(layout, form),
        _best(layout, form),
        dict(zip(failed["folder"], failed["error"], strict=True)),
    )


def _table(layout: Layout, form: str) -> tuple[list[str], list[list[Cell]]]:
    """Return heads, and a row for each setting. The best of each panel is marked."""
    columns = {
        name: (head, own or form)
        for name, (head, own) in COLUMNS.items()
        if name in layout.ends and layout.ends[name, "mean"].notna().any()
    }
    heads = [key.removesuffix(".use") for key in layout.keys] + ["runs"]
    heads += [head for head, _ in columns.values()]
    rows: list[list[Cell]] = []
    for settings in layout.panels(layout.lines).values():
        best = layout.best(settings) if len(settings) > 1 else None
        for setting in settings:
            axes = [layout.axes[setting][key] for key in layout.keys]
            row = [Cell(f"{v:g}" if isinstance(v, float) else str(v)) for v in axes]
            row.append(Cell(_runs(layout.rows.query("setting == @setting")["status"])))
            for name, (_, own) in columns.items():
                text = _mean(layout, setting, name, own)
                row.append(Cell(text, name == "last" and setting == best))
            rows.append(row)
    return heads, rows


def _best(layout: Layout, form: str) -> list[Best]:
    """Return the best setting for each combination of the text axes."""
    if not layout.values:
        return []
    numeric = [key for key in layout.values if numbers(layout.values[key])]
    settings = layout.rows.groupby("setting")["settings"].first()
    varied = _varied(list(settings))
    best = []
    for name, group in layout.panels(*(numeric or layout.values)).items():
        setting = layout.best(group)
        if setting is not None:
            own = settings[setting]
            lines = [f'"{key}" = {_toml(own[key])}' for key in varied if key in own]
            score = _mean(layout, setting, "last", form)
            best.append(Best(name, lines, score, layout.edges(setting)))
    return best


def _varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that are not the same in all settings, except the seed."""
    keys = dict.fromkeys(key for own in settings for key in own if key != SEED)
    first = settings[0]
    return [key for key in keys if any(own.get(key) != first.get(key) for own in settings)]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{key} = {_toml(v)}" for key, v in value.items())
        return f"{{ {inner} }}"
    return json.dumps(value)


def _mean(layout: Layout, setting: int, name: str, form: str) -> str:
    ends = layout.ends[name].loc[setting]
    return with_stderr(ends["mean"], ends["sem"], form)


def _runs(status: pd.Series) -> str:
    count = status.value_counts()
    text = str(len(status))
    for key, name in (("failed", "failed"), ("pending", "to come")):
        if key in count:
            text += f", {count[key]} {name}"
    return text


def _counts(status: pd.Series) -> str:
    """Return a text such as `30 finished, 2 failed`."""
    names = {"finished": "finished", "failed": "failed", "pending": "to come"}
    count = status.value_counts()
    return ", ".join(f"{count[key]} {name}" for key, name in names.items() if key in count)
