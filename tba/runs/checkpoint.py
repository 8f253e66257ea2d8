"""Checkpoints: everything that a run needs to continue where it stopped.

A generation is a folder `step-00000100`; docs/architecture.md lists its files. It is written under
a temporary name and renamed when complete. Safetensors and JSON only, no pickles.
"""

import json
import logging
import math
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from tba.config.schema import Config, read_json
from tba.display import size
from tba.errors import TrainerLost
from tba.learn import Trainer, checkpoint_size
from tba.learn.state import MODEL
from tba.models.tokenizer import Tokenizer
from tba.replay.buffer import ReplayBuffer
from tba.replay.store import load_groups, save_groups
from tba.runs.folder import CHECKPOINTS, is_run, own_folder, ranked_score, read_evaluations
from tba.runs.generations import (
    MANIFEST,
    damage,
    files_of,
    generations,
    locked_generations,
    path_of,
    put,
    remove,
    saved,
    sha256_of,
    step_of,
)
from tba.search.prompts import Cursor, SearchState
from tba.search.result import SearchStats
from tba.weights import read_weights, write_weights

STATE = "state.json"
DELAYED = "delayed.jsonl"
SEARCH_WEIGHTS = "search_weights.safetensors"
REFERENCE = "reference.safetensors"
BEST = "best"

FORMAT = 9  # version of a generation's files; other versions cannot be resumed

GRACE = 1.0
"""Minimum seconds to wait for a save, even past its deadline."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Position of a run (see `Run`), and the state it needs to continue from there."""

    step: int
    missing: int
    evaluating: int
    rng: Mapping[str, Any]
    counts: Mapping[str, float]  # totals of the summary
    pace: Sequence[Sequence[int]] = ((0, 0),)  # marks of `Pace`


def beginning(
    first_fill: int, rng: np.random.Generator, cursor: Cursor
) -> tuple[Progress, SearchState]:
    """Return the initial states of a new run."""
    progress = Progress(0, first_fill, 1, rng.bit_generator.state, {})
    return progress, SearchState(cursor, 0, SearchStats(), None, None)


class Checkpoints:
    """Writes the checkpoints of a run in the background, one at a time.

    As a context manager, it waits at exit for a save in progress, except after a
    KeyboardInterrupt. An unfinished save does not affect earlier generations. `deadline` is the
    maximum duration of a save in seconds.
    """

    def __init__(self, folder: Path, keep: int, deadline: float):
        self._folder = folder
        self._keep = keep
        self._deadline = deadline
        self._step: int | None = None
        self._until = math.inf
        self._thread: threading.Thread | None = None  # saves step `_step`, sets the next two
        self._error: BaseException | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def save(
        self,
        trainer: Trainer,
        text: Tokenizer,
        buffer: ReplayBuffer,
        search: SearchState,
        progress: Progress,
        beside: Set[Path] = frozenset(),
    ) -> None:
        """Copy everything now and write it in the background as generation `step-N`.

        Waits first for a save in progress. Each step is saved once. The generations in `beside`
        are kept in addition to the newest ones.
        """
        if progress.step == self._step:
            return
        started = time.perf_counter()
        self.wait()  # one save at a time: the thread and this method share the next fields
        target = path_of(self._folder, progress.step)
        aside = self._folder / f".{target.name}"
        name = f"checkpoint of step {progress.step}"
        own_folder(self._folder).mkdir(exist_ok=True)  # no parents: the run may have been moved
        remove(aside)
        aside.mkdir()
        made = aside.stat()
        write_trainer = trainer.save(aside)
        write_buffer = buffer.save(aside)
        copied = time.perf_counter()

        def write() -> None:
            try:
                write_trainer()
                write_buffer()
                text.tokenizer.save_pretrained(aside / MODEL)
                _write_search(aside, search, progress)
                if not os.path.samestat(made, aside.stat()):  # `save_pretrained` creates parents
                    raise FileNotFoundError(f"{self._folder} was moved or removed meanwhile")
                digests = {name: sha256_of(path) for name, path in files_of(aside).items()}
                (aside / MANIFEST).write_text(json.dumps(digests, indent=1), "utf-8")
                # on disk before the rename: a complete name never stands for incomplete files
                for path in [*aside.rglob("*"), aside]:
                    _sync(path)
                put(aside, target)
                _sync(self._folder)
                # only now are older ones removed; later ones were abandoned by a resumed run
                done = [g for g in generations(self._folder) if step_of(g) <= progress.step]
                for path in saved(self._folder) - {*done[-self._keep :], *beside}:
                    remove(path)
                self._seconds["checkpoint/seconds"] += time.perf_counter() - copied
                self._seconds["checkpoint/blocked"] += copied - started
            except BaseException as error:  # raised in the train loop by `wait`
                self._error = error

        self._step = progress.step
        self._until = time.monotonic() + self._deadline
        # a daemon, so that an interrupted process does not wait for the thread
        self._thread = threading.Thread(target=write, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current save. Raises RuntimeError if it failed, TimeoutError if it is late.

        Raises TrainerLost if a writing rank has died.
        """
        if self._thread is None:
            return
        problem = f"the checkpoint of step {self._step} was not written"
        # if this process was suspended, so was the thread
        self._thread.join(max(GRACE, self._until - time.monotonic()))
        if self._thread.is_alive():
            limit = f"trainer.deadline = {self._deadline:g} s"
            raise TimeoutError(f"{problem} within {limit}; raise it, or see why the disk is slow")
        error = self._error
        self._thread = None  # before the error is raised, so that it is raised once
        self._error = None
        if error is not None:
            kind = TrainerLost if isinstance(error, TrainerLost) else RuntimeError
            raise kind(f"{problem}: {error}") from error

    def metrics(self) -> dict[str, float]:
        """Return the durations of the saves that completed since the last call, in seconds.

        `checkpoint/seconds` is the writing time, `checkpoint/blocked` the time that the train loop
        waited. Raises RuntimeError if a save failed, TimeoutError if one takes too long.
        """
        if self._thread is not None and self._thread.is_alive() and time.monotonic() < self._until:
            return {}
        self.wait()
        seconds = self._seconds
        self._seconds = defaultdict(float)
        return seconds

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            try:
                self.wait()
            except (RuntimeError, TimeoutError) as error:  # the error of the run propagates
                log.error("%s", error)


def _write_search(folder: Path, search: SearchState, progress: Progress) -> None:
    for weights, name in ((search.weights, SEARCH_WEIGHTS), (search.reference, REFERENCE)):
        if weights is not None:
            write_weights(weights, folder / name)
    save_groups(list(search.delayed), folder / DELAYED)
    state = {"format": FORMAT, "progress": asdict(progress), "cursor": search.cursor}
    state |= {"tasks": search.tasks, "stats": search.stats.to_json()}
    (folder / STATE).write_text(json.dumps(state), "utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def newest(folder: Path, complete: Sequence[Path] | None = None) -> Path:
    """Return the newest undamaged generation."""
    complete = generations(folder) if complete is None else complete
    if not complete:
        named = quote(str(folder.parent))
        again = f"`tba train CONFIG.toml run.folder={named}`"
        if is_run(folder.parent):
            again = f"remove its folder (`rm -r {named}`) and type {again}. A study keeps"
            again += " checkpoints with study.keep_checkpoints=true"
        told = f"no complete checkpoint in {folder}: nothing to resume"
        raise ValueError(f"{told}; to start the run again, {again}")
    for generation in reversed(complete):
        problems = damage(generation)
        if not problems:
            return generation
        name, problem = min(problems.items())
        log.error("DAMAGED CHECKPOINT %s: %s %s", generation.name, name, problem)
    raise ValueError(
        f"all checkpoints in {folder} are damaged; restore one from a backup, or start a new run:"
        " a run never restarts at step 0 by itself"
    )


def score_of(scores: Mapping[str, float]) -> float:
    """Return the score that ranks evaluations: sampled pass@1, or else the reward.

    Rounded to nine digits. An evaluation in which no answer could be scored ranks last.
    """
    if scores.get("sampled_rejected") == 1:
        return -math.inf
    _, score, _ = ranked_score(scores)
    return float(f"{score:.9g}")


def read_scores(run: Path) -> dict[int, float]:
    """Return the score of each evaluation of a run, by evaluated step."""
    return {int(scores["step"]): score_of(scores) for scores in read_evaluations(run)}


def best_step(scores: Mapping[int, float], kept: Container[int] = ()) -> int | None:
    """Return the step with the highest score, or None.

    Ties go to the first step whose checkpoint was `kept`, else to the first step. Step 0, the
    model before training, is excluded because it has no checkpoint.
    """
    steps = sorted(scores.keys() - {0})
    return max(steps, key=lambda step: (scores[step], step in kept), default=None)


def without_better(scores: Mapping[int, float], since: int) -> int:
    """Return the number of evaluations after both step `since` and the best one."""
    best = max(sorted(scores), key=scores.__getitem__, default=0)
    return sum(step > max(best, since) for step in scores)


def kept_beside(run: Path, scores: Mapping[int, float], evaluating: Set[int]) -> set[Path]:
    """Return the checkpoints that `checkpoint.keep_best` keeps: the best, and any in evaluation."""
    folder = run / CHECKPOINTS
    kept = [step_of(generation) for generation in generations(folder)]
    steps = {best_step(scores, kept), *(evaluating - scores.keys())}
    return {path_of(folder, step) for step in steps if step}


@contextmanager
def chosen(run: Path, step: int | str | None = None) -> Iterator[Path]:
    """Choose a checkpoint, and lock it so that a training run does not remove it."""
    with locked_generations(run / CHECKPOINTS) as complete:
        yield choose_checkpoint(run, step, complete)


def choose_checkpoint(
    run: Path, step: int | str | None = None, complete: Sequence[Path] | None = None
) -> Path:
    """Return the checkpoint of a `step`, the "best" one, or by default the newest undamaged one.

    Raises ValueError if the checkpoint does not exist or is damaged.
    """
    folder = run / CHECKPOINTS
    if step is None:
        return newest(folder, complete)
    by_step = {step_of(g): g for g in (generations(folder) if complete is None else complete)}
    there = f"{run} has checkpoints of steps {', '.join(map(str, by_step)) or '(none)'}"
    number = int(step) if str(step).isdecimal() else None
    if step == BEST:
        number = best_step(read_scores(run), by_step)
    if number is None or number not in by_step:
        advice = "give the number of a step, or best, which needs checkpoint.keep_best=true"
        raise ValueError(f"--step {step}: no such checkpoint; {advice}; {there}")
    chosen = by_step[number]
    problems = damage(chosen)
    if problems:
        name, problem = min(problems.items())
        raise ValueError(f"--step {step}: {chosen} is damaged: {name} {problem}; {there}")
    return chosen


def restore(
    generation: Path, trainer: Trainer, buffer: ReplayBuffer
) -> tuple[Progress, SearchState]:
    """Restore trainer and buffer from an undamaged generation; return the other states."""
    state = read_json(generation / STATE)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{generation} was written by another version of tba and cannot be resumed by this one;"
            " `tba export` still writes its model"
        )
    trainer.load(generation)
    buffer.load(generation)
    search = SearchState(
        cursor=state["cursor"],
        tasks=state["tasks"],
        stats=SearchStats.from_json(state["stats"]),
        weights=read_weights(generation / SEARCH_WEIGHTS),
        reference=read_weights(generation / REFERENCE),
        delayed=load_groups(generation / DELAYED),
    )
    known = {n: value for n, value in state["progress"].items() if n in Progress.__annotations__}
    return Progress(**known), search


def check_space(config: Config, folder: Path, trainer: Trainer) -> None:
    """Raise ValueError if the disk of a run's folder has no room for a checkpoint."""
    least = checkpoint_size(config, trainer.sizes)
    free = shutil.disk_usage(folder).free
    if free < least:
        raise ValueError(
            f"{folder} has {size(free)} of free space, but a checkpoint takes {size(least)}: the"
            " weights, and AdamW's two moments for them; free some space, or choose a folder on"
            " another disk with run.folder=…"
        )
