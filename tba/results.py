"""What the runs of a study have come to: read from their folders, and written as one flat row each to `results.json`.

This module imports no torch, so that a report is there in a moment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tba.log import CONFIG, METRICS, SUMMARY, read, write_whole

STUDY, RESULTS, FAILED = "study.json", "results.json", "failed.json"
DEFAULT_METRICS = ("sampled_pass@1", "sampled_reward")
DIVERGED = "NotFinite"

Row = dict[str, Any]
Status = Literal["pending", "finished", "failed"]


@dataclass(frozen=True)
class Told:
    """A run's entry in `study.json`."""

    grid: str
    folder: str
    label: str
    settings: Mapping[str, Any]
    varied: Sequence[str]
    axes: Mapping[str, Any]
    """What tells it from the others of its grid; a variant is one axis."""
    status: Status = "pending"
    error: str | None = None

    @property
    def diverged(self) -> bool:
        """Training went where numbers end: a result, and no mistake."""
        return self.error is not None and self.error.startswith(DIVERGED)


def finished(run: Path) -> Row | None:
    """The summary of a run that has come to its end."""
    if not (run / SUMMARY).is_file():
        return None
    summary: Row = json.loads((run / SUMMARY).read_text())
    return summary if summary["finished"] else None


def scores(run: Path) -> dict[str, float]:
    """Of the last evaluation of a finished run; none where there is nothing to evaluate on."""
    summary = finished(run)
    return {} if summary is None else {k: v for k, v in summary["eval/last"].items() if k not in ("step", "stderr", "seconds")}


def metric_of(found: Mapping[str, float], metric: str | None) -> str:
    """The score that runs are compared by. ValueError if a run has scores, but not this one."""
    if metric is None:
        return next((m for m in DEFAULT_METRICS if m in found), DEFAULT_METRICS[0])
    if found and metric not in found:
        raise ValueError(f"study.metric = {metric!r}: the runs have no such score; set study.metric to one of {', '.join(found)}")
    return metric


def score(run: Path, metric: str | None) -> float | None:
    found = scores(run)
    return found.get(metric_of(found, metric))


def curve(rows: Sequence[Row], metric: str) -> list[Row]:
    """The evaluations in the order of the weights evaluated, each with the samples trained on until then; a resumed run may have told one twice."""
    steps = [r for r in rows if "samples_trained" in r]
    found = {r["step"]: r for r in rows if r.get(f"eval/{metric}") is not None}
    trained = {0: 0, **{r["step"]: r["samples_trained"] for r in steps}}
    generated = {0: 0, **{r["step"]: r["samples_generated"] for r in steps}}
    return [
        {"step": v, "time": r["time"], "score": r[f"eval/{metric}"], "samples_trained": trained[v], "samples_generated": generated[v]}
        for v, r in sorted(found.items())
        if v in trained
    ]


def row_of(folder: Path, told: Told, metric: str) -> Row:
    """A run as one flat row. `drop` is from the peak to the worst after it; `kl` is the mean over the last tenth of the steps."""
    run = folder / told.folder
    rows, summary = read(run / METRICS), finished(run)
    steps = [r for r in rows if "samples_trained" in r]
    row: Row = {"grid": told.grid, "label": told.label, "folder": told.folder, "status": told.status, "error": told.error}
    config = json.loads((run / CONFIG).read_text()) if (run / CONFIG).is_file() else None
    row |= {"objective": config and config["objective"]["use"], "seed": config and config["run"]["seed"], "metric": metric}
    row |= {key: told.settings.get(key) for key in told.varied}
    row |= {"last": None, "peak": None, "peak_step": None, "drop": None} | _peak(curve(rows, metric)) | scores(run)
    row["last"] = row.get(metric)
    row |= {"kl": _mean(steps[-(-len(steps) // 10) * -1 :], "kl"), "ess": _mean(steps, "off_policy/ess")}
    totals = ("samples_generated", "samples_trained", "seconds", "steps", "lag_mean")
    if summary is not None:
        return row | {key: summary[key] for key in totals}
    end = steps[-1] if steps else {}
    row |= {"samples_generated": end.get("samples_generated"), "samples_trained": end.get("samples_trained"), "seconds": end.get("time")}
    return row | {"steps": end.get("step"), "lag_mean": _mean(steps, "off_policy/lag_mean")}


def read_told(folder: Path) -> tuple[Row, list[Told]]:
    """The study's own entries in `study.json`, and those of its runs."""
    if not (folder / STUDY).is_file():
        raise ValueError(f"{folder} is not a study's folder: it has no {STUDY}; type `tba sweep STUDY.toml` to carry one out")
    study = json.loads((folder / STUDY).read_text())
    return study, [Told(**{key: run[key] for key in ("grid", "folder", "label", "settings", "varied", "axes", "status", "error")}) for run in study["runs"]]


def write_results(folder: Path) -> list[Row]:
    """Rows of all runs but those not begun, in the order of the study; also written to `results.json`."""
    study, runs = read_told(folder)
    metric = metric_of(next((s for t in runs if (s := scores(folder / t.folder))), {}), study["metric"])
    rows = [row_of(folder, t, metric) for t in runs]
    write_whole(folder / RESULTS, json.dumps(rows, indent=1) + "\n")
    return rows


def _peak(points: Sequence[Row]) -> Row:
    if not points:
        return {}
    peak = max(points, key=lambda p: p["score"])
    return {"peak": peak["score"], "peak_step": peak["step"], "drop": peak["score"] - min(p["score"] for p in points if p["step"] >= peak["step"])}


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [r[name] for r in rows if r.get(name) is not None]
    return fmean(values) if values else None
