"""The facts of one run, read from the files in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, nan
from pathlib import Path

import numpy as np
import pandas as pd

from tba.report.draw import with_stderr
from tba.runs.log import CONFIG, SAMPLES, SUMMARY, read
from tba.studies.results import Row, read_json, read_metrics

MODES = ("sampled", "greedy")
LAG = ("off_policy/lag_mean", "off_policy/lag_max")
WAITS = ("wait/trainer", "wait/searchers")


@dataclass(frozen=True)
class Measure:
    """A score of evaluations, in each of `MODES`."""

    label: str
    value: str
    stderr: str
    share: bool

    def names(self, mode: str) -> tuple[str, str]:
        return self.value.format(mode), self.stderr.format(mode)

    def text(self, evaluation: Row, mode: str) -> str:
        value, stderr = (evaluation.get(name, nan) for name in self.names(mode))
        return with_stderr(value, stderr, "{:.1%}" if self.share else "{:.3f}")


PASS = Measure("pass@1", "eval/{}_pass@1", "eval/{}_stderr", True)
REWARD = Measure("reward", "eval/{}_reward", "eval/{}_reward_stderr", False)


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

    def facts(self, measure: Measure) -> Mapping[str, str]:
        totals, steps = self.totals, self.steps
        newest, tenth = steps.iloc[-1], ceil(len(steps) / 10)
        planned = self.config["run"]["steps"]
        first = steps["reward"].head(tenth).mean()
        last = steps["reward"].tail(tenth).mean()
        lag_mean, lag_max = (steps[name] for name in LAG)
        evaluations = self.evaluation_rows()
        ends = evaluations[:1] + evaluations[1:][-1:]
        held_out = {}
        for mode in MODES:
            texts = [measure.text(e, mode) for e in ends]
            held_out[f"Held-out {measure.label}, {mode}"] = " → ".join(texts) or "–"
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

    def evaluation_rows(self) -> list[Row]:
        rows: list[Row] = self.evaluations.to_dict("records")
        return rows

    def held_out(self) -> list[list[Row]]:
        """Return the samples of each held-out prompt, from the first and the last evaluation."""
        answers: dict[int, dict[str, Row]] = {}
        for s in self.samples:
            if s["kind"] == "eval":
                answers.setdefault(s["version"], {})[s["prompt"]] = s
        if not answers:
            return []
        ends = [answers[version] for version in sorted({min(answers), max(answers)})]
        common = [prompt for prompt in ends[0] if prompt in ends[-1]]
        return [[end[prompt] for end in ends] for prompt in common]

    def trained_on(self) -> list[Row]:
        """Return at most four samples, from the first to the last."""
        samples = [s for s in self.samples if s["kind"] == "train"]
        chosen = np.linspace(0, len(samples) - 1, min(4, len(samples)))
        return [samples[int(i)] for i in chosen]


def read_record(path: Path, name: str, colour: str) -> Record:
    config = read_json(path / CONFIG)
    if config is None:
        near = sorted(str(p.parent) for p in path.glob(f"*/{CONFIG}"))
        instead = " ".join(near[:3]) or "RUN"
        raise ValueError(
            f"{path} is not a run folder: it has no {CONFIG}; type `tba report {instead}`"
            " with the folder that `tba train` printed at its start"
        )
    metrics = read_metrics(path, "samples_generated", "searchers/rejected", *LAG, *WAITS)
    is_step = metrics["samples_generated"].notna()
    steps, evaluations = metrics[is_step], metrics[~is_step]
    if steps.empty:
        raise ValueError(
            f"{path} has no metrics yet; type `tba report {path}` again after its first step"
        )
    if not evaluations.empty:  # a resumed run may have repeated one
        evaluations = evaluations.drop_duplicates("step", keep="last").sort_values("step")
    at, generated = [0, *steps["step"]], [0, *steps["samples_generated"]]
    samples = np.interp(evaluations["step"], at, generated)
    evaluations = evaluations.assign(samples_generated=samples)
    totals = _totals(path, steps)
    return Record(name, colour, config, steps, evaluations, read(path / SAMPLES), totals)


def _totals(path: Path, steps: pd.DataFrame) -> Row:
    """Return the contents of `summary.json`; while a run is not at its end, sums of its steps."""
    newest, summary = steps.iloc[-1].to_dict(), read_json(path / SUMMARY)
    waits = {
        "trainer_wait_fraction": _share(steps, "wait/trainer"),
        "searcher_wait_fraction": _share(steps, "wait/searchers"),
    }
    if summary is not None and summary["steps"] == newest["step"]:  # else of an earlier session
        return {**waits, **summary, "status": "finished" if summary["finished"] else "stopped"}
    return {**newest, **waits, "seconds": newest["time"], "status": "unfinished"}


def _share(steps: pd.DataFrame, name: str) -> float:
    """Return the mean over time of a share of each step, without the first, which has the fill."""
    seconds, shares = steps["time"].diff(), steps[name]
    if seconds.sum() > 0:
        return float((shares * seconds).sum() / seconds.sum())
    return float(shares.iloc[0])
