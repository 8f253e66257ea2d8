"""Files of a run: config, metrics and sample completions, which sinks show as well."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tba.config.schema import Config, read_json
from tba.runs.files import own, write_whole
from tba.runs.generations import generations
from tba.runs.sinks import Sink, open_sinks

METRICS, SAMPLES, SUMMARY, CONFIG = "metrics.jsonl", "samples.jsonl", "summary.json", "config.json"
SESSIONS, WARNINGS, CHECKPOINTS = "sessions.jsonl", "warnings.jsonl", "checkpoints"

LONGEST_VALUE = 10_000
"""Most characters of a column's value in samples.jsonl."""

Replay = Literal["keep", "rescore", "drop"]
"""What a resumed run does with its replay buffer: keep it, score it again, or empty it."""

log = logging.getLogger(__name__)


def read(path: Path) -> list[dict[str, Any]]:
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


def folder_of(config: Config) -> Path:
    """Return the folder of a new run."""
    default = f"runs/{config.task.use}-{config.objective.use}-{datetime.now():%Y%m%d-%H%M%S}"
    run = Path(config.run.folder or default).expanduser()
    return run.absolute() if config.run.base else run


def is_run(folder: Path) -> bool:
    """Return whether a run has begun in a folder."""
    return (folder / METRICS).exists() or (folder / CHECKPOINTS).exists()


def check_unused(run: Path) -> None:
    """Raise ValueError if a folder holds a run already."""
    if generations(run / CHECKPOINTS):
        raise ValueError(
            f"run.folder = {str(run)!r} holds a run already;"
            f" continue it with --resume {run}, or choose another folder"
        )
    if is_run(run):
        raise ValueError(
            f"run.folder = {str(run)!r} holds a run that ended before its first checkpoint was"
            f" complete, so that it cannot be resumed; remove it (`rm -r {run}`), or choose another"
            " folder"
        )


def stored(config: Config) -> dict[str, Any]:
    """Return the config that a run keeps, with the folder that its relative paths start from."""
    tables = config.nested()
    tables["run"]["base"] = str(Path.cwd())
    return tables


def read_config(run: Path) -> dict[str, Any]:
    """Return the config of a run as plain tables; ValueError if the folder is not one of a run."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no {CONFIG}")
    return read_json(run / CONFIG)


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


class Journal:
    """Writer of metrics, samples and warnings; `start` is the step at which the run begins."""

    def __init__(self, folder: Path, config: Config, start: int = 0):
        self._folder = folder
        self._sinks = open_sinks(config, folder, start)
        self._shown: list[dict[str, Any]] = []  # samples that sinks have not got

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, or of an evaluation of its weights.

        Those of an evaluation have `requested`, the step at which it was requested.
        """
        self._write(METRICS, {"step": step, **metrics})
        self._show_samples()
        self._show(lambda sink: sink.row(step, metrics))

    def sample(
        self, step: int, kind: str, prompt: str, completion: str, reward: float | None,
        version: int, notes: Mapping[str, Any] | None = None, requested: int | None = None,
        id: str = "", columns: Mapping[str, Any] | None = None, drawn: int = 1,
    ) -> None:  # fmt: skip
        """Log a completion for a person to read; `kind` is `train` or `eval`.

        `notes` are what reward functions gave and logged, if that is known; `requested` is the step
        at which an evaluation was requested; `id` and `columns` are those of the prompt; the batch
        has the completion `drawn` times.
        """
        row: dict[str, Any] = {"step": step, "kind": kind, "version": version, "reward": reward}
        row |= {"id": id, "prompt": prompt, "completion": completion}
        if columns:
            row["columns"] = {name: _readable(value) for name, value in columns.items()}
        if drawn > 1:
            row["drawn"] = drawn
        if requested is not None:
            row["requested"] = requested
        self._write(SAMPLES, row | ({"notes": dict(notes)} if notes else {}))
        if self._sinks:
            flat = {
                "columns": json.dumps(row.get("columns", {})),
                "lag": max(0, step - 1 - version),
            }
            self._shown.append(row | flat)

    def warn(self, step: int, key: str, text: str, at_end: bool = False) -> None:
        """Log a warning; `key` is that of `[warn]`. One `at_end` goes if the run is resumed."""
        row: dict[str, Any] = {"step": step, "key": key, "text": text}
        self._write(WARNINGS, row | ({"at_end": True} if at_end else {}))
        self._show(lambda sink: sink.warn(step, text))

    def close(self) -> None:
        self._show_samples()
        self._show(lambda sink: sink.close())

    def _show_samples(self) -> None:
        """Give the samples since the last call to the sinks, together: they make a table."""
        shown, self._shown = self._shown, []
        if shown:
            self._show(lambda sink: sink.samples(shown))

    def _show(self, show: Callable[[Sink], None]) -> None:
        """Give something to every sink. One whose files cannot be written gets nothing more."""
        for sink in list(self._sinks):
            try:
                show(sink)
            except OSError as error:  # TensorBoard's thread has ended then
                told = "%s: %s; it gets nothing more until the run is resumed"
                log.warning(told, type(sink).__name__, error)
                self._sinks.remove(sink)

    def _write(self, name: str, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[key] = None  # JSON has no NaN
        _append(self._folder / name, f"{json.dumps(row)}\n".encode())


def _readable(value: Any) -> Any:
    """Return a column's value as strict JSON: NaN is null, and a long value is its beginning."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > LONGEST_VALUE:
        return f"{text[:LONGEST_VALUE]} …"
    return text if isinstance(value, str) else json.loads(text, parse_constant=lambda _: None)


def _append(path: Path, line: bytes) -> None:
    """Append a line to a file, all of it or nothing."""
    with open(path, "ab", buffering=0, opener=own) as file:
        end, rest = file.tell(), line
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)  # else the next line would follow a part of this one
            raise
