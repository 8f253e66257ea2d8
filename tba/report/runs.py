"""The page of runs: the facts of each, read from the files in its folder, and their charts."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tba.report.charts import AXES, OTHERS, Charts, columns, reward_chart
from tba.report.page import MODES, duration, fitted, measures_of, names, score, script, write_page
from tba.runs.log import CONFIG, SAMPLES, SESSIONS, SUMMARY, read, read_warnings
from tba.studies.results import Row, flat, read_json, read_metrics

LAG = ("off_policy/lag_mean", "off_policy/lag_max")
WAITS = {"trainer_wait_fraction": "wait/trainer", "searcher_wait_fraction": "wait/searchers"}
"""The metric of each step for the shares of `summary.json`."""


Span = tuple[int, int, Mapping[str, str]]
"""First and last step of a part of a run, and its settings as JSON, by `table.key`."""


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
    sessions: list[Row]
    warnings: list[str]
    spans: Sequence[Span]
    """The parts of the run whose settings differ, in order."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Return each setting as JSON; for one that was changed, each value with its steps."""
        first, *later = self.spans
        texts = {}
        for key in dict.fromkeys(key for _, _, own in self.spans for key in own):
            values = [(*first[:2], first[2].get(key, "–"))]
            for begin, end, own in later:
                value = own.get(key, "–")
                begin, _, _ = values.pop() if values[-1][2] == value else (begin, 0, "")
                values.append((begin, end, value))
            told = [f"{value} (steps {begin}–{end})" for begin, end, value in values]
            texts[key] = ", then ".join(told) if told[1:] else values[0][2]
        return texts

    @property
    def changed(self) -> Mapping[str, str]:
        """Return the settings that were changed, and what became of stored rewards."""
        first = self.spans[0][2]
        varied = {key for _, _, own in self.spans for key, _ in own.items() ^ first.items()}
        return {key: text for key, text in self.settings.items() if key in varied}

    def headline(self, measures: Mapping[str, str]) -> Mapping[str, str]:
        """Return scores before and after by label; `measures` has the score of each subset."""
        evaluations, texts = self.evaluations.to_dict("records"), {}
        ends = evaluations[:1] + evaluations[1:][-1:]
        for subset, measure in measures.items():
            for mode in MODES:
                column, _ = names(measure, mode, subset)
                both = [score(e, measure, mode, subset) for e in ends if column in e]
                texts[f"{subset or 'Held-out'} {measure}, {mode}"] = " → ".join(both) or "–"
        tenth, reward = ceil(len(self.steps) / 10), self.steps["reward"]
        tenths = reward.head(tenth).mean(), reward.tail(tenth).mean()
        done, planned = self.steps["step"].iloc[-1], self.config["run"]["steps"]
        return {
            **texts,
            "Evaluated at step": " → ".join(f"{e['step']:,.0f}" for e in ends) or "–",
            "Training reward, first → last tenth": " → ".join(fitted(v, "{:.3f}") for v in tenths),
            "Steps": f"{done:,.0f} of {planned:,} ({self.totals['status']})",
            "Time": duration(self.totals["seconds"]),
        }

    def facts(self) -> Mapping[str, str]:
        """Return further facts by label."""
        totals, (lag_mean, lag_max) = self.totals, (self.steps[name] for name in LAG)
        return {
            "Objective": self.settings["objective.use"].replace('"', ""),
            "Lag": f"{lag_mean.mean():.1f} steps, at most {lag_max.max():.0f}",
            "Trainer waited": f"{totals['trainer_wait_fraction']:.2%} of the time",
            "Searchers waited": f"{totals['searcher_wait_fraction']:.2%} of the time",
            "Samples generated": f"{totals['samples_generated']:,.0f}",
            "Samples trained on": f"{totals['samples_trained']:,.0f}",
            "Samples rejected": f"{self.steps['searchers/rejected'].iloc[-1]:,.0f}",
        }

    def groups(self) -> list[Row]:
        """Return the stored completions by prompt: those of a batch, or of all evaluations."""
        groups: dict[tuple[Any, ...], Row] = {}
        for s in self.samples:
            trained_on = s["kind"] == "train"
            about = {name: s.get(name, "") for name in ("kind", "id", "prompt")}
            key = (*about.values(), s["step"] if trained_on else None)
            group = groups.setdefault(key, {**about, "columns": s.get("columns", {}), "by_key": {}})
            shown = {name: s[name] for name in ("step", "version", "reward", "completion")}
            shown |= {"notes": s.get("notes", {}), "drawn": s.get("drawn", 1)}
            own = group["by_key"]
            own[len(own) if trained_on else s["step"]] = shown  # an evaluation may be repeated
        return [{**g, "completions": list(g.pop("by_key").values())} for g in groups.values()]

    def data(self) -> Row:
        """Return what the script of the page shows."""
        steps, evaluations = columns(self.steps), columns(self.evaluations)
        scored = [s["reward"] for s in self.samples if s["reward"] is not None] or [0.0]
        answer = self.config["task"].get("answer_column") or "answer"  # with the right answers
        shown = {"steps": steps, "evaluations": evaluations, "groups": self.groups()}
        return {"name": self.name, "rewards": [min(scored), max(scored)], "answer": answer, **shown}


def read_record(path: Path, name: str, colour: str) -> Record | None:
    """Return the record of a run, None before its first step; ValueError if it is no run."""
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
        return None
    # a resumed run may have repeated an evaluation
    evaluations = metrics[~is_step].drop_duplicates("step", keep="last").sort_values("step")
    at, generated = [0, *steps["step"]], [0, *steps["samples_generated"]]
    evaluations["samples_generated"] = np.interp(evaluations["step"], at, generated)
    samples, totals, sessions = read(path / SAMPLES), _totals(path, steps), read(path / SESSIONS)
    warnings = list(read_warnings(path).values())  # the summary has them only at the end
    spans = _spans(sessions, int(steps["step"].iloc[-1]), config)
    read_so_far = config, steps, evaluations, samples, totals, sessions, warnings, spans
    return Record(name, colour, *read_so_far)


def _spans(sessions: Sequence[Row], newest: int, config: Row) -> Sequence[Span]:
    """Return the parts of a run. Steps that a later session has taken again are those of it."""
    spans, rewards = [], {}
    for place, session in enumerate(sessions):
        begin, note = session["step"], session.get("rewards")
        if note:
            rewards = {"rewards": f"{note} at step {begin}"}
        end = min([newest, *(later["step"] for later in sessions[place + 1 :])])
        if begin < end:
            own = flat(session.get("config", config))
            spans.append((begin + 1, end, {k: json.dumps(v) for k, v in own.items()} | rewards))
    return spans or [(1, newest, {key: json.dumps(v) for key, v in flat(config).items()})]


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


def report_runs(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page, by default into `report` in the run's folder or, for several, here."""
    paths = list(dict.fromkeys(path.expanduser().resolve() for path in runs))
    if not paths:
        raise ValueError("name at least one run: tba report RUN")
    count = Counter(path.name for path in paths)
    records: list[Record] = []
    begun = []
    for path in paths:
        name = path.name if count[path.name] == 1 else str(path)
        record = read_record(path, name, f"var(--line{len(records) % 12})")
        if record is None:
            begun.append(name)
        else:
            records.append(record)
    if not records:
        raise ValueError(
            f"{paths[0]} has no metrics yet; type `tba report {paths[0]}` after its first step"
        )
    folder = out or (runs[0].expanduser() / "report" if len(paths) == 1 else Path("report"))
    measures = measures_of([record.evaluations for record in records])
    charts = Charts([t for record in records for t in (record.steps, record.evaluations)])
    title = f"Comparison of {len(paths)} runs" if len(paths) > 1 else records[0].name
    headline = [{"run": r.name, **r.headline(measures)} for r in records]
    headline += [{"run": name, "Steps": "no metrics yet"} for name in begun]
    facts = pd.DataFrame({r.name: r.facts() for r in records}).reset_index(
        names="fact", allow_duplicates=True
    )
    values = {
        "title": title, "compared": len(paths) > 1, "runs": records,
        "headline": pd.DataFrame(headline).fillna("–"), "facts": facts,
        "differences": _differences(records), "measures": measures,
        "axes": AXES, "panels": charts.panels(), "reward": asdict(reward_chart()),
        "sections": charts.sections(), "others": OTHERS,
        "data": {"axes": AXES, "runs": [record.data() for record in records]},
    }  # fmt: skip
    files = ("uplot.min.js", "charts.js", "report.js")
    return write_page(folder, "report.html", {**values, **script(*files)})


def _differences(records: Sequence[Record]) -> pd.DataFrame:
    """Return the config keys in which the runs differ, with a column for each run."""
    keys = pd.DataFrame({r.name: r.settings for r in records}).drop(index="run.folder").fillna("–")
    return keys[keys.nunique(axis=1) > 1].reset_index(names="key", allow_duplicates=True)
