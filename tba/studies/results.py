"""What the runs of a study have come to: `study.json` lists them, and `results.json` has one row for each.

This module imports no torch, so that a report is there in a moment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import ceil, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from tba.runs.log import CONFIG, METRICS, SUMMARY, read, write_whole

STUDY, RESULTS, FAILED = "study.json", "results.json", "failed.json"
DEFAULT_METRICS = ("sampled_pass@1", "sampled_reward")
DIVERGED = "NotFinite"
SEED = "run.seed"

Row = dict[str, Any]
Settings = Mapping[str, Any]
Status = Literal["pending", "finished", "failed"]


@dataclass(frozen=True)
class Trial:
    """One run of a study: what it is to be, and how it stands."""

    grid: str
    folder: str
    """Within the study's."""
    label: str
    settings: Settings
    """All that its grid says, and what came from the best of another."""
    axes: Settings
    """What tells it from the others of its grid; variants with labels are one axis."""
    status: Status = "pending"
    error: str | None = None

    @property
    def diverged(self) -> bool:
        """Training went where numbers end: a result, and no mistake."""
        return self.error is not None and self.error.startswith(DIVERGED)


@dataclass(frozen=True)
class Choice:
    """What the runs of `grid` that agree in `matched` have inherited from `best`: the settings with the highest mean score, of so many (`of`)."""

    grid: str
    best: str
    matched: Settings
    settings: Settings
    score: float | None
    of: int

    def __str__(self) -> str:
        like, taken = (
            ", ".join(f"{k} = {v}" for k, v in s.items()) for s in (self.matched, self.settings)
        )
        why = (
            "all runs failed: the first"
            if self.score is None
            else f"mean score {self.score:.3f}, the best of {self.of} settings"
        )
        return f"{self.grid}{like and ', '}{like}: {taken}, from the best of {self.best} ({why})"


@dataclass
class Ledger:
    """A study as `study.json` has it."""

    name: str
    metric: str | None
    runs: list[Trial]
    choices: list[Choice] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        write_whole(folder / STUDY, json.dumps(asdict(self), indent=1) + "\n")


def read_ledger(folder: Path) -> Ledger:
    if not (folder / STUDY).is_file():
        raise ValueError(
            f"{folder} is not a study's folder: it has no {STUDY}; type `tba sweep STUDY.toml` to carry one out"
        )
    study = json.loads((folder / STUDY).read_text())
    runs = [Trial(**{f.name: run[f.name] for f in fields(Trial)}) for run in study["runs"]]
    choices = [
        Choice(**{f.name: choice[f.name] for f in fields(Choice)}) for choice in study["choices"]
    ]
    return Ledger(study["name"], study["metric"], runs, choices)


def standing(run: Path) -> tuple[Status, str | None]:
    """How a run stands by what its folder holds, and the error of one that failed."""
    if finished(run) is not None:
        return "finished", None
    if (run / FAILED).is_file():
        return "failed", json.loads((run / FAILED).read_text())["error"]
    return "pending", None


def write_failed(run: Path, error: str, traceback: str | None = None) -> None:
    run.mkdir(parents=True, exist_ok=True)
    write_whole(run / FAILED, json.dumps({"error": error, "traceback": traceback}, indent=1) + "\n")


def finished(run: Path) -> Row | None:
    """The summary of a run that has come to its end."""
    if not (run / SUMMARY).is_file():
        return None
    summary: Row = json.loads((run / SUMMARY).read_text())
    return summary if summary["finished"] else None


def scores(run: Path) -> dict[str, float]:
    """Of the last evaluation of a finished run; none where there is nothing to evaluate on."""
    summary = finished(run)
    return (
        {}
        if summary is None
        else {
            k: v for k, v in summary["eval/last"].items() if k not in ("step", "stderr", "seconds")
        }
    )


def metric_of(known: Mapping[str, float], metric: str | None) -> str:
    """The score that runs are compared by. ValueError if a run has scores, but not this one."""
    if metric is None:
        return next((m for m in DEFAULT_METRICS if m in known), DEFAULT_METRICS[0])
    if known and metric not in known:
        raise ValueError(
            f"study.metric = {metric!r}: the runs have no such score; set study.metric to one of {', '.join(known)}"
        )
    return metric


def score(run: Path, metric: str | None) -> float | None:
    known = scores(run)
    return known.get(metric_of(known, metric))


def stderr(values: Sequence[float]) -> float | None:
    """Standard error of the mean, which takes two values."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def flat(tables: Mapping[str, Mapping[str, Any]]) -> Row:
    """A config's values by `table.key`."""
    return {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }


def phrase(key: str, value: Any) -> str:
    """`tb` for objective.use, `lag 4` for runtime.lag."""
    last = key.rpartition(".")[2]
    text = (
        value
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, float)
        else json.dumps(value)
    )
    return text if last in ("use", "variant") else f"{last} {text}"


def curve(rows: Sequence[Row], metric: str) -> list[Row]:
    """The evaluations in the order of the weights evaluated, each with the samples trained on until then; a resumed run may have had one twice."""
    evaluations = {
        r["step"]: r[f"eval/{metric}"] for r in rows if r.get(f"eval/{metric}") is not None
    }
    trained = {0: 0} | {r["step"]: r["samples_trained"] for r in rows if "samples_trained" in r}
    return [
        {"step": s, "score": evaluations[s], "samples_trained": trained[s]}
        for s in sorted(evaluations)
        if s in trained
    ]


def row_of(folder: Path, trial: Trial, metric: str) -> Row:
    """A run as one row. `drop` is from the peak to the worst after it; `kl` is the mean over the last tenth of the steps."""
    run = folder / trial.folder
    rows, last = read(run / METRICS), scores(run)
    steps = [r for r in rows if "samples_trained" in r]
    config = json.loads((run / CONFIG).read_text()) if (run / CONFIG).is_file() else None
    row: Row = {
        "grid": trial.grid,
        "label": trial.label,
        "folder": trial.folder,
        "status": trial.status,
        "error": trial.error,
        "settings": trial.settings,
    }
    row |= {
        "objective": config and config["objective"]["use"],
        "seed": config and config["run"]["seed"],
        "metric": metric,
    }
    row |= (
        {"last": last.get(metric), "peak": None, "peak_step": None, "drop": None}
        | _peak(curve(rows, metric))
        | last
    )
    row |= {
        "kl": _mean(steps[-ceil(len(steps) / 10) :], "kl"),
        "ess": _mean(steps, "off_policy/ess"),
        "lag_mean": _mean(steps, "off_policy/lag_mean"),
    }
    end = finished(run)
    if end is None:
        end = (
            {**steps[-1], "seconds": steps[-1]["time"], "steps": steps[-1]["step"]} if steps else {}
        )
    return row | {
        key: end.get(key) for key in ("samples_generated", "samples_trained", "seconds", "steps")
    }


def write_results(folder: Path) -> list[Row]:
    """A row for each run, in the order of the study; also written to `results.json`."""
    ledger = read_ledger(folder)
    metric = metric_of(
        next((s for t in ledger.runs if (s := scores(folder / t.folder))), {}), ledger.metric
    )
    rows = [row_of(folder, t, metric) for t in ledger.runs]
    write_whole(folder / RESULTS, json.dumps(rows, indent=1) + "\n")
    return rows


def _peak(points: Sequence[Row]) -> Row:
    if not points:
        return {}
    peak = max(points, key=lambda p: p["score"])
    return {
        "peak": peak["score"],
        "peak_step": peak["step"],
        "drop": peak["score"] - min(p["score"] for p in points if p["step"] >= peak["step"]),
    }


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [r[name] for r in rows if r.get(name) is not None]
    return fmean(values) if values else None
