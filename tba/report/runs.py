"""The page of runs: the facts of each, read from the files in its folder, and their figures."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, nan
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tba.report.draw import COLOURS, GREY, dress, number, plain, short, write_page
from tba.report.scores import MODES, measures_of, names, score
from tba.runs.log import CONFIG, SAMPLES, SUMMARY, read
from tba.studies.results import Row, flat, read_json, read_metrics

LAG = ("off_policy/lag_mean", "off_policy/lag_max")
WAITS = {"trainer_wait_fraction": "wait/trainer", "searcher_wait_fraction": "wait/searchers"}
"""The metric of each step for the shares of `summary.json`."""
AXES = {"time": "time (s)", "step": "steps", "samples_generated": "samples generated"}
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)))
Form = Literal["number", "positive", "share", "count"]
LOWEST_TOP: dict[Form, float] = {"positive": 1e-9, "share": 0.1, "count": 1.0}
"""Least height of an axis that begins at 0, so that small shares look small."""


@dataclass(frozen=True)
class Record:
    """The files of a run so far. For an evaluation, the step is the version evaluated."""

    name: str
    colour: str
    config: Row
    steps: pd.DataFrame
    evaluations: pd.DataFrame
    samples: list[Row]
    totals: Row

    def facts(self, measures: Mapping[str, str]) -> Mapping[str, str]:
        """Return facts by label; `measures` has the score to show of each subset."""
        totals, steps = self.totals, self.steps
        newest, tenth = steps.iloc[-1], ceil(len(steps) / 10)
        first, last = steps["reward"].head(tenth).mean(), steps["reward"].tail(tenth).mean()
        lag_mean, lag_max = (steps[name] for name in LAG)
        planned = self.config["run"]["steps"]
        evaluations, held_out = self.evaluations.to_dict("records"), {}
        ends = evaluations[:1] + evaluations[1:][-1:]
        for subset, measure in measures.items():
            for mode in MODES:
                column, _ = names(measure, mode, subset)
                texts = [score(e, measure, mode, subset) for e in ends if column in e]
                label = f"{subset or 'Held-out'} {measure}, {mode}"
                held_out[label] = " → ".join(texts) or "–"
        return {
            "Objective": self.config["objective"]["use"],
            "Steps": f"{newest['step']:,.0f} of {planned:,} ({totals['status']})",
            "Time": f"{totals['seconds']:,.1f} s",
            **held_out,
            "Training reward, first → last tenth": f"{first:.3f} → {last:.3f}",
            "Lag": f"{lag_mean.mean():.1f} steps, at most {lag_max.max():.0f}",
            "Trainer waited": f"{totals['trainer_wait_fraction']:.2%}",
            "Searchers waited": f"{totals['searcher_wait_fraction']:.2%}",
            "Samples generated": f"{totals['samples_generated']:,.0f}",
            "Samples trained on": f"{totals['samples_trained']:,.0f}",
            "Samples rejected": f"{newest['searchers/rejected']:,.0f}",
        }

    def held_out(self) -> list[list[Row]]:
        """Return the samples of each held-out prompt, from the first and the last evaluation."""
        answers: dict[int, dict[str, Row]] = {}
        for s in self.samples:
            if s["kind"] == "eval":
                answers.setdefault(s["version"], {})[s["prompt"]] = s
        ends = [answers[version] for version in sorted(answers)]
        ends = ends[:1] + ends[1:][-1:]
        common = [prompt for prompt in ends[0] if prompt in ends[-1]] if ends else []
        return [[end[prompt] for end in ends] for prompt in common]

    def trained_on(self) -> list[Row]:
        samples = [s for s in self.samples if s["kind"] == "train"]
        chosen = np.linspace(0, len(samples) - 1, min(4, len(samples)))
        return [samples[int(i)] for i in chosen]


def read_record(path: Path, name: str, colour: str) -> Record:
    config = read_json(path / CONFIG)
    if config is None:
        near = sorted(str(p.parent) for p in path.glob(f"*/{CONFIG}"))
        raise ValueError(
            f"{path} is not a run folder: it has no {CONFIG}; type"
            f" `tba report {' '.join(near[:3]) or 'RUN'}` with the folder that `tba train` printed"
        )
    metrics = read_metrics(path, "samples_generated", "searchers/rejected", *LAG, *WAITS.values())
    is_step = metrics["samples_generated"].notna()
    steps = metrics[is_step]
    if steps.empty:
        raise ValueError(
            f"{path} has no metrics yet; type `tba report {path}` again after its first step"
        )
    # a resumed run may have repeated an evaluation
    evaluations = metrics[~is_step].drop_duplicates("step", keep="last").sort_values("step")
    at, generated = [0, *steps["step"]], [0, *steps["samples_generated"]]
    evaluations["samples_generated"] = np.interp(evaluations["step"], at, generated)
    samples, totals = read(path / SAMPLES), _totals(path, steps)
    return Record(name, colour, config, steps, evaluations, samples, totals)


def _totals(path: Path, steps: pd.DataFrame) -> Row:
    """Return the contents of `summary.json`; while a run is not at its end, sums of its steps."""
    newest, summary = steps.iloc[-1].to_dict(), read_json(path / SUMMARY)
    seconds = steps["time"].diff().fillna(0)  # without the first step, which has the first fill
    waits = {name: steps[metric].iloc[0] for name, metric in WAITS.items()}
    if seconds.any():
        waits = {name: np.average(steps[metric], weights=seconds) for name, metric in WAITS.items()}
    if summary is not None and summary["steps"] == newest["step"]:  # else of an earlier session
        return {**waits, **summary, "status": "finished" if summary["finished"] else "stopped"}
    return {**newest, **waits, "seconds": newest["time"], "status": "unfinished"}


@dataclass(frozen=True)
class Panel:
    """Axes with at most two metrics, the second dashed, each ± its `spread`.

    Metrics of steps are smoothed, unless they are counts. Evaluations are points.
    """

    title: str
    metrics: tuple[str, ...]
    form: Form = "number"
    labels: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    x: str = "step"

    def rows(self, run: Record) -> pd.DataFrame:
        rows = run.evaluations if self.metrics[0].startswith("eval/") else run.steps
        rows = rows.reindex(columns=[self.x, *self.metrics, *self.spread])
        return rows.fillna(0) if self.form == "count" else rows

    def shows(self, run: Record) -> bool:
        """Return whether the run has values, or has counted anything."""
        values = self.rows(run)[list(self.metrics)]
        shown = values != 0 if self.form == "count" else values.notna()
        return bool(shown.any(axis=None))


FIGURES = {
    "trained_on": (
        Panel("lag (steps)", LAG, "positive", ("mean", "max")),
        Panel("reward, mean ± standard deviation", ("reward",), spread=("reward_std",)),
        Panel("KL to the reference (k3, nats per token)", ("kl",), "positive"),
        Panel("log(pi / ref) of the responses (nats)", ("log_ratio",)),
        Panel("held-out KL to the reference (nats)", ("eval/sampled_kl",), "positive"),
        Panel(
            "perplexity of held-out answers", ("eval/sampled_perplexity", "eval/greedy_perplexity"),
            "number", MODES,
        ),
        Panel(
            "held-out win rate ± standard error",
            ("eval/sampled_win_rate", "eval/greedy_win_rate"), "share", MODES,
            ("eval/sampled_win_rate_stderr", "eval/greedy_win_rate_stderr"),
        ),
        Panel("held-out distance of answers (cosine)", ("eval/sampled_distance",), "positive"),
        Panel("entropy (nats per token)", ("entropy",), "positive"),
        Panel("response length (tokens)", ("completions/mean_length",), "positive"),
    ),
    "buffer": (
        Panel("responses held", ("buffer/size",), "count"),
        Panel("prompts held", ("buffer/prompts",), "count"),
        Panel("samples", ("buffer/added", "buffer/duplicates"), "count", ("added", "duplicates")),
        Panel(
            "evicted", ("buffer/evicted_per_prompt", "buffer/evicted_capacity"), "count",
            ("limit of a prompt", "capacity"),
        ),
        Panel("groups with repeated samples", ("buffer/short_groups",), "count"),
        Panel("distinct responses in a group", ("buffer/distinct_per_group",), "positive"),
    ),
    "waits": (
        Panel("trainer waits (share of its time)", ("wait/trainer",), "share"),
        Panel("searchers wait (share of their time)", ("wait/searchers",), "share"),
        Panel("optimizer step (s)", ("step_time",), "positive"),
        Panel(
            "publishing the weights (s)", ("sync/blocked", "sync/adopted"),
            "positive", ("trainer blocked", "until adopted"),
        ),
        Panel("logp, engine − trainer, after a sync", ("sync/logp_gap",), "positive"),
        Panel(
            "searchers restarted, samples rejected", ("searchers/restarts", "searchers/rejected"),
            "count", ("restarted", "rejected"),
        ),
    ),
}  # fmt: skip


def report_runs(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Draw the page, by default into `report` in the run's folder or, for several, here."""
    paths = list(dict.fromkeys(path.expanduser().resolve() for path in runs))
    if not paths:
        raise ValueError("name at least one run: tba report RUN")
    count = Counter(path.name for path in paths)
    records = []
    for i, path in enumerate(paths):
        name = path.name if count[path.name] == 1 else str(path)
        records.append(read_record(path, name, COLOURS[i % len(COLOURS)]))
    folder = out or (runs[0].expanduser() / "report" if len(paths) == 1 else Path("report"))
    measures = measures_of([record.evaluations for record in records])
    measure = measures[""]
    panels = {"reward": _rewards(measure), **FIGURES}
    if len(measures) > 1:
        panels["subsets"] = [_held_out(m, "step", name) for name, m in measures.items() if name]
    figures = {name: _draw(own, records) for name, own in panels.items()}
    values = {"runs": records, "differences": _differences(records), "measures": measures}
    helpers = {"modes": MODES, "score": score, "number": number, "nan": nan, "measure": measure}
    return write_page(folder, "report.html", {**values, **helpers}, figures)


def _differences(records: Sequence[Record]) -> pd.DataFrame:
    """Return the config keys in which the runs differ, with a column for each run."""
    configs = [{key: json.dumps(v) for key, v in flat(r.config).items()} for r in records]
    keys = pd.DataFrame(configs).drop(columns="run.folder").fillna("–").T
    return keys[keys.nunique(axis=1) > 1]


def _rewards(measure: str) -> list[Panel]:
    """Return the panels of training and of held-out rewards, over each of `AXES`."""
    training = [Panel("training reward", ("reward",), x=x) for x in AXES]
    return training + [_held_out(measure, x) for x in AXES]


def _held_out(measure: str, x: str, subset: str = "") -> Panel:
    values, stderrs = zip(*(names(measure, mode, subset) for mode in MODES), strict=True)
    title = f"{subset or 'held-out'} {measure} ± standard error"
    form: Form = "share" if measure == "pass@1" else "number"
    return Panel(title, values, form, MODES, stderrs, x)


def _draw(panels: Sequence[Panel], runs: Sequence[Record]) -> Figure:
    """Draw three panels a row. Panels without data are left out."""
    panels = [p for p in panels if any(p.shows(run) for run in runs)]
    rows, several = ceil(len(panels) / 3), len(runs) > 1
    figure = Figure(figsize=(12, 0.4 + 2.8 * rows), layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, 3, i + 1)
        dress(axes, panel.title, AXES[panel.x])
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(short)
        share = panel.form == "share"
        axes.yaxis.set_major_formatter(PercentFormatter(1) if share else short)
        for run in runs:
            _draw_run(axes, panel, panel.rows(run), [run.colour] * 2 if several else COLOURS)
        if panel.labels:
            colours = [GREY] * 2 if several else COLOURS
            keys = [Line2D([], [], color=colours[j], linestyle=DASHES[j]) for j in (0, 1)]
            axes.legend(keys, panel.labels, handlelength=2.4, frameon=False)
        if panel.form in LOWEST_TOP:
            axes.set_ylim(0, max(axes.get_ylim()[1], LOWEST_TOP[panel.form]))
    if several:
        handles = [Line2D([], [], color=run.colour, linewidth=3) for run in runs]
        names = [plain(run.name[-60:]) for run in runs]
        figure.legend(handles, names, loc="outside upper left", ncols=4, frameon=False)
    return figure


def _draw_run(axes: Axes, panel: Panel, rows: pd.DataFrame, colours: Sequence[str]) -> None:
    for i, metric in enumerate(panel.metrics):
        x, y = rows[panel.x], rows[metric]
        look = {"color": colours[i], "linestyle": DASHES[i]}
        spread = rows[panel.spread[i]] if panel.spread else None
        if metric.startswith("eval/"):
            points: dict[str, Any] = {"marker": "o", "markersize": 4.5, "elinewidth": 1}
            points["markerfacecolor"] = "white" if i else colours[0]
            axes.errorbar(x, y, spread, **look, **points, capsize=2.5)
            continue
        line = y if panel.form == "count" else smooth(y)
        axes.plot(x, y, color=colours[i], alpha=0.22, linewidth=0.8)
        axes.plot(x, line, **look, linewidth=1.7)
        if spread is not None:
            low, high = line - smooth(spread), line + smooth(spread)
            axes.fill_between(x, low, high, color=colours[i], alpha=0.12, linewidth=0)


def smooth(values: pd.Series) -> pd.Series:
    """Return means over a centred window of a twenty-fifth of the run; gaps are left out."""
    window = 2 * (len(values) // 50) + 1
    return values.rolling(window, center=True, min_periods=1).mean()
