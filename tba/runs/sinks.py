"""Services that show the metrics and samples of a run: TensorBoard, Weights & Biases, trackio.

All show the panels of the first screen under the same names.
"""

import uuid
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from tba.config.schema import Config
from tba.runs.files import own_folder, write_whole
from tba.runs.panels import first_screen, tensorboard_layout

IDENTITY = "wandb_id"
"""File with the run's identity: folders of different studies may have the same name."""


class Sink(Protocol):
    """Destination of metrics, samples and warnings."""

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, or the scores of an evaluation of its weights."""

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show completions, one a row."""

    def warn(self, step: int, text: str) -> None:
        """Show a warning."""

    def close(self) -> None:
        """Write what has not been written."""


def open_sinks(config: Config, folder: Path, start: int) -> list[Sink]:
    """Open those that `[log]` names; `start` is the step at which the run begins or resumes."""
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder, start))
    if config.log.wandb:
        sinks.append(WandB(config, folder))
    if config.log.trackio:
        sinks.append(Trackio(config, folder))
    return sinks


def check_wandb() -> None:
    """Raise ValueError if Weights & Biases refuses. On a terminal, it asks for a missing key."""
    import wandb

    try:
        wandb.login()
    except Exception as error:  # also pydantic's, of settings in the environment
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"log.wandb = true, but Weights & Biases refuses: {why}; type `wandb login`, set"
            " WANDB_MODE=offline in the environment, or set log.wandb=false"
        ) from error


class TensorBoard:
    """Event files in the run's folder; the first screen is the page `Custom Scalars`."""

    def __init__(self, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        purge = start + 1 if start else None  # drops the steps that are repeated
        events = own_folder(folder / "tensorboard")
        self._writer: Any = SummaryWriter(str(events), purge_step=purge)
        self._writer.add_custom_scalars(tensorboard_layout())

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show none: they are in `samples.jsonl`."""

    def warn(self, step: int, text: str) -> None:
        self._writer.add_text("warnings", text, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, with tables of completions."""

    def __init__(self, config: Config, folder: Path):
        import wandb

        self._run: Any = wandb.init(
            project=config.log.wandb_project,
            name=folder.name,
            id=_identity(folder),
            dir=str(own_folder(folder / "wandb").parent),
            config=config.nested(),
            resume="allow",
        )
        self._table = wandb.Table
        self._run.define_metric("*", step_metric="step")

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**first_screen(metrics), **metrics, "step": step})

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        self._run.log({"completions": self._table(dataframe=_frame(rows)), **_step(rows)})

    def warn(self, step: int, text: str) -> None:
        self._run.alert(title="tba", text=text, level="WARN")

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, which keeps it on this machine: `trackio show --project NAME`.

    Completions are a table, and traces with reward, lag and version.
    """

    def __init__(self, config: Config, folder: Path):
        import trackio

        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=config.log.wandb_project,
            name=f"{folder.name}-{_identity(folder)[:6]}",
            config=config.nested(),
            resume="allow",
            embed=False,
            auto_log_cpu=False,  # a thread that measures the machine
        )

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if isfinite(value)}
        if "time" in finite:  # the name of a column of trackio
            finite["seconds"] = finite.pop("time")
        self._run.log({**first_screen(metrics), **finite}, step=step)

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        traces = []
        for row in rows:
            about = {name: value for name, value in row.items() if name not in SPOKEN.values()}
            messages = [{"role": role, "content": row[name]} for role, name in SPOKEN.items()]
            traces.append(self._trackio.Trace(messages=messages, metadata=about))
        table = self._trackio.Table(dataframe=_frame(rows))
        self._run.log({"completions": table, "traces": traces}, **_step(rows))

    def warn(self, step: int, text: str) -> None:
        self._run.alert(title="tba", text=text, step=step)

    def close(self) -> None:
        self._run.finish()


SPOKEN = {"user": "prompt", "assistant": "completion"}
"""The column of a row that each role of a trace has said."""


def _frame(rows: Sequence[dict[str, Any]]) -> Any:
    from pandas import DataFrame  # it takes time to import, and few runs need it

    return DataFrame(rows)


def _step(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {"step": max(row["step"] for row in rows)}


def _identity(folder: Path) -> str:
    """Return a name of the run that no other has."""
    file = folder / IDENTITY
    if not file.is_file():
        write_whole(file, uuid.uuid4().hex)
    return file.read_text("utf-8")
