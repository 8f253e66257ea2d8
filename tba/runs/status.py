"""Status of a run, read from its folder: whether it is running, its progress, and its score."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tba.display import duration
from tba.runs.folder import (
    CONFIG,
    LOCK,
    METRICS,
    SUMMARY,
    evaluations_in,
    is_run,
    ranked_score,
    read,
    read_optional,
)
from tba.runs.generations import try_lock

RATE = 50
"""Number of steps over which the pace is measured to estimate the remaining time."""


Kind = Literal["running", "finished", "stopped", "crashed", "not started"]


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run. `running`: a process holds the folder's lock. `crashed`: no process holds
    it, and the run has written no summary since its newest step. `not started`: no process holds
    it, and the run has taken no step.
    """

    kind: Kind
    step: int
    steps: int
    """`run.steps`; 0 if `run.epochs` sets the length."""
    age: float
    """Seconds since the newest metrics were written, or else since the run began."""
    left: float | None
    """Seconds to the last step at the pace of recent steps; None unless the run is running."""
    score: float | None
    stderr: float | None
    """Sampled pass@1, or else reward, of the latest evaluation, and its standard error."""

    @property
    def is_running(self) -> bool:
        return self.kind == "running"

    @property
    def progress(self) -> str:
        """The step and the state, such as `step 12/300, running, last written 2 s ago`."""
        return f"step {self.step:,}{f'/{self.steps:,}' if self.steps else ''}, {self.text}"

    @property
    def text(self) -> str:
        """The kind; for a running run, also the time since the last write and the time left."""
        if not self.is_running:
            return self.kind
        return f"running, last written {duration(self.age)} ago{self.remaining}"

    @property
    def remaining(self) -> str:
        """The time left, after a comma; empty if it is not known."""
        return "" if self.left is None else f", {duration(self.left)} left"


def status_of(run: Path) -> RunStatus:
    """Return the status of a run."""
    metrics = read(run / METRICS)
    rows = [row for row in metrics if "step_time" in row]
    step = int(rows[-1]["step"]) if rows else 0
    config = read_optional(run / CONFIG) or {}
    steps = int(config.get("run", {}).get("steps", 0))
    summary = read_optional(run / SUMMARY)
    kind: Kind = "crashed" if rows else "not started"
    left = None
    is_locked = False
    with suppress(OSError), (run / LOCK).open("rb") as lock:  # it may not exist, or be unreadable
        is_locked = not try_lock(lock, fcntl.LOCK_SH)
    if is_locked:
        kind = "running"
        latest = rows[-RATE:]
        if len(latest) > 1 and steps:
            each = (latest[-1]["time"] - latest[0]["time"]) / (len(latest) - 1)
            left = each * (steps - step)
    elif summary is not None and summary["steps"] == step:
        kind = "finished" if summary["finished"] else "stopped"
    files = [run / name for name in (METRICS, LOCK) if (run / name).is_file()]
    age = time.time() - files[0].stat().st_mtime if files else 0.0
    evaluations = evaluations_in(metrics)
    _, score, stderr = ranked_score(evaluations[-1]) if evaluations else ("", None, None)
    return RunStatus(kind, step, steps, age, left, score, stderr)


def runs_in(folder: Path) -> Iterator[Path]:
    """Yield the runs in a folder and its subfolders, sorted by name."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if is_run(path) or (path / LOCK).exists():  # it may not have started to train
                yield path
            else:
                yield from runs_in(path)


def table_of(folder: Path) -> list[str]:
    """Return a line for each run in a folder, newest last; ValueError if there are no runs."""
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}; type `tba list runs FOLDER`")
    states = [(str(run.relative_to(folder)), status_of(run)) for run in runs_in(folder)]
    if not states:
        raise ValueError(f"no run in {folder}; `tba train` writes runs into the folder `runs`")
    width = max(len(name) for name, _ in states)
    lines = [f"{'run':<{width}}  {'state':<11}  {'step':>15}  {'score ± s.e.':>13}  age"]
    for name, state in sorted(states, key=lambda each: -each[1].age):
        of = f"{state.step:,}/{state.steps:,}" if state.steps else f"{state.step:,}"
        score = "" if state.score is None else f"{state.score:.3f} ± {state.stderr:.3f}"
        row = f"{name:<{width}}  {state.kind:<11}  {of:>15}  {score:>13}  {duration(state.age)}"
        lines.append(row + state.remaining)
    return lines
