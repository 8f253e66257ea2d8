"""Checkpoints: everything that a run needs to continue as if it had never stopped.

A generation is a folder `step-00000100` with `model/` (a plain Hugging Face folder), the rest of
the trainer, the replay buffer, the state of search, and a manifest with the sha256 of each file.
It is written aside and renamed when it is complete. Safetensors and JSON only, no pickles.
"""

import json
import logging
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy

from tba.learn import Trainer
from tba.models.pretrained import Text
from tba.replay.buffer import ReplayBuffer
from tba.replay.files import is_segment, load_groups, save_groups
from tba.runs.manifest import commit, damage
from tba.runtime import SearchState
from tba.search.result import SearchStats
from tba.weights import Weights

STATE, HELD = "state.json", "held.safetensors"
SEARCH_WEIGHTS, REFERENCE = "search_weights.safetensors", "reference.safetensors"

FORMAT = 5
"""Version of a generation's files. Those of another version are not resumed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Position of a run (see `Run`), and what it needs to continue from there."""

    step: int
    missing: int
    evaluating: int
    rng: Mapping[str, Any]
    counts: Mapping[str, float]
    """Totals of the summary."""


class Checkpoints:
    """Writer of a run's checkpoints: in the background, one at a time.

    Used as a context, it waits at the end for a save that is being written, except after a
    KeyboardInterrupt. An unfinished save leaves the generations before it as they are.
    """

    def __init__(self, folder: Path, keep: int, deadline: float):
        """`deadline` is the most seconds to wait for one save."""
        self.folder = folder
        self._keep, self._deadline = keep, deadline
        self._step: int | None = None
        self._writing: Future[dict[str, float]] | None = None
        """The save of step `_step`, which returns its seconds."""
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def save(
        self,
        trainer: Trainer,
        text: Text,
        buffer: ReplayBuffer,
        search: SearchState,
        progress: Progress,
    ) -> None:
        """Copy everything now and write it in the background as generation `step-N`.

        A save that is still being written is waited for first. A step is saved once.
        """
        if progress.step == self._step:
            return
        started = time.perf_counter()
        self.wait()
        target = self.folder / f"step-{progress.step:08d}"
        aside = self.folder / f".{target.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write_trainer = trainer.save(aside)
        older = [g for g in generations(self.folder) if g.name < target.name]
        write_buffer = buffer.save(aside, older[-1] if older else None)
        copied = time.perf_counter()

        def write() -> dict[str, float]:
            write_trainer()
            segments = write_buffer()
            text.tokenizer.save_pretrained(aside / "model")
            _write_search(aside, search, progress)
            commit(aside, target, known=segments)
            _prune(self.folder, target, self._keep)
            seconds = time.perf_counter() - copied
            return {"checkpoint/seconds": seconds, "checkpoint/blocked": copied - started}

        self._step = progress.step
        self._writing = _in_background(write, f"checkpoint of step {self._step}")

    def wait(self) -> None:
        """Wait for the save that is being written; RuntimeError if it failed."""
        save = self._writing
        if save is None:
            return
        futures.wait([save], self._deadline)
        if not save.done():
            raise TimeoutError(
                f"the checkpoint of step {self._step} was not written within checkpoint.deadline ="
                f" {self._deadline:g} s; raise it, or see why the disk is slow"
            )
        self._writing = None
        error = save.exception()
        if error is not None:
            raise RuntimeError(
                f"the checkpoint of step {self._step} was not written: {error}"
            ) from error
        for name, seconds in save.result().items():
            self._seconds[name] += seconds

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the saves that have ended since the last call.

        `checkpoint/seconds` is the time of writing, `checkpoint/blocked` the time that the train
        loop waited. RuntimeError if a save failed.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            try:
                self.wait()
            except (RuntimeError, TimeoutError) as error:  # the run's own error is raised
                log.error("%s", error)


def _in_background(write: Callable[[], dict[str, float]], name: str) -> Future[dict[str, float]]:
    """Call `write` in a daemon thread, so that an interrupted process does not wait for it."""
    future: Future[dict[str, float]] = Future()

    def call() -> None:
        try:
            future.set_result(write())
        except Exception as error:  # raised in the train loop by `Checkpoints`
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future


def _write_search(folder: Path, search: SearchState, progress: Progress) -> None:
    for weights, name in ((search.weights, SEARCH_WEIGHTS), (search.reference, REFERENCE)):
        if weights is not None:
            version = {"version": str(weights.version)}
            safetensors.numpy.save_file(dict(weights.arrays), folder / name, version)
    save_groups(list(search.held), folder / HELD)
    state = {
        "format": FORMAT,
        "progress": asdict(progress),
        "cursor": search.cursor,
        "tasks": search.tasks,
        "stats": search.stats.counts(),
    }
    (folder / STATE).write_text(json.dumps(state))


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all generations except `newest` and the keep - 1 before it.

    Later ones were abandoned when the run was resumed from an earlier one.
    """
    complete = generations(folder)
    end = complete.index(newest) + 1
    kept = complete[max(0, end - keep) : end]
    unfinished, replaced = folder.glob(".step-*"), folder.glob(".replaced-*")
    for path in [*complete, *unfinished, *replaced]:
        if path not in kept:
            shutil.rmtree(path)


def generations(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def newest(folder: Path, drop_damaged_replay: bool = False) -> Path:
    """Return the newest undamaged generation. Damaged ones are logged as errors.

    ValueError if there is none. With `drop_damaged_replay`, return the newest one in which
    nothing but segments of the replay buffer is damaged instead.
    """
    without_segments = []
    complete = generations(folder)
    if not complete:
        raise ValueError(
            f"no checkpoint in {folder}: nothing to resume; start the run anew with"
            " `tba train CONFIG.toml`, or its study with study.keep_checkpoints=true"
        )
    for generation in reversed(complete):
        problems = damage(generation)
        if not problems:
            return generation
        name, problem = min(problems.items())
        log.error("DAMAGED CHECKPOINT %s: %s %s", generation.name, name, problem)
        if all(is_segment(name) for name in problems):
            without_segments.append(generation)
    if without_segments and drop_damaged_replay:
        return without_segments[0]
    if without_segments:
        raise ValueError(
            f"the replay buffer is damaged in every checkpoint in {folder}; restore one from a"
            " backup, or go on without the damaged trajectories:"
            f" `tba train --resume {folder.parent} --drop-damaged-replay`"
        )
    raise ValueError(
        f"all {len(complete)} checkpoints in {folder} are damaged; restore one from a backup, or"
        " start a new run: a run never restarts at step 0 by itself"
    )


def restore(
    generation: Path, trainer: Trainer, buffer: ReplayBuffer
) -> tuple[Progress, SearchState]:
    """Put trainer, random states and buffer back; return where the run and its search stood.

    The generation must have been verified.
    """
    state = json.loads((generation / STATE).read_text())
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{generation} was written by another version of tba and cannot be resumed by this one;"
            " `tba export` still writes its model"
        )
    trainer.load(generation)
    buffer.load(generation, drop_damaged=True)  # `newest` refuses damage unless asked
    search = SearchState(
        cursor=state["cursor"],
        tasks=state["tasks"],
        stats=SearchStats.from_counts(state["stats"]),
        weights=read_weights(generation / SEARCH_WEIGHTS),
        reference=read_weights(generation / REFERENCE),
        held=load_groups(generation / HELD),
    )
    return Progress(**state["progress"]), search


def read_weights(file: Path) -> Weights | None:
    """Return the weights in a file; None if it does not exist."""
    if not file.is_file():
        return None
    with safetensors.safe_open(file, "numpy") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return Weights(int(opened.metadata()["version"]), arrays)
