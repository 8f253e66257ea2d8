"""The report of one run, or of several side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from tba.report.draw import COLOURS, GREY, dress, number, plain, png, short, write_page
from tba.runs.log import CONFIG, METRICS, SAMPLES, SUMMARY, read
from tba.studies.results import Row, flat

Column = Float[np.ndarray, " rows"]
Form = Literal["number", "positive", "share", "count"]
MODES = ("sampled", "greedy")
AXES = {"time": "time (s)", "step": "steps", "samples_generated": "samples generated"}
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)))


@dataclass(frozen=True)
class Measure:
    """What evaluations are compared by: metrics of answers in one of `MODES`."""

    label: str
    value: str
    stderr: str
    form: Form

    def text(self, evaluation: Row, mode: str) -> str:
        """With its standard error."""
        return "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}".join(
            number(evaluation.get(name.format(mode)), self.form == "share")
            for name in (self.value, self.stderr)
        )


PASS = Measure("pass@1", "eval/{}_pass@1", "eval/{}_stderr", "share")
REWARD = Measure("reward", "eval/{}_reward", "eval/{}_reward_stderr", "number")


@dataclass(frozen=True)
class Record:
    """What a run has written down so far; rows are in the order of their step, which for an evaluation is the version evaluated."""

    name: str
    colour: str
    config: Row
    steps: list[Row]
    evaluations: list[Row]
    samples: list[Row]
    totals: Row

    def facts(self, measure: Measure) -> Mapping[str, str]:
        ends = self.evaluations[:1] + self.evaluations[1:][-1:]
        reward, lag_mean, lag_max = (
            _column(self.steps, name)
            for name in ("reward", "off_policy/lag_mean", "off_policy/lag_max")
        )
        tenth = ceil(len(reward) / 10)
        return {
            "Objective": self.config["objective"]["use"],
            "Steps": f"{self.steps[-1]['step']:,} of {self.config['run']['steps']:,} ({self.totals['status']})",
            "Time": f"{self.totals['seconds']:,.1f} s",
            **{
                f"Held-out {measure.label}, {mode}": " → ".join(measure.text(e, mode) for e in ends)
                or "–"
                for mode in MODES
            },
            "Training reward, first → last tenth": f"{reward[:tenth].mean():.3f} → {reward[-tenth:].mean():.3f}",
            "Lag": f"{lag_mean.mean():.1f} steps, at most {lag_max.max():.0f}",
            "Trainer waited": f"{self.totals['trainer_wait_fraction']:.2%}",
            "Searchers waited": f"{self.totals['searcher_wait_fraction']:.2%}",
            "Samples generated": f"{self.totals['samples_generated']:,.0f}",
            "Samples trained on": f"{self.totals['samples_trained']:,.0f}",
            "Samples rejected": f"{self.steps[-1]['searchers/rejected']:,.0f}",
        }

    def held_out(self) -> list[list[Row]]:
        """Of each held-out prompt, the samples of the first and of the last evaluation; of the first alone while there is no other."""
        answers: dict[int, dict[str, Row]] = {}
        for s in self.samples:
            if s["kind"] == "eval":
                answers.setdefault(s["version"], {})[s["prompt"]] = s
        ends = (
            [answers[version] for version in sorted({min(answers), max(answers)})]
            if answers
            else [{}]
        )
        return [
            [end[prompt] for end in ends]
            for prompt in ends[0]
            if all(prompt in end for end in ends)
        ]

    def trained_on(self) -> list[Row]:
        """A few samples, from the first to the last."""
        found = [s for s in self.samples if s["kind"] == "train"]
        return (
            [found[i] for i in sorted({int(i) for i in np.linspace(0, len(found) - 1, 4)})]
            if found
            else []
        )


@dataclass(frozen=True)
class Panel:
    """One set of axes: at most two metrics, the second dashed. `spread` is what to draw on both sides of each.

    Of steps, a mean of neighbours is drawn over what each one had, but counts as they are; evaluations are points.
    """

    title: str
    metrics: tuple[str, ...]
    form: Form = "number"
    labels: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    x: str = "step"
    evaluations: bool = False

    def rows(self, record: Record) -> list[Row]:
        return record.evaluations if self.evaluations else record.steps

    def shows(self, row: Row) -> bool:
        return any(
            row.get(name) is not None and (row[name] or self.form != "count")
            for name in self.metrics
        )


FIGURES = {
    "trained_on": (
        Panel(
            "lag (steps)",
            ("off_policy/lag_mean", "off_policy/lag_max"),
            "positive",
            ("mean", "max"),
        ),
        Panel("reward, mean ± standard deviation", ("reward",), spread=("reward_std",)),
        Panel("log(pi / ref) of the batches (nats)", ("kl",)),
        Panel(
            "held-out KL to the reference (nats)",
            ("eval/sampled_kl",),
            "positive",
            evaluations=True,
        ),
        Panel("entropy (nats per token)", ("entropy",), "positive"),
        Panel("response length (tokens)", ("completions/mean_length",), "positive"),
    ),
    "buffer": (
        Panel("responses held", ("buffer/size",), "count"),
        Panel("prompts held", ("buffer/prompts",), "count"),
        Panel("samples", ("buffer/added", "buffer/duplicates"), "count", ("added", "duplicates")),
        Panel(
            "evicted",
            ("buffer/evicted_per_prompt", "buffer/evicted_capacity"),
            "count",
            ("for a prompt's limit", "for the capacity"),
        ),
        Panel("groups drawn short of samples", ("buffer/short_groups",), "count"),
        Panel("distinct responses in a group", ("buffer/distinct_per_group",), "positive"),
    ),
    "waits": (
        Panel("trainer waits (share of its time)", ("wait/trainer",), "share"),
        Panel("searchers wait (share of their time)", ("wait/searchers",), "share"),
        Panel("optimizer step (s)", ("step_time",), "positive"),
        Panel("publishing the weights (s)", ("sync/seconds",), "positive"),
        Panel("logp, engine − trainer, after a sync", ("sync/logp_gap",), "positive"),
        Panel(
            "searchers replaced, samples rejected",
            ("searchers/restarts", "searchers/rejected"),
            "count",
            ("replaced", "rejected"),
        ),
    ),
}


def report_runs(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Draws the page into `out`, by default `report` in the run or, for several, here; returns its path. ValueError for a folder with nothing to draw."""
    records = _records(list(dict.fromkeys(p.expanduser().resolve() for p in runs)))
    folder = out or (runs[0].expanduser() / "report" if len(records) == 1 else Path("report"))
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = [e for r in records for e in r.evaluations]
    measure = (
        PASS
        if evaluations and all(PASS.value.format("sampled") in e for e in evaluations)
        else REWARD
    )
    figures = {
        name: png(_figure(panels, records), folder / f"{name}.png")
        for name, panels in {"reward": _rewards(measure), **FIGURES}.items()
    }
    values = {
        "runs": records,
        "measure": measure,
        "modes": MODES,
        "figures": figures,
        "differences": _differences(records),
        "number": number,
    }
    return write_page(folder, "report.html", values)


def _records(paths: Sequence[Path]) -> list[Record]:
    if not paths:
        raise ValueError("name at least one run: tba report RUN")
    same = Counter(p.name for p in paths)
    return [
        _record(p, p.name if same[p.name] == 1 else str(p), COLOURS[i % len(COLOURS)])
        for i, p in enumerate(paths)
    ]


def _record(path: Path, name: str, colour: str) -> Record:
    if not (path / CONFIG).is_file():
        near = sorted(
            p.parent for p in [*path.glob(f"*/{CONFIG}"), path.parent / CONFIG] if p.is_file()
        )
        instead = (
            f"`tba report {' '.join(map(str, near[:3]))}`"
            if near
            else "`tba report RUN` with the run folder that `tba train` named at its start"
        )
        raise ValueError(f"{path} is not a run's folder: it has no {CONFIG}; type {instead}")
    rows = read(path / METRICS)
    steps = [r for r in rows if "samples_generated" in r]
    if not steps:
        raise ValueError(
            f"{path} has no metrics yet; type `tba report {path}` again once its first step is done"
        )
    evaluations = {
        r["step"]: r for r in rows if "eval/sampled_reward" in r
    }  # the last word of a version: a resumed run may evaluate one again
    for version, row in evaluations.items():
        row["samples_generated"] = np.interp(
            version, [0, *(s["step"] for s in steps)], [0, *(s["samples_generated"] for s in steps)]
        )
    in_order = [evaluations[version] for version in sorted(evaluations)]
    return Record(
        name,
        colour,
        json.loads((path / CONFIG).read_text()),
        steps,
        in_order,
        read(path / SAMPLES),
        _totals(path, steps),
    )


def _totals(path: Path, steps: list[Row]) -> Row:
    """As `summary.json` has them; from the steps while a run goes on, be it resumed beside the summary of its last session."""
    summary = (
        json.loads((path / SUMMARY).read_text()) if (path / SUMMARY).is_file() else {"steps": None}
    )
    waits = {
        "trainer_wait_fraction": _share(steps, "wait/trainer"),
        "searcher_wait_fraction": _share(steps, "wait/searchers"),
    }
    if summary["steps"] == steps[-1]["step"]:
        return {**waits, **summary, "status": "finished" if summary["finished"] else "stopped"}
    return {**steps[-1], **waits, "seconds": steps[-1]["time"], "status": "unfinished"}


def _column(rows: Sequence[Row], name: str, absent: float = np.nan) -> Column:
    values = np.array(
        [np.nan if (value := row.get(name, absent)) is None else value for row in rows], float
    )
    return np.where(np.isfinite(values), values, np.nan)


def _share(steps: list[Row], name: str) -> float:
    """A share of each step's time as one of the run's. The first step is left out: its time may have begun with the first fill."""
    seconds, shares = np.diff(_column(steps, "time")), _column(steps, name)
    return (
        float((shares[1:] * seconds).sum() / seconds.sum())
        if seconds.sum() > 0
        else float(shares[0])
    )


def _smooth(values: Column) -> Column:
    """The mean over a centred window of a twenty-fifth of the run; gaps are left out."""
    half = len(values) // 50
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return np.array(
        [
            window[np.isfinite(window)].mean() if np.isfinite(window).any() else np.nan
            for window in windows
        ]
    )


def _rewards(measure: Measure) -> tuple[Panel, ...]:
    values, stderrs = (
        tuple(name.format(mode) for mode in MODES) for name in (measure.value, measure.stderr)
    )
    training = [Panel("training reward", ("reward",), x=x) for x in AXES]
    return (
        *training,
        *(
            Panel(
                f"held-out {measure.label} ± standard error",
                values,
                measure.form,
                MODES,
                stderrs,
                x,
                True,
            )
            for x in AXES
        ),
    )


def _figure(panels: Sequence[Panel], records: Sequence[Record]) -> Figure:
    """Three panels a row; those of which no run has anything, or has counted anything, are left out."""
    panels = [p for p in panels if any(p.shows(row) for r in records for row in p.rows(r))]
    rows = ceil(len(panels) / 3)
    figure = Figure(figsize=(12, 0.4 + 2.8 * rows), layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, 3, i + 1)
        dress(axes, panel.title, AXES[panel.x])
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        axes.yaxis.set_major_formatter(
            PercentFormatter(1) if panel.form == "share" else FuncFormatter(short)
        )
        for record in records:
            _draw(axes, panel, record, [record.colour] * 2 if len(records) > 1 else COLOURS)
        keys = [
            Line2D([], [], color=c, linestyle=d)
            for c, d in zip([GREY] * 2 if len(records) > 1 else COLOURS, DASHES, strict=False)
        ]
        if panel.labels:
            axes.legend(keys, panel.labels, handlelength=2.4, frameon=False)
        if panel.form != "number":
            axes.set_ylim(
                0,
                max(axes.get_ylim()[1], {"positive": 1e-9, "share": 0.1, "count": 1.0}[panel.form]),
            )  # a little waiting is to look like little
    if len(records) > 1:
        handles = [Line2D([], [], color=r.colour, linewidth=3) for r in records]
        figure.legend(
            handles,
            [plain(r.name[-60:]) for r in records],
            loc="outside upper left",
            ncols=4,
            frameon=False,
        )
    return figure


def _draw(axes: Axes, panel: Panel, record: Record, colours: Sequence[str]) -> None:
    rows = panel.rows(record)
    rows = rows[:: 1 + len(rows) // 4000]  # more points than that are not to be seen
    x = _column(rows, panel.x)
    spreads = [_column(rows, name) for name in panel.spread] or [np.zeros(len(x))] * 2
    for metric, spread, colour, dash, face in zip(
        panel.metrics, spreads, colours, DASHES, (colours[0], "white"), strict=False
    ):
        y = _column(rows, metric, absent=0.0 if panel.form == "count" else np.nan)
        if panel.evaluations:
            axes.errorbar(
                x,
                y,
                spread,
                color=colour,
                linestyle=dash,
                marker="o",
                markersize=4.5,
                markerfacecolor=face,
                capsize=2.5,
                elinewidth=1,
            )
            continue
        smooth = y if panel.form == "count" else _smooth(y)
        axes.plot(x, y, color=colour, alpha=0.22, linewidth=0.8)
        axes.plot(x, smooth, color=colour, linestyle=dash, linewidth=1.7)
        if panel.spread:
            axes.fill_between(
                x,
                smooth - _smooth(spread),
                smooth + _smooth(spread),
                color=colour,
                alpha=0.12,
                linewidth=0,
            )


def _differences(records: Sequence[Record]) -> Mapping[str, list[str]]:
    """The config keys in which the runs differ, with each one's value."""
    configs = [{key: json.dumps(value) for key, value in flat(r.config).items()} for r in records]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.folder")
    return {
        key: values
        for key in keys
        if len(set(values := [config.get(key, "–") for config in configs])) > 1
    }
