"""The folder of a run: its config, metrics, samples, checkpoints, summary and report."""

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
    def create(cls, config: Config) -> "RunFolder":
        """Create the folder of a new run; ValueError if it holds a run already."""
        default = f"runs/{config.task.use}-{config.objective.use}-{datetime.now():%Y%m%d-%H%M%S}"
        path = Path(config.run.folder or default).expanduser()
        if (path / METRICS).exists() or (path / "checkpoints").exists():
            raise ValueError(
                f"run.folder = {str(path)!r} holds a run already;"
                f" continue it with --resume {path}, or choose another folder"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder.write_config(config)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """Open the folder of an existing run; ValueError if it is not one."""
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} is not the folder of a run: it has no {CONFIG}")
        return cls(path)

    def write_config(self, config: Config) -> None:
        """Write config.json."""
        write_whole(self.path / CONFIG, json.dumps(config.nested(), indent=1) + "\n")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def config(self) -> dict[str, Any]:
        """Return config.json as plain tables."""
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
        """Drop metrics and samples after `step`, from which the run continues."""
        for name in (METRICS, SAMPLES):
            rewind(self.path / name, step)

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json."""
        plain = asdict(summary)
        plain["eval/first"], plain["eval/last"] = plain.pop("first"), plain.pop("last")
        write_whole(self.path / SUMMARY, json.dumps(plain, indent=1) + "\n")
