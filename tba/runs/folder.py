"""Folder of a run: the names of its files, functions that read and write them, and its lock.

Files are never written through symlinks.
"""

import errno
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from math import nan
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from filelock import FileLock, Timeout

from tba.config.mistakes import about
from tba.config.schema import Config, read_json

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SCORES = "scores.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.json"
SESSIONS = "sessions.jsonl"
WARNINGS = "warnings.jsonl"
DIGESTS = "digests.json"
CHECKPOINTS = "checkpoints"
IDENTITY = "wandb_id"
"""File with the run's id in W&B: folders of different studies may have the same name."""

Replay = Literal["keep", "rescore", "drop"]
"""What a resumed run does with its replay buffer: keep it, score it again, or empty it."""

Row = dict[str, Any]
"""A line of a JSONL file, or the contents of a JSON file."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error codes of a full disk, an exceeded quota, and an exceeded limit on the file size."""
LOCK = ".lock"
HOLDER = ".lock_holder"
"""File that names the process holding the lock."""
PATIENCE = 0.5
"""Seconds to wait for a lock before refusing: a check holds it for a moment."""

log = logging.getLogger(__name__)


def read(path: Path) -> list[Row]:
    """Return the rows of a JSONL file, without a last line that a crash truncated.

    A damaged line is skipped and logged. A missing file has no rows.
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
                raise TypeError("its step is not a number")
            rows.append(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s, line %d is damaged and left out: %r", path, number, error)
    return rows


def read_optional(path: Path) -> Any:
    """Return the contents of a JSON file; None if it does not exist."""
    return read_json(path) if path.is_file() else None


def read_digests(run: Path) -> dict[str, str] | None:
    """Return the digests of a run's data and rewards; log a warning if it has none."""
    digests: dict[str, str] | None = read_optional(run / DIGESTS)
    if digests is None:
        text = "%s is from an earlier version: changes to its data and rewards are not detected"
        log.warning(text, run)
    return digests


def flat(tables: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the values of a config by `table.key`; paths are relative to its start folder."""
    base = tables.get("run", {}).get("base", "")

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [shown(inner) for inner in value]
        return value.removeprefix(f"{base}/") if base and isinstance(value, str) else value

    return {f"{name}.{key}": shown(v) for name, table in tables.items() for key, v in table.items()}


def is_run(folder: Path) -> bool:
    """Return whether a run has begun in a folder."""
    return (folder / METRICS).exists() or (folder / CHECKPOINTS).exists()


def resumes(run: Path, setting: str = "") -> str:
    """Return the command that resumes a run; functions passed from Python must be passed again."""
    task = (read_optional(run / CONFIG) or {}).get("task", {})
    if task.get("use") == "custom" and not task.get("reward"):
        config = "{…}" if setting else "{}"
        return f"tba.train({config}, resume={str(run)!r}, reward=…)"
    return f"tba train --resume {quote(str(run))} {setting}".rstrip()


def continues(run: Path, setting: str = "") -> str:
    """Return the start of a sentence with the command that continues a run."""
    return f"`{resumes(run, setting)}` continues from"


def check_unused(run: Path) -> None:
    """Raise ValueError if a folder already contains a run."""
    if is_run(run):
        is_saved = any((run / CHECKPOINTS).glob("step-*"))
        named = quote(str(run))
        resume = f"continue it with `{resumes(run)}`, " if is_saved else "it has no checkpoint: "
        raise ValueError(
            f"run.folder = {str(run)!r} holds a run already; {resume}remove it (`rm -r {named}`),"
            " or choose another folder"
        )


def read_config(run: Path) -> Config:
    """Return the config of a run; ValueError if the folder is not a run folder."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no {CONFIG}")
    tables = read_json(run / CONFIG)
    if "run" not in tables and not is_run(run):
        raise ValueError(f"{run} is not the folder of a run: its {CONFIG} has no table run")
    with about(str(run / CONFIG)):
        return Config(**tables)


def read_evaluations(run: Path) -> list[dict[str, float]]:
    """Return the scores of every evaluation of a run, in the order of their steps."""
    return evaluations_in(read(run / METRICS))


def evaluations_in(metrics: Iterable[Row]) -> list[dict[str, float]]:
    """Return the scores of every evaluation, sorted by step."""
    evaluations = []
    for row in metrics:
        scores = {n.removeprefix("eval/"): v for n, v in row.items() if n.startswith("eval/")}
        if scores.keys() >= {"sampled_reward", "sampled_reward_stderr"}:
            _, _, stderr = ranked_score(scores)
            evaluations.append({**scores, "step": float(row["step"]), "stderr": stderr})
    return sorted(evaluations, key=lambda scores: scores["step"])


def ranked_score(scores: Mapping[str, float]) -> tuple[str, float, float]:
    """Return the score that ranks evaluations: pass@1 or else reward, its value, and its error."""
    if "sampled_pass@1" in scores:
        return "pass@1", scores["sampled_pass@1"], scores.get("sampled_stderr", nan)
    return "reward", scores["sampled_reward"], scores.get("sampled_reward_stderr", nan)


def read_warnings(run: Path) -> dict[str, str]:
    """Return the warnings that a run has given, by key."""
    return {row["key"]: row["text"] for row in read(run / WARNINGS)}


def rewind(run: Path, step: int, evaluates: bool) -> None:
    """Drop the rows that a run resumed at `step` will write again.

    If it `evaluates`, this includes the evaluation of that step. Weights & Biases cannot delete
    steps, so the run becomes a new one there.
    """

    def comes_again(row: Mapping[str, Any]) -> bool:
        requested = row.get("requested", -1)  # an evaluation may use weights of an earlier step
        return max(row["step"], requested) > step or (evaluates and requested == step)

    for path in (run / METRICS, run / SAMPLES, run / SCORES, run / WARNINGS):
        rows = read(path)
        kept = [row for row in rows if not (comes_again(row) or row.get("at_end"))]
        if path.name == METRICS and len(kept) < len(rows):
            (run / IDENTITY).unlink(missing_ok=True)
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))


def open_plain(path: str, flags: int) -> int:
    """Open a file for appending (an `opener` for `open`); ValueError if it is a symlink."""
    if Path(path).is_symlink():
        raise ValueError(f"{path} is a link, so nothing is written to it; remove it")
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def own_folder(folder: Path) -> Path:
    """Return the folder, which need not exist; ValueError if it is a symlink."""
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link, so nothing is written there; remove it")
    return folder


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Write a file atomically: a reader sees either the old or the new content."""
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)  # of a process that was killed
    # "x" never writes through a link
    with aside.open("x", encoding="utf-8", errors=errors) as file:
        file.write(text)
    aside.rename(path)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def is_full(error: BaseException) -> bool:
    """Return whether an error means that the disk is full.

    The Rust libraries safetensors and tokenizers say so only in the error message.
    """
    return any(os.strerror(number) in str(error) for number in FULL)


@contextmanager
def locked(folder: Path, key: str = "run.folder", wait: float = 0.0) -> Iterator[None]:
    """Create the folder if needed, and lock it against other processes.

    Raises ValueError, naming the holder, if another process holds the lock for more than `wait`
    seconds, or if the folder is not writable. The kernel releases the lock however the process
    ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquired(folder, key, wait)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        write_whole(folder / HOLDER, f"{holder} since {datetime.now():%Y-%m-%d %H:%M:%S}")
    except OSError as error:
        raise _unusable(folder, key, error.strerror or str(error)) from error
    try:
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)  # while locked: the next holder writes its own
        lock.release()


def check_usable(folder: Path, key: str = "run.folder") -> None:
    """Raise ValueError if `locked` would fail now. Creates and writes nothing."""
    if str(folder).encode(errors="replace").decode() != str(folder):
        raise _unusable(folder, key, "its name is not UTF-8")
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise _unusable(folder, key, os.strerror(errno.ENOTDIR))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unusable(folder, key, os.strerror(errno.EACCES))
    if (folder / LOCK).exists():
        _acquired(folder, key, 0.0).release()


def _acquired(folder: Path, key: str, wait: float) -> FileLock:
    """Acquire and return the lock of the folder; warn if the file system has no locks."""
    # not thread-local: another thread may release it, as in a notebook
    lock = FileLock(folder / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=wait + PATIENCE, poll_interval=0.02)
    except Timeout as error:
        named = (folder / HOLDER).is_file()
        holder = (folder / HOLDER).read_text("utf-8") if named else "another process"
        raise ValueError(
            f"{folder} is in use by {holder}; wait until it ends, stop it, or choose another folder"
            f" with {key}=…"
        ) from error
    except OSError as error:
        if error.errno != errno.ENOLCK:  # NFS without a lock server
            raise
        log.warning("%s cannot be locked (%s); make sure that no second run uses it", folder, error)
    return lock


def _unusable(folder: Path, key: str, why: str) -> ValueError:
    return ValueError(
        f"{key} = {str(folder)!r} cannot be used as a folder: {why}; choose another one"
    )
