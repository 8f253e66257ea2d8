"""Files of a run: config, metrics and sample completions, also for TensorBoard and W&B."""

import json
import math
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tba.config.schema import Config

METRICS, SAMPLES, SUMMARY, CONFIG = "metrics.jsonl", "samples.jsonl", "summary.json", "config.json"
SESSIONS, CHECKPOINTS = "sessions.jsonl", "checkpoints"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, if there is one, without a line that a crash cut short."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.rename(path)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


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
    write_json(run / CONFIG, config.nested())
    return run


def read_config(run: Path) -> dict[str, Any]:
    """Return the config of a run as plain tables; ValueError if the folder is not one of a run."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no {CONFIG}")
    return json.loads((run / CONFIG).read_text())


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
    """Drop metrics and samples after `step`, at which a run is resumed."""
    for path in (run / METRICS, run / SAMPLES):
        kept = [json.dumps(row) + "\n" for row in read(path) if row["step"] <= step]
        write_whole(path, "".join(kept))


class Journal:
    """Writer of metrics and samples; `start` is the step at which the run begins or resumes."""

    def __init__(self, folder: Path, config: Config, start: int = 0):
        self._folder = folder
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = start + 1 if start else None  # drops the steps that are repeated
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

        if config.log.wandb:
            import wandb

            identity = folder / "wandb_id"  # folders of different studies may have the same name
            if not identity.is_file():
                write_whole(identity, uuid.uuid4().hex)
            self._wandb = wandb.init(
                project=config.log.wandb_project,
                name=folder.name,
                id=identity.read_text(),
                dir=str(folder),
                config=config.nested(),
                resume="allow",
            )

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        _append(self._folder / METRICS, {"step": step, **metrics})
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({**metrics, "step": step})

    def sample(
        self, step: int, kind: str, prompt: str, completion: str, reward: float | None, version: int
    ) -> None:
        """Log a completion for a person to read; `kind` is `train` or `eval`."""
        row = {"step": step, "kind": kind, "version": version, "reward": reward}
        _append(self._folder / SAMPLES, {**row, "prompt": prompt, "completion": completion})

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _append(path: Path, row: dict[str, Any]) -> None:
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            row[name] = None  # JSON has no NaN
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
