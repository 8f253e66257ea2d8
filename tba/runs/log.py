"""Folder of a run: the names of its files, and how they are read."""

import json
import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tba.config.errors import about
from tba.config.schema import Config, read_json
from tba.runs.files import write_whole

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.json"
SESSIONS = "sessions.jsonl"
WARNINGS = "warnings.jsonl"
CHECKPOINTS = "checkpoints"

Replay = Literal["keep", "rescore", "drop"]
"""What a resumed run does with its replay buffer: keep it, score it again, or empty it."""

Row = dict[str, Any]
"""A line of a JSONL file, or the contents of a JSON file."""

log = logging.getLogger(__name__)


def read(path: Path) -> list[Row]:
    """Return the rows of a JSONL file, if there is one, without a line that a crash cut short.

    A damaged line is left out, too, and named in the log.
    """
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        if not line:
            continue
        try:
            row = json.loads(line.decode())
            if not isinstance(row["step"], int | float):
                raise TypeError("its step is no number")
            rows.append(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s, line %d is damaged and left out: %r", path, number, error)
    return rows


def read_optional(path: Path) -> Any:
    """Return the contents of a JSON file; None if there is no file."""
    return read_json(path) if path.is_file() else None


def flat(tables: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the values of a config by `table.key`."""
    shown = with_relative_paths(tables)
    return {f"{name}.{key}": v for name, table in shown.items() for key, v in table.items()}


def folder_of(config: Config) -> Path:
    """Return the folder of a new run."""
    default = f"runs/{config.task.use}-{config.objective.use}-{datetime.now():%Y%m%d-%H%M%S}"
    return Path(config.run.folder or default).expanduser()


def is_run(folder: Path) -> bool:
    """Return whether a run has begun in a folder."""
    return (folder / METRICS).exists() or (folder / CHECKPOINTS).exists()


def check_unused(run: Path) -> None:
    """Raise ValueError if a folder holds a run already."""
    if is_run(run):
        raise ValueError(
            f"run.folder = {str(run)!r} holds a run already; continue it with --resume {run},"
            f" remove it (`rm -r {run}`), or choose another folder"
        )


def read_config(run: Path) -> Config:
    """Return the config of a run; ValueError if the folder is not one of a run."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no {CONFIG}")
    tables = read_json(run / CONFIG)
    with about(str(run / CONFIG)):
        return Config(**tables)


def with_relative_paths(config: Any) -> Any:
    """Return the tables of a config with paths from the folder that the run was started in."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [shown(inner) for inner in value]
        return value.removeprefix(start) if isinstance(value, str) else value

    base = config.get("run", {}).get("base", "")
    start = f"{base}/"
    return shown(config) if base else config


def read_evaluations(run: Path) -> list[dict[str, float]]:
    """Return the scores of every evaluation, in the order of their steps."""
    evaluations = []
    for row in read(run / METRICS):
        scores = {n.removeprefix("eval/"): v for n, v in row.items() if n.startswith("eval/")}
        errors = [scores[n] for n in ("sampled_stderr", "sampled_reward_stderr") if n in scores]
        if errors and "sampled_reward" in scores:
            evaluations.append({**scores, "step": float(row["step"]), "stderr": errors[0]})
    return sorted(evaluations, key=lambda scores: scores["step"])


def read_warnings(run: Path) -> dict[str, str]:
    """Return the warnings that a run has given, by key."""
    return {row["key"]: row["text"] for row in read(run / WARNINGS)}


def rewind(run: Path, step: int, last: int) -> None:
    """Drop what a run that is resumed at `step`, and goes on until `last`, will write again."""

    def comes_again(row: Mapping[str, Any]) -> bool:
        requested = row.get("requested", -1)  # the weights of an evaluation can be of earlier steps
        return max(row["step"], requested) > step or requested == step == last

    for path in (run / METRICS, run / SAMPLES, run / WARNINGS):
        rows = [row for row in read(path) if not (comes_again(row) or row.get("at_end"))]
        kept = [json.dumps(row) + "\n" for row in rows]
        write_whole(path, "".join(kept))
