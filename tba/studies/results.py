"""Results of a study: `study.json` lists its runs, `results.json` has one row for each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, nan
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import TypeAdapter

from tba.runs.log import CONFIG, METRICS, SUMMARY, Row, read, read_optional, write_json

STUDY = "study.json"
RESULTS = "results.json"
FAILED = "failed.json"
DEFAULT_METRICS = ("sampled_pass@1", "sampled_reward")
SEED = "run.seed"
ESS = "off_policy/ess"
LAG = "off_policy/lag_mean"
TOTALS = ["samples_generated", "samples_trained", "seconds", "steps"]
LAST_TENTH = ("kl", "log_ratio")
"""Metrics of which a row has the mean over the last tenth of the steps."""

Settings = Mapping[str, Any]
Status = Literal["pending", "finished", "failed"]


@dataclass(frozen=True)
class Trial:
    """One run of a study: its settings and its status. `folder` is relative to the study's."""

    grid: str
    folder: str
    label: str
    settings: Settings
    axes: Settings  # what distinguishes it from other runs of the grid; a labelled variant is one
    status: Status = "pending"
    error: str | None = None


@dataclass(frozen=True)
class Ledger:
    """Contents of `study.json`."""

    name: str
    metric: str | None
    runs: Sequence[Trial]

    def write(self, folder: Path) -> None:
        write_json(folder / STUDY, asdict(self))


def read_ledger(folder: Path) -> Ledger:
    study = read_optional(folder / STUDY)
    if study is None:
        raise ValueError(
            f"{folder} is not the folder of a study: it has no {STUDY};"
            " run a study with `tba sweep STUDY.toml`"
        )
    return TypeAdapter(Ledger).validate_python(study)


def standing(run: Path) -> tuple[Status, str | None]:
    """Return the status of a run by the files in its folder, and the error of a failed one."""
    if finished(run) is not None:
        return "finished", None
    failed = read_optional(run / FAILED)
    return ("pending", None) if failed is None else ("failed", failed["error"])


def write_failed(run: Path, error: str, traceback: str | None = None) -> None:
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / FAILED, {"error": error, "traceback": traceback})


def finished(run: Path) -> Row | None:
    """Return the summary of a run that has finished."""
    summary: Row | None = read_optional(run / SUMMARY)
    return summary if summary is not None and summary["finished"] else None


def scores(run: Path) -> dict[str, float]:
    """Return the last scores of a finished run; empty if it has no held-out prompts."""
    summary = finished(run)
    last = {} if summary is None else summary["eval/last"]
    return {name: v for name, v in last.items() if name not in ("step", "stderr", "seconds")}


def metric_of(known: Mapping[str, float], metric: str | None) -> str:
    """Return the score that runs are compared by. ValueError if a run has scores without it."""
    if metric is None:
        return next((m for m in DEFAULT_METRICS if m in known), DEFAULT_METRICS[0])
    if known and metric not in known:
        raise ValueError(
            f"study.metric = {metric!r}: the runs have no such score;"
            f" set study.metric to one of {', '.join(known)}"
        )
    return metric


def phrase(key: str, value: Any) -> str:
    """Return a setting in words: `tb` for objective.use, `lag 4` for runtime.lag."""
    last = key.rpartition(".")[2]
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, float):
        text = f"{value:g}"
    return text if last in ("use", "variant") else f"{last} {text}"


def read_metrics(run: Path, *columns: str) -> pd.DataFrame:
    """Return `metrics.jsonl` as a table of floats; `columns` that no row has are all NaN."""
    table = pd.DataFrame(read(run / METRICS), dtype=float)
    return table.assign(**{name: nan for name in columns if name not in table})


def curve(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return `score` and `samples_trained` by the step evaluated; of a repeated one, the last."""
    name = f"eval/{metric}"
    by_step = metrics.reindex(columns=["step", name, "samples_trained"]).groupby("step").last()
    if 0 in by_step.index:
        by_step.loc[0, "samples_trained"] = 0
    return by_step.rename(columns={name: "score"}).dropna()


def write_results(folder: Path) -> pd.DataFrame:
    """Return a row for each run, in the order of the study; `results.json` has all but `axes`."""
    ledger = read_ledger(folder)
    known = [scores(folder / t.folder) for t in ledger.runs]
    metric = metric_of(next(filter(None, known), {}), ledger.metric)
    rows = [_row(folder / t.folder, t, metric) for t in ledger.runs]
    table = pd.DataFrame(rows, dtype=object).drop(columns="axes").replace({nan: None})
    write_json(folder / RESULTS, table.to_dict("records"))
    return pd.DataFrame(rows)


def _row(run: Path, trial: Trial, metric: str) -> Row:
    """Return a run as a row."""
    config = read_optional(run / CONFIG)
    last = scores(run)
    metrics = read_metrics(run, "step", "time", *TOTALS[:2], *LAST_TENTH, ESS, LAG)
    by_step = curve(metrics, metric)["score"]
    peak = by_step.max()
    at = nan if by_step.empty else int(by_step.idxmax())
    steps = metrics.dropna(subset="samples_trained")
    newest = steps.rename(columns={"step": "steps", "time": "seconds"})[TOTALS].max()
    totals = finished(run) or newest
    tenth = steps.tail(ceil(len(steps) / 10))
    return asdict(trial) | {
        "objective": config and config["objective"]["use"],
        "seed": config and config["run"]["seed"],
        "metric": metric,
        **last,
        "last": last.get(metric, nan),
        "peak": peak,
        "peak_step": at,
        "drop": peak - by_step[by_step.index >= at].min(),
        **{name: tenth[name].mean() for name in LAST_TENTH},
        "ess": steps[ESS].mean(),
        "lag_mean": steps[LAG].mean(),
        **{name: totals[name] for name in TOTALS},
    }
