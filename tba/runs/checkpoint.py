"""Checkpoints: everything that a run needs to continue where it stopped.

A generation is a folder `step-00000100`; docs/architecture.md lists its files. It is written aside
and renamed when it is complete. Safetensors and JSON only, no pickles.
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

from tba.config.errors import size
from tba.config.schema import Config, read_json
from tba.learn import Trainer, TrainerLost, TrainerSizes
from tba.learn.optimizer import MOMENTS
from tba.learn.state import MODEL
from tba.models.pretrained import Tokenizer
from tba.replay.buffer import ReplayBuffer
from tba.replay.store import load_groups, save_groups
from tba.runs.generations import (
    MANIFEST,
    damage,
    files_of,
    generations,
    held,
    path_of,
    put,
    remove,
    saved,
    sha256_of,
    step_of,
)
from tba.runs.log import CHECKPOINTS, own_folder, read_evaluations
from tba.search.prompts import Cursor, SearchState
from tba.search.result import SearchStats
from tba.weights import read_weights, write_weights

STATE = "state.json"
HELD = "held.jsonl"
SEARCH_WEIGHTS = "search_weights.safetensors"
REFERENCE = "reference.safetensors"
BEST = "best"

FORMAT = 9  # version of a generation's files; another version is not resumed

GRACE = 1.0
"""Seconds that a save has at least, once it is waited for."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Position of a run (see `Run`), and what it needs to continue from there."""

    step: int
    missing: int
    evaluating: int
    rng: Mapping[str, Any]
    counts: Mapping[str, float]  # totals of the summary
    pace: Sequence[Sequence[int]] = ((0, 0),)  # marks of `Pace`


def beginning(
    first_fill: int, rng: np.random.Generator, cursor: Cursor
) -> tuple[Progress, SearchState]:
    """Return the states of a new run."""
    progress = Progress(0, first_fill, 1, rng.bit_generator.state, {})
    return progress, SearchState(cursor, 0, SearchStats(), None, None)


class Checkpoints:
    """Writer of a run's checkpoints: in the background, one at a time.

    Used as a context, it waits at the end for a save that is being written, except after a
    KeyboardInterrupt. An unfinished save leaves the generations before it as they are. `deadline`
    is the most seconds that a save may take.
    """

    def __init__(self, folder: Path, keep: int, deadline: float):
        self._folder = folder
        self._keep = keep
        self._deadline = deadline
        self._step: int | None = None
        self._until = math.inf
        self._thread: threading.Thread | None = None  # writes step `_step`, sets the two below
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

        A save that is still being written is waited for first. A step is saved once. Generations
        `beside` the newest ones are kept, too.
        """
        if progress.step == self._step:
            return
        started = time.perf_counter()
        self.wait()
        target = path_of(self._folder, progress.step)
        aside = self._folder / f".{target.name}"
        name = f"checkpoint of step {progress.step}"
        own_folder(self._folder).mkdir(exist_ok=True)  # without parents: a run may be moved away
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
                if not os.path.samestat(made, aside.stat()):  # `save_pretrained` makes parents
                    raise FileNotFoundError(f"{self._folder} was moved or removed meanwhile")
                _commit(aside, target)
                _prune(target, self._keep, beside)
                self._seconds["checkpoint/seconds"] += time.perf_counter() - copied
                self._seconds["checkpoint/blocked"] += copied - started
            except BaseException as error:  # raised in the train loop by `wait`
                self._error = error

        self._step = progress.step
        self._until = time.monotonic() + self._deadline
        # a daemon, so that an interrupted process does not wait for it
        self._thread = threading.Thread(target=write, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current save. RuntimeError if it failed, TimeoutError if it is late.

        TrainerLost if a rank that writes has died.
        """
        if self._thread is None:
            return
        problem = f"the checkpoint of step {self._step} was not written"
        # if this process has been stopped, the thread has had no time either
        self._thread.join(max(GRACE, self._until - time.monotonic()))
        if self._thread.is_alive():
            limit = f"trainer.deadline = {self._deadline:g} s"
            raise TimeoutError(f"{problem} within {limit}; raise it, or see why the disk is slow")
        error = self._error
        self._thread = None
        self._error = None
        if error is not None:
            kind = TrainerLost if isinstance(error, TrainerLost) else RuntimeError
            raise kind(f"{problem}: {error}") from error

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the saves that have ended since the last call.

        `checkpoint/seconds` is the time of writing, `checkpoint/blocked` the time that the train
        loop waited. RuntimeError if a save failed, TimeoutError if one takes too long.
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
            except (RuntimeError, TimeoutError) as error:  # the run's own error is raised
                log.error("%s", error)


def _write_search(folder: Path, search: SearchState, progress: Progress) -> None:
    for weights, name in ((search.weights, SEARCH_WEIGHTS), (search.reference, REFERENCE)):
        if weights is not None:
            write_weights(weights, folder / name)
    save_groups(list(search.held), folder / HELD)
    state = {"format": FORMAT, "progress": asdict(progress), "cursor": search.cursor}
    state |= {"tasks": search.tasks, "stats": search.stats.to_json()}
    (folder / STATE).write_text(json.dumps(state), "utf-8")


def _commit(aside: Path, target: Path) -> None:
    """Add a manifest, flush to disk and rename."""
    digests = {name: sha256_of(path) for name, path in files_of(aside).items()}
    (aside / MANIFEST).write_text(json.dumps(digests, indent=1), "utf-8")
    for path in [*aside.rglob("*"), aside]:
        _sync(path)
    put(aside, target)
    _sync(target.parent)


def _prune(newest: Path, keep: int, beside: Set[Path]) -> None:
    """Keep `newest`, the keep - 1 before it, and `beside`; a resumed run abandons later ones."""
    folder = newest.parent
    complete = [g for g in generations(folder) if step_of(g) <= step_of(newest)]
    for path in saved(folder) - {*complete[-keep:], *beside}:
        remove(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def newest(folder: Path, complete: Sequence[Path] | None = None) -> Path:
    """Return the newest undamaged generation."""
    complete = generations(folder) if complete is None else complete
    if not complete:
        named = quote(str(folder.parent))
        raise ValueError(
            f"no complete checkpoint in {folder}: nothing to resume; to start the run again, remove"
            f" its folder (`rm -r {named}`) and type `tba train CONFIG.toml`. A study keeps"
            " checkpoints with study.keep_checkpoints=true"
        )
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
    """Return the held-out score that decides: sampled pass@1, or the reward where there is none.

    It is rounded to nine digits. An evaluation in which no answer could be scored is never better
    than another.
    """
    if scores.get("sampled_rejected") == 1:
        return -math.inf
    name = "sampled_pass@1" if "sampled_pass@1" in scores else "sampled_reward"
    return float(f"{scores[name]:.9g}")


def read_scores(run: Path) -> dict[int, float]:
    """Return the score of each evaluation of a run, by the step that it evaluated."""
    return {int(scores["step"]): score_of(scores) for scores in read_evaluations(run)}


def best_step(scores: Mapping[int, float], kept: Container[int] = ()) -> int | None:
    """Return the step with the highest score; None if there is none.

    Of equal scores, the first whose checkpoint was `kept` counts, or else the first. Step 0 is the
    model that training begins with, which has no checkpoint.
    """
    steps = sorted(scores.keys() - {0})
    return max(steps, key=lambda step: (scores[step], step in kept), default=None)


def without_better(scores: Mapping[int, float], since: int) -> int:
    """Return how many evaluations after step `since` came after the best one."""
    best = max(sorted(scores), key=scores.__getitem__, default=0)
    return sum(step > max(best, since) for step in scores)


def kept_beside(run: Path, scores: Mapping[int, float], evaluating: Set[int]) -> set[Path]:
    """Return what `checkpoint.keep_best` keeps: the best one, and those being evaluated."""
    folder = run / CHECKPOINTS
    kept = [step_of(generation) for generation in generations(folder)]
    steps = {best_step(scores, kept), *(evaluating - scores.keys())}
    return {path_of(folder, step) for step in steps if step}


@contextmanager
def chosen(run: Path, step: int | str | None = None) -> Iterator[Path]:
    """Choose a checkpoint, which a run that is training does not remove meanwhile."""
    with held(run / CHECKPOINTS) as complete:
        yield choose(run, step, complete)


def choose(
    run: Path, step: int | str | None = None, complete: Sequence[Path] | None = None
) -> Path:
    """Return the checkpoint of a `step`, the "best" one, or by default the newest undamaged one.

    ValueError if there is no such checkpoint, or if it is damaged.
    """
    folder = run / CHECKPOINTS
    if step is None:
        return newest(folder, complete)
    by_step = {step_of(g): g for g in (generations(folder) if complete is None else complete)}
    there = (
        f"the checkpoints in {run} are those of steps {', '.join(map(str, by_step)) or '(none)'}"
    )
    number = int(step) if str(step).isdecimal() else None
    if step == BEST:
        number = best_step(read_scores(run), by_step)
    if number is None or number not in by_step:
        advice = "give the number of a step, or best with checkpoint.keep_best=true"
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
    """Put trainer and buffer back from an undamaged generation; return the other states."""
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
        held=load_groups(generation / HELD),
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
            " weights, and AdamW's two moments of them; free some, or choose a folder on another"
            " disk with run.folder=…"
        )


def checkpoint_size(config: Config, sizes: TrainerSizes) -> int:
    """Return the bytes of a checkpoint without the replay buffer."""
    weights = 4 * sizes.trained  # in bf16, half of it is beside the moments
    searcher = sizes.published_bytes if config.runtime.use == "local" else 0
    reference = weights if config.policy.reset_reference_every else 0
    moments = round(MOMENTS[config.trainer.optimizer] * sizes.trained)
    return weights + moments + searcher + reference
