"""Choice of a checkpoint: the newest one, the one of a step, or the best one."""

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

from tba.replay.files import SEGMENTS
from tba.runs.checkpoint import newest
from tba.runs.generations import damage, generations, held, path_of, step_of
from tba.runs.log import CHECKPOINTS, read_evaluations

BEST = "best"


def score_of(scores: Mapping[str, float]) -> float:
    """Return the held-out score that decides: sampled pass@1, or the reward where there is none."""
    return scores["sampled_pass@1" if "sampled_pass@1" in scores else "sampled_reward"]


def read_scores(run: Path) -> dict[int, float]:
    """Return the score of each evaluation of a run, by the step that it evaluated."""
    return {int(scores["step"]): score_of(scores) for scores in read_evaluations(run)}


def best_step(scores: Mapping[int, float], kept: Container[int] = ()) -> int | None:
    """Return the step with the highest score; None if there is none.

    Of equal ones, it is the first whose checkpoint was `kept`, or else the first. Step 0 is the
    model that training begins with, which has no checkpoint.
    """
    steps = sorted(scores.keys() - {0})
    return max(steps, key=lambda step: (scores[step], step in kept), default=None)


def without_better(scores: Mapping[int, float], since: int = 0) -> int:
    """Return how many evaluations after step `since` came after the best one."""
    best = max(sorted(scores), key=scores.__getitem__, default=0)
    return sum(step > max(best, since) for step in scores)


def kept_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return [step_of(generation) for generation in generations(run / CHECKPOINTS)]


def kept_beside(run: Path, scores: Mapping[int, float], evaluating: Set[int]) -> set[Path]:
    """Return what `checkpoint.keep_best` keeps: the best one, and those being evaluated."""
    steps = {best_step(scores, kept_steps(run)), *(evaluating - scores.keys())}
    return {path_of(run / CHECKPOINTS, step) for step in steps if step}


@contextmanager
def chosen(run: Path, step: int | str | None = None) -> Iterator[Path]:
    """Choose a checkpoint, which a run that is training does not remove meanwhile."""
    with held(run / CHECKPOINTS) as complete:
        yield choose(run, step, complete)


def choose(
    run: Path, step: int | str | None = None, complete: Sequence[Path] | None = None
) -> Path:
    """Return the checkpoint of a `step`, the "best" one, or by default the newest undamaged one.

    Damaged segments of the replay buffer are accepted. ValueError if there is no such checkpoint,
    or if it is damaged.
    """
    if step is None:
        return newest(run / CHECKPOINTS, True, complete)
    kept = kept_steps(run) if complete is None else [step_of(each) for each in complete]
    there = f"the checkpoints in {run} are those of steps {', '.join(map(str, kept)) or '(none)'}"
    number = best_step(read_scores(run), kept) if step == BEST else _number(step)
    if number is None:
        raise ValueError(f"--step best: no checkpoint has been evaluated; give --step N: {there}")
    if number not in kept:
        scored = f"step {number} has the best score, but its checkpoint was not kept"
        what = f"{scored}; set checkpoint.keep_best=true" if step == BEST else "no such checkpoint"
        raise ValueError(f"--step {step}: {what}; {there}")
    chosen = path_of(run / CHECKPOINTS, number)
    problems = {n: p for n, p in damage(chosen).items() if not n.startswith(SEGMENTS)}
    if problems:
        name, problem = min(problems.items())
        raise ValueError(f"--step {step}: {chosen} is damaged: {name} {problem}; {there}")
    return chosen


def _number(step: int | str) -> int:
    if not str(step).isdecimal():
        raise ValueError(f"--step {step}: give the number of a step, or best")
    return int(step)
