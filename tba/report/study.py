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


@dataclass(frozen=True)
class Section:
    """A grid on the page."""

    name: str
    counts: str
    pictures: Mapping[str, str]
    table: pd.DataFrame
    best: pd.DataFrame
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
    sections = [_section(layout, shared, target, metric) for layout in layouts]
    facts = {
        "Runs": str(len(rows)),
        "Status": _counts(rows["status"]),
        "Compared by": metric.replace("_", " "),
        "Time of all runs": f"{rows['seconds'].sum() / 3600:.2f} h",
    }
    values = {"name": ledger.name, "facts": facts, "sections": sections}
    return write_page(target, "study.html", {**values, "metric": facts["Compared by"]})


def _section(layout: Layout, shared: Mapping[Any, Any], target: Path, metric: str) -> Section:
    form = "{:.1%}" if "pass@" in metric else "{:.3f}"
    lines = layout.line_values()
    figures = draw(layout, styles_for(lines) if numbers(lines) else shared, metric)
    pictures = {}
    for name, figure in figures.items():
        pictures[name] = png(figure, target / f"{layout.name}_{name}.png")
    failed = layout.rows[layout.rows["status"] == "failed"].set_index("folder")["error"]
    counts = _counts(layout.rows["status"])
    table, best = _table(layout, form), _best(layout, form)
    return Section(layout.name, counts, pictures, table, best, failed.to_dict())


def _table(layout: Layout, form: str) -> pd.DataFrame:
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
            row["runs"] = _counts(status.get_group(setting))
            for name, (head, own) in COLUMNS.items():
                row[head] = _mean(layout, setting, name, own or form)
            row["end"] += BEST * (setting == best)
            rows.append(row)
    table = pd.DataFrame(rows)
    return table.loc[:, (table != "–").any()]


def _best(layout: Layout, form: str) -> pd.DataFrame:
    """Return the best setting for each combination of the text axes, as TOML for the next study."""
    numeric = [key for key in layout.values if numbers(layout.values[key])]
    settings = layout.rows.groupby("setting")["settings"].first()
    varied = _varied(list(settings))
    rows = []
    for name, group in layout.panels(*(numeric or layout.values)).items():
        setting = layout.best(group)
        if setting is not None and layout.values:
            own = settings[setting]
            toml = ", ".join(f'"{key}" = {_toml(own[key])}' for key in varied if key in own)
            edges = ", ".join(layout.edges(setting))
            advice = edges and f"best at the edge of the grid ({edges}): extend it"
            rows.append([name, toml, _mean(layout, setting, "last", form), advice])
    return pd.DataFrame(rows, columns=["", "settings", "end", "advice"])


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
    if name not in layout.ends:
        return "–"
    ends = layout.ends[name].loc[setting]
    return with_stderr(ends["mean"], ends["sem"], form)


def _counts(status: pd.Series) -> str:
    """Return a text such as `30 finished, 2 failed`."""
    count = status.replace("pending", "to come").value_counts()
    names = [name for name in ("finished", "failed", "to come") if name in count]
    return ", ".join(f"{count[name]} {name}" for name in names)
