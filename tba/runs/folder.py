"""The folder of a run: its config, metrics, samples, checkpoints, summary and report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tba.config.schema import Config
from tba.runs.log import CONFIG, METRICS, SAMPLES, SUMMARY, read, rewind, write_whole
from tba.runs.summary import Summary


@dataclass(frozen=True)
class RunFolder:
    """The folder that a run writes to."""

    path: Path

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Create the folder of a new run; ValueError if it holds a run already."""
        name = f"{config.task.use}-{config.objective.use}-{datetime.now():%Y%m%d-%H%M%S}"
        path = Path(config.run.folder or f"runs/{name}").expanduser()
        if (path / "checkpoints").exists():
            raise ValueError(
                f"run.folder = {str(path)!r} holds a run already;"
                f" resume it with --resume {path}, or name another folder"
            )
        if (path / METRICS).exists():
            raise ValueError(
                f"run.folder = {str(path)!r} holds a run that saved no checkpoint;"
                " remove that folder, or name another"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder.write_config(config)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of a run that exists; ValueError if there is none."""
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} is not a run's folder: it has no {CONFIG}")
        return cls(path)

    def write_config(self, config: Config) -> None:
        write_whole(self.path / CONFIG, json.dumps(config.nested(), indent=1) + "\n")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def config(self) -> dict[str, Any]:
        """Return the tables of the stored config."""
        tables: dict[str, Any] = json.loads((self.path / CONFIG).read_text())
        return tables

    def evaluations(self) -> list[tuple[int, dict[str, float]]]:
        """Return (version, scores) of every evaluation so far, in the order they ended."""
        evaluations = []
        for row in read(self.path / METRICS):
            scores = {name: value for name, value in row.items() if name.startswith("eval/")}
            if scores:
                evaluations.append((row["step"], scores))
        return evaluations

    def rewind(self, step: int) -> None:
        """Drop the rows that were logged after `step`, from which the run is resumed."""
        for name in (METRICS, SAMPLES):
            rewind(self.path / name, step)

    def write_summary(self, summary: Summary) -> None:
        plain = asdict(summary)
        plain["eval/first"], plain["eval/last"] = plain.pop("first"), plain.pop("last")
        write_whole(self.path / SUMMARY, json.dumps(plain, indent=1) + "\n")
