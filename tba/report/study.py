"""The report of a study: for each grid its learning curves, what it ended at, and what that cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tba.report.draw import number, png, write_page
from tba.report.figures import draw, styles_for
from tba.report.layout import Layout, Mean, Setting, lay_out, numbers
from tba.studies.results import Row, read_ledger, write_results

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
    ledger, rows = read_ledger(folder), write_results(folder)
    if not any(r["peak"] is not None for r in rows):
        raise ValueError(
            f"{folder} has no evaluations yet; type `tba report {folder}` again once its first run is done"
        )
    metric = rows[0]["metric"]
    target = out or folder / "report"
    target.mkdir(parents=True, exist_ok=True)
    begun = dict.fromkeys(r["grid"] for r in rows if r["peak"] is not None)
    layouts = [lay_out(folder, name, ledger.runs, rows, metric) for name in begun]
    shared = styles_for(
        list(
            dict.fromkeys(
                v for g in layouts if not numbers(g.line_values()) for v in g.line_values()
            )
        )
    )
    sections = []
    for layout in layouts:
        own = [r for r in rows if r["grid"] == layout.name]
        figures = draw(
            layout,
            styles_for(layout.line_values()) if numbers(layout.line_values()) else shared,
            metric,
        )
        sections.append(
            Section(
                layout.name,
                _counts(own),
                [str(c) for c in ledger.choices if c.grid == layout.name],
                {
                    name: png(figure, target / f"{layout.name}_{name}.png")
                    for name, figure in figures.items()
                },
                *_table(layout, metric),
                {r["folder"]: r["error"] for r in own if r["status"] == "failed"},
            )
        )
    facts = {
        "Runs": str(len(rows)),
        "Ended": _counts(rows),
        "Compared by": metric.replace("_", " "),
    }
    facts["Time of all runs"] = f"{sum(r['seconds'] or 0 for r in rows) / 3600:.2f} h"
    return write_page(
        target,
        "study.html",
        {
            "name": ledger.name,
            "facts": facts,
            "sections": sections,
            "metric": metric.replace("_", " "),
        },
    )


def _table(layout: Layout, metric: str) -> tuple[list[str], list[list[Cell]]]:
    """A row for each setting. The best end is marked among settings that differ only in what makes a line."""
    score: Form = lambda v: number(v, "pass@" in metric)  # noqa: E731
    columns: dict[str, tuple[str, Form]] = {
        "last": ("end", score),
        "peak": ("peak", score),
        "drop": ("drop after it", score),
        "sampled_kl": ("KL at the end (nats)", number),
        "lag_mean": ("lag (steps)", "{:.1f}".format),
        "ess": ("effective share", "{:.1%}".format),
        "seconds": ("time (s)", "{:.0f}".format),
    }
    columns = {
        name: column
        for name, column in columns.items()
        if any(s.values(name) for s in layout.settings)
    }
    heads = [
        *(key.removesuffix(".use") for key in layout.keys),
        "runs",
        *(head for head, _ in columns.values()),
    ]
    rows: list[list[Cell]] = []
    for settings in layout.panels(layout.lines).values():
        ends = [end.mean for s in settings if (end := s.mean("last"))]
        for s in settings:
            end = s.mean("last")
            best = end is not None and len(ends) > 1 and end.mean == max(ends)
            cells = [
                Cell(_with_stderr(s.mean(name), form), best and name == "last")
                for name, (_, form) in columns.items()
            ]
            axes = [s.axes[key] for key in layout.keys]
            rows.append(
                [
                    *(Cell(f"{v:g}" if isinstance(v, float) else str(v)) for v in axes),
                    Cell(_runs(s)),
                    *cells,
                ]
            )
    return heads, rows


def _with_stderr(value: Mean | None, form: Form) -> str:
    if value is None:
        return "–"
    return form(value.mean) + (
        "" if value.stderr is None else f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{form(value.stderr)}"
    )


def _runs(setting: Setting) -> str:
    failed, pending = setting.count("failed"), setting.count("pending")
    return (
        f"{len(setting.rows)}"
        + (f", {failed} failed" if failed else "")
        + (f", {pending} to come" if pending else "")
    )


def _counts(rows: Sequence[Row]) -> str:
    """Such as `30 finished, 2 failed`."""
    counts = Counter(r["status"] for r in rows)
    return ", ".join(
        f"{counts[status]} {name}"
        for status, name in (("finished", "finished"), ("failed", "failed"), ("pending", "to come"))
        if counts[status]
    )
