"""The folder of a run: its config, metrics, samples, checkpoints, summary and report."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tba.config.schema import Config, override_all, parse
from tba.runs.log import CONFIG, METRICS, SAMPLES, SUMMARY, read, write_whole
from tba.runs.summary import Summary
from tba.tasks._memory import refuse

CHECKPOINTS = "checkpoints"


def create_folder(config: Config) -> Path:
    """Create the folder of a new run; ValueError if it holds a run already."""
    default = f"runs/{config.task.use}-{config.objective.use}-{datetime.now():%Y%m%d-%H%M%S}"
    run = Path(config.run.folder or default).expanduser()
    if (run / METRICS).exists() or (run / CHECKPOINTS).exists():
        raise ValueError(
            f"run.folder = {str(run)!r} holds a run already;"
            f" continue it with --resume {run}, or choose another folder"
        )
    run.mkdir(parents=True, exist_ok=True)
    write_config(run, config)
    return run


def read_config(run: Path) -> dict[str, Any]:
    """Return the config of a run as plain tables; ValueError if the folder is not one of a run."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no {CONFIG}")
    tables: dict[str, Any] = json.loads((run / CONFIG).read_text())
    return tables


def stored_config(run: Path, settings: Sequence[str]) -> Config:
    """Return the config of a run with these settings; ValueError if Python passed it objects."""
    tables = read_config(run)
    refuse(parse(tables).task, str(run))
    override_all(tables, settings)
    return parse(tables)


def write_config(run: Path, config: Config) -> None:
    write_whole(run / CONFIG, json.dumps(config.nested(), indent=1) + "\n")


def write_summary(run: Path, summary: Summary) -> None:
    plain = asdict(summary)
    plain["eval/first"], plain["eval/last"] = plain.pop("first"), plain.pop("last")
    write_whole(run / SUMMARY, json.dumps(plain, indent=1) + "\n")


def read_evaluations(run: Path) -> list[dict[str, float]]:
    """Return the scores of every evaluation, in the order of their steps."""
    evaluations = []
    for row in read(run / METRICS):
        scores = {n.removeprefix("eval/"): v for n, v in row.items() if n.startswith("eval/")}
        if scores:
            stderr = scores.get("sampled_stderr", scores["sampled_reward_stderr"])
            evaluations.append({**scores, "step": float(row["step"]), "stderr": stderr})
    return sorted(evaluations, key=lambda scores: scores["step"])


def rewind(run: Path, step: int) -> None:
    """Drop metrics and samples after `step`, from which a run continues: they come again."""
    for path in (run / METRICS, run / SAMPLES):
        kept = [json.dumps(row) + "\n" for row in read(path) if row["step"] <= step]
        write_whole(path, "".join(kept))
