"""The report of a study: for each grid its learning curves, what it ended at, and what that cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tba.report.draw import png, write_page
from tba.report.figures import Styles, draw, styles_for
from tba.report.layout import Layout, Setting, Value, lay_out, told
from tba.results import Row, read_told, write_results

Form = Callable[[float], str]


@dataclass(frozen=True)
class Cell:
    text: str
    best: bool = False


@dataclass(frozen=True)
class Section:
    """A grid on the page."""

    name: str
    counts: str
    choices: Sequence[str]
    pictures: Mapping[str, str]
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    failures: Mapping[str, str]


def report_study(folder: Path, out: Path | None = None) -> Path:
    """Draws the page of the study in `folder`, by default into its `report`; returns its path. Also writes `results.json` anew."""
    study, runs = read_told(folder)
    rows = write_results(folder)
    if not any(r["peak"] is not None for r in rows):
        raise ValueError(f"{folder} has no evaluations yet; type `tba report {folder}` again once its first run is done")
    metric = rows[0]["metric"]
    target = out or folder / "report"
    target.mkdir(parents=True, exist_ok=True)
    layouts = [lay_out(folder, name, runs, rows, metric) for name in study["grids"]]
    lines = list(dict.fromkeys(v for g in layouts if g.lines not in g.numbers for v in g.line_values()))
    shared = styles_for([v if isinstance(v, str | bool | None) else repr(v) for v in lines])
    sections = [
        Section(
            layout.name,
            _counts([r for r in rows if r["grid"] == layout.name]),
            [_choice(c) for c in study["choices"] if c["grid"] == layout.name],
            _pictures(target, layout, styles_for(layout.line_values()) if layout.lines in layout.numbers else shared, metric),
            *_table(layout, metric),
            {r["folder"]: r["error"] for r in rows if r["grid"] == layout.name and r["status"] == "failed"},
        )
        for layout in layouts
        if any(r["peak"] is not None for r in rows if r["grid"] == layout.name)
    ]
    facts = {"Runs": str(len(runs)), "Ended": _counts(rows), "Compared by": metric.replace("_", " ")}
    facts["Time of all runs"] = f"{sum(r['seconds'] or 0 for r in rows) / 3600:.2f} h"
    return write_page(target, "study.html", {"name": study["name"], "facts": facts, "sections": sections, "metric": metric.replace("_", " ")})


def _pictures(target: Path, layout: Layout, styles: Styles, metric: str) -> dict[str, str]:
    """Of each figure that the grid has something for: the picture as the page holds it."""
    return {name: png(figure, target / f"{layout.name}_{name}.png") for name, figure in draw(layout, styles, metric).items()}


def _table(layout: Layout, metric: str) -> tuple[list[str], list[list[Cell]]]:
    """A row for each setting. The best end is marked among settings that differ only in what makes a line."""
    score: Form = (lambda v: f"{v:.1%}") if "pass@" in metric else (lambda v: f"{v:.3f}")
    columns: dict[str, tuple[str, Form]] = {
        "last": ("end", score),
        "peak": ("peak", score),
        "drop": ("drop after it", score),
        "kl": ("KL (nats)", lambda v: f"{v:.3g}"),
        "lag_mean": ("lag (steps)", lambda v: f"{v:.1f}"),
        "ess": ("effective share", lambda v: f"{v:.1%}"),
        "seconds": ("time (s)", lambda v: f"{v:.0f}"),
    }
    columns = {name: column for name, column in columns.items() if any(s.value(name) is not None for s in layout.settings)}
    keys = [*layout.others, *([layout.lines] if layout.lines is not None else [])]
    heads = [*(key.removesuffix(".use") for key in keys), "runs", *(head for head, _ in columns.values())]
    rows: list[list[Cell]] = []
    for settings in layout.panels(layout.others).values():
        ends = sorted(v.mean for s in settings if (v := s.value("last")) is not None)
        best = ends[-1] if len(ends) > 1 and ends[-1] > ends[-2] else None
        for s in settings:
            marked = best is not None and (end := s.value("last")) is not None and end.mean == best
            values = [Cell(_told(s.value(name), form), marked and name == "last") for name, (_, form) in columns.items()]
            rows.append([*(Cell(_text(s, key)) for key in keys), Cell(_runs(s)), *values])
    return heads, rows


def _told(value: Value | None, form: Form) -> str:
    if value is None:
        return "–"
    return form(value.mean) + ("" if value.stderr is None else f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{form(value.stderr)}")


def _text(setting: Setting, key: str) -> str:
    value = setting.axes.get(key, "–")
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _runs(setting: Setting) -> str:
    failed, pending = setting.count("failed"), setting.count("pending")
    return f"{len(setting.rows)}" + (f", {failed} failed" if failed else "") + (f", {pending} to come" if pending else "")


def _counts(rows: Sequence[Row]) -> str:
    """Such as `30 finished, 2 failed`."""
    counts = Counter(r["status"] for r in rows)
    return ", ".join(
        f"{counts[status]} {name}" for status, name in {"finished": "finished", "failed": "failed", "pending": "to come"}.items() if counts[status]
    )


def _choice(choice: Row) -> str:
    like = ", ".join(told(k, v) for k, v in choice["matched"].items())
    taken = ", ".join(f"{k} = {v}" for k, v in choice["settings"].items())
    return f"{like or 'all'}: {taken}, the best of {choice['best']} ({choice['told']})"
