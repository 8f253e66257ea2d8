"""Journal of a run: writes metrics, samples and warnings to its folder, TensorBoard and W&B."""

import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from tba.config.schema import Config
from tba.config.tables import LogTable
from tba.runs.folder import (
    IDENTITY,
    METRICS,
    SAMPLES,
    SCORES,
    WARNINGS,
    flat,
    open_plain,
    own_folder,
    read,
    write_whole,
)
from tba.weights import lag

LONGEST_VALUE = 10_000
"""Maximum number of characters of a column's value in samples.jsonl."""
HPARAM_METRICS = ("reward", "eval/sampled_reward", "eval/sampled_pass@1")
"""Metrics that TensorBoard shows with the settings of runs."""


def check_log(table: LogTable) -> None:
    """Raise ValueError if Weights & Biases is not installed, or the login fails.

    On a terminal, it prompts for a missing API key.
    """
    if "wandb" not in table.report_to:
        return
    try:
        import wandb

        wandb.login()
    except Exception as error:  # also pydantic's, of settings in the environment
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"log.report_to = wandb: {why}; pip install -e '.[wandb]', type `wandb login`, set"
            " WANDB_MODE=offline in the environment, or remove wandb from log.report_to"
        ) from error


class TensorBoard:
    """Event files in the run's folder. Completions are texts, and the settings are hparams."""

    def __init__(self, config: Config, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        purge = start + 1 if start else None  # drops the steps that will be repeated
        events = own_folder(folder / "tensorboard")
        self._writer: Any = SummaryWriter(str(events), purge_step=purge)
        self._write_settings(config)

    def _write_settings(self, config: Config) -> None:
        from torch.utils.tensorboard.summary import hparams

        settings = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in flat(config.nested()).items()
        }
        # `add_hparams` would write them as another run
        for summary in hparams(settings, dict.fromkeys(HPARAM_METRICS, 0.0)):
            self._writer.file_writer.add_summary(summary)

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        for kind in dict.fromkeys(row["kind"] for row in rows):
            of_kind = [row for row in rows if row["kind"] == kind]
            texts = "\n\n---\n\n".join(map(_markdown, of_kind))
            self._writer.add_text(f"completions/{kind}", texts, of_kind[-1]["step"])

    def warn(self, step: int, text: str) -> None:
        self._writer.add_text("warnings", text, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in Weights & Biases. It starts with the metrics so far; completions become tables."""

    def __init__(self, config: Config, folder: Path):
        import wandb

        self._wandb: Any = wandb
        file = folder / IDENTITY
        has_begun = file.is_file()
        identity = file.read_text("utf-8") if has_begun else uuid.uuid4().hex
        self._run: Any = wandb.init(
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "tba"),
            config=config.nested(),
            id=identity,
            dir=str(own_folder(folder / "wandb").parent),
            name=folder.name,
        )
        self._run.define_metric("*", step_metric="step")
        if not has_begun:
            for row in read(folder / METRICS):
                self.row(row["step"], {n: v for n, v in row.items() if v is not None})
            write_whole(file, identity)

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._log(step, finite)

    def samples(self, rows: Sequence[dict[str, Any]]) -> None:
        from pandas import DataFrame  # it takes time to import, and few runs need it

        table = self._wandb.Table(dataframe=DataFrame(rows))
        self._log(max(row["step"] for row in rows), {"completions": table})

    def _log(self, step: int, values: dict[str, Any]) -> None:
        # W&B's own step cannot decrease, as it would when an evaluation ends late
        self._run.log({**values, "step": step})

    def warn(self, step: int, text: str) -> None:
        self._run.alert(title="tba", text=text)

    def close(self) -> None:
        self._run.finish()


Sink = TensorBoard | WeightsAndBiases
"""Service that displays metrics, samples and warnings."""


class Journal:
    """Writer of metrics, samples and warnings; `start` is the step at which the run begins."""

    def __init__(self, folder: Path, config: Config, start: int = 0):
        self._folder = folder
        self._sinks: list[Sink] = []
        if "tensorboard" in config.log.report_to:
            self._sinks.append(TensorBoard(config, folder, start))
        if "wandb" in config.log.report_to:
            self._sinks.append(WeightsAndBiases(config, folder))
        self._shown: list[dict[str, Any]] = []  # samples not yet sent to the sinks

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a training step, or of an evaluation of its weights.

        The metrics of an evaluation include `requested`, the step at which it was requested.
        """
        self._write(METRICS, {"step": step, **metrics})
        self._show_samples()
        self._show(lambda sink: sink.row(step, metrics))

    def sample(
        self, step: int, kind: str, prompt: str, completion: str, reward: float | None,
        version: int, notes: Mapping[str, Any] | None = None, requested: int | None = None,
        id: str = "", columns: Mapping[str, Any] | None = None, drawn: int = 1,
        finished: bool = True, authors: Sequence[tuple[str, int]] = (),
    ) -> None:  # fmt: skip
        """Log a completion for a person to read; `kind` is `train` or `eval`.

        `notes`: values that reward functions returned and logged, when known. `requested`: the step
        at which an evaluation was requested. `id` and `columns` belong to the prompt. `drawn`: how
        many times the completion is in the batch. `finished`: whether the completion was not cut
        off. `authors`: who wrote each part of a dialogue, see `agents.chat.authors`.
        """
        row: dict[str, Any] = {"step": step, "kind": kind, "version": version, "reward": reward}
        row |= {"id": id, "prompt": prompt, "completion": completion}
        if columns:
            row["columns"] = {name: _readable(value) for name, value in columns.items()}
        if drawn > 1:
            row["drawn"] = drawn
        if not finished:
            row["cut"] = True
        if authors:
            row["authors"] = list(authors)
        if requested is not None:
            row["requested"] = requested
        self._write(SAMPLES, row | ({"notes": dict(notes)} if notes else {}))
        if self._sinks:
            plain = {
                "columns": json.dumps(row.get("columns", {})),
                "lag": max(0, lag(step - 1, version)),
            }
            row.pop("authors", None)
            self._shown.append(row | plain)

    def scores(
        self, step: int, requested: int, prompts: str, by_prompt: Sequence[float | None]
    ) -> None:
        """Log the score of each held-out prompt; `prompts` is the digest of all of them."""
        row = {"step": step, "requested": requested, "prompts": prompts}
        self._write(SCORES, {**row, "scores": list(by_prompt)})

    def warn(self, step: int, key: str, text: str, at_end: bool = False) -> None:
        """Log a warning; `key` names its kind. If `at_end`, it is dropped when the run resumes."""
        row: dict[str, Any] = {"step": step, "key": key, "text": text}
        self._write(WARNINGS, row | ({"at_end": True} if at_end else {}))
        self._show(lambda sink: sink.warn(step, text))

    def close(self) -> None:
        self._show_samples()
        self._show(lambda sink: sink.close())

    def _show_samples(self) -> None:
        """Send the samples since the last call to the sinks, together: they form one table."""
        if self._shown:
            self._show(lambda sink: sink.samples(self._shown))
        self._shown = []

    def _show(self, show: Callable[[Sink], None]) -> None:
        """Call `show` with every sink."""
        for sink in self._sinks:
            show(sink)

    def _write(self, name: str, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[key] = None  # JSON has no NaN
        with open(self._folder / name, "a", encoding="utf-8", opener=open_plain) as file:
            file.write(json.dumps(row) + "\n")


def _markdown(row: Mapping[str, Any]) -> str:
    """Return a completion as Markdown. Its texts are indented, which makes them code."""
    texts = [indent(f"{row[name]} ", "    ", lambda _: True) for name in ("prompt", "completion")]
    return f"{texts[0]}\n\nreward {row['reward']}, weights of step {row['version']}:\n\n{texts[1]}"


def _readable(value: Any) -> Any:
    """Return a column's value as strict JSON: NaN becomes null, and a long value is truncated."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > LONGEST_VALUE:
        return f"{text[:LONGEST_VALUE]} …"
    return text if isinstance(value, str) else json.loads(text, parse_constant=lambda _: None)
