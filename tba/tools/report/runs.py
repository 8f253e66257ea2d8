"""Page of runs: facts and charts of each run, read from the files in its folder."""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, isnan
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from tba.display import duration
from tba.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    SAMPLES,
    SCORES,
    SESSIONS,
    SUMMARY,
    Row,
    flat,
    read,
    read_optional,
    read_warnings,
    resumes,
)
from tba.runs.generations import generations
from tba.runs.metrics import EACH_REWARD, PANELS, SECTIONS, Metric
from tba.runs.status import status_of
from tba.tools.report.about import (
    best_checkpoint,
    best_score,
    changed_settings,
    main_settings,
    spans_of,
    typed,
)
from tba.tools.report.compare import EvaluatedRun, compare
from tba.tools.report.page import (
    MODES,
    NotBegun,
    fitted,
    measures_of,
    names,
    score,
    script,
    write_page,
)

AXES = {"step": "steps", "time": "time (s)", "samples_generated": "samples generated"}
"""Choices for the x axis of the reward chart, and their labels on the switch."""
COLOURS = 10
"""Number of colours of lines in style.css; charts.js has the same."""
POINTS = 1000
"""Maximum number of points of a line. The points of a longer run are means over several steps."""
OTHERS = SECTIONS[-1].title
SCORE = re.compile(r"eval/(?:(.+)/)?(sampled|greedy)_(.+)")
"""Name of a score: its subset, how answers were generated, and the measure."""
STDERRS = dict(names("pass@1", mode) for mode in MODES)
"""Metric of the standard error of each pass rate of the held-out prompts."""
SHARES = {"pass@1", "win_rate", "finished", "rejected"}
"""Scores that are fractions."""
LAG = ("off_policy/lag_mean", "off_policy/lag_max")
WAITS = {"trainer_wait_fraction": "wait/trainer", "searcher_wait_fraction": "wait/searchers"}
"""Fractions in `summary.json`, and the corresponding metrics of each step."""


@dataclass(frozen=True)
class Chart:
    """A chart of a few metrics, each with its own dash pattern, ± its `spread`.

    The axis of a `number` fits the values; all others start at 0. Step metrics are smoothed, except
    counts. Evaluations are drawn as points. `shares` use a second axis.
    """

    title: str
    metrics: Sequence[str]
    form: Literal["number", "positive", "share", "count"] = "number"
    labels: Sequence[str] = ()
    spread: Sequence[str] = ()
    shares: Sequence[str] = ()
    note: str = ""
    flat: bool = False
    """Whether all values are missing or 0."""


def reward_chart() -> Chart:
    """Return the chart of rewards of training batches and held-out prompts."""
    values, stderrs = zip(*(names("reward", mode) for mode in MODES), strict=True)
    labels = ("training batches", *(f"held-out, {mode}" for mode in MODES))
    return Chart("reward", ("reward", *values), "number", labels, ("", *stderrs))


class Charts:
    """Charts, as JSON, of the metrics of some runs, given the tables of their metrics."""

    def __init__(self, tables: Sequence[pd.DataFrame]):
        ends = pd.concat([table.agg(["min", "max"]).T for table in tables]).dropna()
        self._least = {
            str(name): float(v) for name, v in ends["min"].groupby(level=0).min().items()
        }
        self._filled = {str(name) for name in ends.index[(ends != 0).any(axis=1)]}

    def panels(self, take_turns: bool = False) -> list[dict[str, Any]]:
        """Return a chart for each panel; in local runs, searcher and trainer `take_turns`."""
        charts = []
        for panel in PANELS:
            note = f"healthy: {panel.healthy}"
            if take_turns and any(metric.name in WAITS.values() for metric in panel.metrics):
                note = "runtime local: each side waits while the other works"
            charts.append(asdict(self._chart(panel.title, panel.metrics, note)))
        return charts

    def sections(self) -> dict[str, tuple[str, list[dict[str, Any]]]]:
        """Return a description and the charts that have values for each section.

        The last section contains each metric that no other section shows.
        """
        charts = {
            "Reward functions": ("Each reward function alone, before its weight.", self._rewards()),
            "Held-out prompts": ("Evaluations, ± standard errors over prompts.", self._scores()),
        }
        for section in SECTIONS[:-1]:
            by_title: dict[str, list[Metric]] = {}
            for metric in section.metrics:
                by_title.setdefault(metric.chart or metric.name, []).append(metric)
            drawn = [self._chart(title, metrics) for title, metrics in by_title.items()]
            charts[section.title] = section.about, drawn
        used = {*AXES, "requested", "samples_trained", *reward_chart().metrics}
        used |= {name for name in self._least if name.startswith("eval/avg@")}  # is pass@1
        for panel in PANELS:
            used.update(*(metric.labels(self._least) for metric in panel.metrics))
        for _, drawn in charts.values():
            used.update(*({*chart.metrics, *chart.spread} for chart in drawn))
        left = (name for name in sorted(self._least) if name not in used)
        others = [Chart(name, (name,)) for name in left if not name.endswith("stderr")]
        charts[OTHERS] = SECTIONS[-1].about, others
        shown = {}
        for title, (about, drawn) in charts.items():
            known = [chart for chart in drawn if not self._least.keys().isdisjoint(chart.metrics)]
            # a count that is always 0 has nothing to show
            kept = [asdict(chart) for chart in known if not (chart.form == "count" and chart.flat)]
            if kept:
                shown[title] = about, kept
        return shown

    def _chart(self, title: str, metrics: Sequence[Metric], note: str = "") -> Chart:
        """Return a chart of those of the metrics that the runs have.

        The axis starts at 0 unless a metric has been negative or is a `number`.
        """
        labels: dict[str, str] = {}
        shares: list[str] = []
        form: Any = "positive"
        for metric in metrics:
            present = metric.labels(self._least)
            labels |= present
            if metric.axis == "share":
                shares += present
            elif metric.axis == "count":
                form = "count"
            elif metric.axis == "number" or any(self._least[name] < 0 for name in present):
                form = "number"
        if len(shares) == len(labels):
            form = "share"
            shares = []
        return Chart(
            title=title,
            metrics=tuple(labels),
            form=form,
            labels=tuple(labels.values()),
            spread=[STDERRS.get(name, "") for name in labels],
            shares=tuple(shares),
            note=note,
            flat=self._filled.isdisjoint(labels),
        )

    def _rewards(self) -> list[Chart]:
        """Return a chart for each reward function."""
        charts = []
        for name in sorted(self._least):
            if match := EACH_REWARD.fullmatch(name):
                title = f"{match[1]}, mean ± standard deviation"
                charts.append(Chart(title, (name,), spread=(f"rewards/{match[1]}/std",)))
        return charts

    def _scores(self) -> list[Chart]:
        """Return a chart for each evaluation score, of sampled and greedy answers."""
        of_k = [name for name in sorted(self._least) if re.fullmatch(r"eval/pass@\d+", name)]
        labels = [name.removeprefix("eval/") for name in of_k]
        charts = [Chart("pass@k", of_k, "share", labels, [f"{n}_stderr" for n in of_k])]
        elsewhere = {*STDERRS, *reward_chart().metrics}  # each has one chart
        measured: dict[tuple[str, str], None] = {}
        for name in self._least:
            match = SCORE.fullmatch(name)
            if match and not name.endswith("stderr") and name not in elsewhere:
                measured[match[1] or "", match[3]] = None
        for subset, measure in sorted(measured):
            values, stderrs = zip(*(names(measure, mode, subset) for mode in MODES), strict=True)
            title = f"{subset} {measure.replace('_', ' ')}".strip()
            form: Any = "share" if measure in SHARES else "number"
            charts.append(Chart(title, values, form, MODES, stderrs))
        return charts


def by_label(label: str, rows: Mapping[str, Mapping[str, str]]) -> pd.DataFrame:
    """Return a table of the rows of each run, with the name of a row in the column `label`."""
    return pd.DataFrame(rows).reset_index(names=label, allow_duplicates=True)


def columns(table: pd.DataFrame) -> dict[str, list[float | None]]:
    """Return the non-empty columns of a table, averaged to at most `POINTS` rows."""
    if len(table) > POINTS:
        table = table.groupby(np.arange(len(table)) * POINTS // len(table)).mean()
    filled = table.dropna(axis=1, how="all")
    return {
        str(name): [None if isnan(v) else float(f"{v:.6g}") for v in values.tolist()]
        for name, values in filled.items()
    }


@dataclass(frozen=True)
class Record:
    """Contents of the files of a run. The step of an evaluation is the version evaluated."""

    name: str
    colour: str
    config: Row
    steps: pd.DataFrame
    evaluations: pd.DataFrame
    samples: list[Row]
    totals: Row
    sessions: list[Row]
    warnings: list[str]
    settings: Mapping[str, str]
    """Each setting as JSON; a changed setting lists each value with its steps."""
    changed: Mapping[str, str]
    """The settings that were changed, and what was done with stored rewards."""
    path: Path

    def what(self) -> Mapping[str, str]:
        """Return the main settings by label."""
        return main_settings(self.config, self.sessions)

    def next_steps(self, measure: str) -> list[tuple[str, str]]:
        """Return what may be done with the run, and the command, which may be empty."""
        found = []
        status = self.totals["status"]
        if status in ("stopped", "crashed") and generations(self.path / CHECKPOINTS):
            found.append((f"The run has {status}. To continue it:", resumes(typed(self.path))))
        found.append(best_checkpoint(self.path, self.evaluations, measure))
        return [(text, command) for text, command in found if text]

    def evaluated(self) -> EvaluatedRun:
        """Return what a comparison needs."""
        own = f"{flat(self.config)['run.folder']}/"  # data from Python are in a file there
        left_out = ("run.seed", "run.folder", "trainer.token_budget")
        settings = {k: v for k, v in self.settings.items() if k not in left_out and own not in v}
        task = {k: v for k, v in self.config["task"].items() if own not in str(v)}
        table = self.evaluations.set_index("step")
        by_prompt = {int(row["step"]): row for row in read(self.path / SCORES)}
        return EvaluatedRun(self.name, task, json.dumps(settings), table, by_prompt)

    def headline(self, measures: Mapping[str, str]) -> Mapping[str, str]:
        """Return scores before and after training; `measures` names the score of each subset."""
        evaluations = self.evaluations.to_dict("records")
        texts = {}
        ends = evaluations[:1] + evaluations[1:][-1:]
        for subset, measure in measures.items():
            for mode in MODES:
                column, _ = names(measure, mode, subset)
                both = [score(e, measure, mode, subset) for e in ends if column in e]
                texts[f"{subset or 'Held-out'} {measure}, {mode}"] = " → ".join(both) or "–"
        tenth = ceil(len(self.steps) / 10)
        reward = self.steps["reward"]
        tenths = reward.head(tenth).mean(), reward.tail(tenth).mean()
        done = self.steps["step"].iloc[-1]
        planned = self.config["run"]["steps"]
        return {
            "Steps": f"{done:,.0f} of {planned:,} ({self.totals['status']})",
            "Time": duration(self.totals["seconds"]).replace(" ", "\N{NO-BREAK SPACE}"),
            **texts,
            "Evaluated at step": " → ".join(f"{e['step']:,.0f}" for e in ends) or "–",
            "Training reward, first → last tenth": " → ".join(fitted(v, "{:.3f}") for v in tenths),
        }

    def facts(self) -> Mapping[str, str]:
        """Return additional facts by label."""
        totals = self.totals
        lag_mean, lag_max = (self.steps[name] for name in LAG)
        return {
            "Trainer": self._ranks(),
            "Lag": f"{lag_mean.mean():.1f} steps, at most {lag_max.max():.0f}",
            "Trainer waited": f"{totals['trainer_wait_fraction']:.2%} of the time",
            "Searchers waited": f"{totals['searcher_wait_fraction']:.2%} of the time",
            "Samples generated": f"{totals['samples_generated']:,.0f}",
            "Samples trained on": f"{totals['samples_trained']:,.0f}",
            "Samples rejected": f"{self.steps['searchers/rejected'].iloc[-1]:,.0f}",
        }

    def _ranks(self) -> str:
        """Return text with the number of trainer ranks, their imbalance, and their restarts."""
        ranks = self.config["trainer"].get("devices", 1)
        if ranks == 1:
            return "one device"
        more = self.steps["batch/imbalance"].mean()
        restarts = self.steps["trainer/restarts"].iloc[-1]
        return f"{ranks} ranks, the longest {more:.0%} above the mean; restarts: {restarts:.0f}"

    def groups(self) -> list[Row]:
        """Return the stored completions by prompt, for a batch or for all evaluations."""
        groups: dict[tuple[Any, ...], Row] = {}
        for s in self.samples:
            trained_on = s["kind"] == "train"
            about = {name: s.get(name, "") for name in ("kind", "id", "prompt")}
            key = (*about.values(), s["step"] if trained_on else None)
            group = groups.setdefault(key, {**about, "columns": s.get("columns", {}), "by_key": {}})
            shown = {name: s[name] for name in ("step", "version", "reward", "completion")}
            shown |= {"notes": s.get("notes", {}), "drawn": s.get("drawn", 1)}
            shown |= {"cut": True} if s.get("cut") else {}
            if authors := s.get("authors"):
                starts = [0, *(end for _, end in authors)]
                places = zip(authors, starts, strict=False)
                shown["parts"] = [[who, s["completion"][at:end]] for (who, end), at in places]
            by_key = group["by_key"]
            by_key[len(by_key) if trained_on else s["step"]] = (
                shown  # an evaluation may be repeated
            )
        # popped before `**g`, which would repeat every completion
        return [{"completions": list(g.pop("by_key").values()), **g} for g in groups.values()]

    def data(self) -> Row:
        """Return the data for the script of the page."""
        steps = columns(self.steps)
        evaluations = columns(self.evaluations)
        scored = [s["reward"] for s in self.samples if s["reward"] is not None] or [0.0]
        answer = self.config["task"].get("answer_column") or "answer"  # with the right answers
        shown = {"steps": steps, "evaluations": evaluations, "groups": self.groups()}
        return {"name": self.name, "rewards": [min(scored), max(scored)], "answer": answer, **shown}


def read_record(path: Path, name: str, colour: str) -> Record | None:
    """Return the record of a run, None before its first step; ValueError if it is not a run."""
    config = read_optional(path / CONFIG)
    if config is None:
        configs = sorted(path.glob(f"*/{CONFIG}"))  # of models, too
        near = " ".join(str(p.parent) for p in configs if "run" in read_optional(p))
        example = f", such as `tba report {near}`" if near else ""
        raise ValueError(
            f"{path} is not a run folder: it has no {CONFIG}; name one or more folders of runs, or"
            f" one of a study{example}"
        )
    needed = ["step", "samples_generated", "searchers/rejected", *LAG, *WAITS.values()]
    metrics = pd.DataFrame(read(path / METRICS), dtype=float)
    metrics = metrics.reindex(columns=metrics.columns.union(needed, sort=False))
    is_step = metrics["samples_generated"].notna()
    steps = metrics[is_step]
    if steps.empty:
        return None
    # a resumed run may have repeated an evaluation
    evaluations = metrics[~is_step].drop_duplicates("step", keep="last").sort_values("step")
    generated = [0, *steps["samples_generated"]]
    evaluations["samples_generated"] = np.interp(
        evaluations["step"], [0, *steps["step"]], generated
    )
    sessions = read(path / SESSIONS)
    spans = spans_of(sessions or [{"step": 0}], int(steps["step"].iloc[-1]), config)
    changed = changed_settings(spans)
    return Record(
        name=name,
        colour=colour,
        config=config,
        steps=steps,
        evaluations=evaluations,
        samples=read(path / SAMPLES),
        totals=_totals(path, steps),
        sessions=sessions,
        warnings=list(read_warnings(path).values()),  # the summary is only written at the end
        settings={key: json.dumps(value) for key, value in flat(config).items()} | changed,
        changed=changed,
        path=path,
    )


def _totals(path: Path, steps: pd.DataFrame) -> Row:
    """Return `summary.json`, or the same totals computed from the steps before the run ends."""
    newest = steps.iloc[-1].to_dict()
    summary = read_optional(path / SUMMARY)
    if summary is not None and summary["steps"] == newest["step"]:  # else of an earlier session
        return {**summary, "status": "finished" if summary["finished"] else "stopped"}
    seconds = steps["time"].diff().fillna(1e-9)  # ignores the first step with the first fill
    waits = {name: np.average(steps[metric], weights=seconds) for name, metric in WAITS.items()}
    return {**newest, **waits, "seconds": newest["time"], "status": status_of(path).text}


def report_runs(runs: Sequence[Path], out: Path | None = None, reload: float = 0.0) -> Path:
    """Write the page, by default to `report` in the run's folder, or here for several runs."""
    paths = list(dict.fromkeys(path.expanduser().resolve() for path in runs))
    if not paths:
        raise ValueError("name at least one run: tba report RUN")
    count = Counter(path.name for path in paths)
    records: list[Record] = []
    begun = []
    for path in paths:
        name = path.name if count[path.name] == 1 else str(path)
        record = read_record(path, name, f"var(--line{len(records) % COLOURS})")
        if record is None:
            begun.append(name)
        else:
            records.append(record)
    if not records:
        raise NotBegun(
            f"{paths[0]} has no metrics yet; type `tba report {paths[0]}` after its first step"
        )
    folder = out or (runs[0].expanduser() / "report" if len(paths) == 1 else Path("report"))
    measures = measures_of([record.evaluations for record in records])
    charts = Charts([t for record in records for t in (record.steps, record.evaluations)])
    title = f"Comparison of {len(paths)} runs" if len(paths) > 1 else records[0].name
    headline = [
        {
            "run": r.name,
            **r.headline(measures),
            "Best step": best_score(r.evaluations, measures[""]),
        }
        for r in records
    ]
    headline += [{"run": name, "Steps": "no metrics yet"} for name in begun]
    what = by_label("setting", {r.name: r.what() for r in records})
    facts = by_label("fact", {r.name: r.facts() for r in records})
    keys = pd.DataFrame({r.name: r.settings for r in records}).drop(index="run.folder").fillna("–")
    verdict, notes = compare([r.evaluated() for r in records], measures[""])
    take_turns = all(r.config["runtime"]["use"] == "local" for r in records)
    differing = keys[keys.nunique(axis=1) > 1].to_dict()
    values = {
        "title": title, "compared": len(paths) > 1, "runs": records,
        "headline": pd.DataFrame(headline).fillna("–"), "what": what, "facts": facts,
        "differences": by_label("key", differing), "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "measures": measures, "verdict": verdict, "notes": notes,
        "axes": AXES, "panels": charts.panels(take_turns), "reward": asdict(reward_chart()),
        "sections": charts.sections(), "others": OTHERS,
        "data": {"axes": AXES, "runs": [record.data() for record in records]},
    }  # fmt: skip
    files = ("uplot.min.js", "charts.js", "transcripts.js", "report.js", "reload.js")
    return write_page(folder, "report.html", {**values, "script": script(*files)}, reload)
