"""Stored samples of a resumed run: keeps them, scores them again, or drops them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tba.models.tokenizer import Tokenizer
from tba.prompt import Answer
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import Progress, newest
from tba.runs.folder import CHECKPOINTS, Replay, read_config, read_digests
from tba.runs.generations import step_of
from tba.scoring.verdicts import Rejection, Verdict, settle_truncated
from tba.search.prompts import SearchState
from tba.search.result import SearchStats
from tba.search.searcher import SearchSetup
from tba.setup.checks import check_resumed, check_step
from tba.setup.setup import EVALUATED, PROMPTS, RunSetup
from tba.tasks._digests import changed
from tba.types import Group

AT_ONCE = 16
"""Number of groups that are scored at once."""
ALONE = "runtime.searchers = 0, so nothing is left to train on; start a new run"
"""Error message for an offline run that would have no samples left."""


def choose_resumed(setup: RunSetup, run: Path, replay: Replay) -> tuple[Path, str]:
    """Return the checkpoint to resume, and a note on what happens to its samples.

    The note is "" if they are kept. Raises ValueError if the run is past `run.steps`, or
    if a change makes the samples unusable.
    """
    check_resumed(setup.config, read_config(run))
    generation = newest(run / CHECKPOINTS)
    check_step(step_of(generation), setup.config)
    before = read_digests(run)
    changes = [name for name in changed(setup.digests, before) if name != EVALUATED]
    names = ", ".join(changes)
    lost = ""
    task = setup.task
    if PROMPTS & {*changes}:
        lost = "the stored samples are of other prompts, or of another model or tokenizer"
    elif task.tools or task.program or setup.config.task.use == "redteam":
        lost = "the environment, the program or the victim of the stored samples is gone"
    elif setup.objective.at(0).value_rollouts is not None:
        lost = "the stored samples have value estimates"
    if replay == "rescore" and lost:
        raise ValueError(f"--rescore: {lost}; use --drop-replay, which starts an empty buffer")
    if replay == "drop" and setup.config.runtime.searchers == 0:
        raise ValueError(ALONE)
    if replay == "keep" and names:
        again = '--rescore (from Python, replay="rescore") to score the stored samples again, or '
        raise ValueError(
            f"{names}: changed since the samples in the replay buffer were made; undo that, or add"
            f' {"" if lost else again}--drop-replay (replay="drop") to start with an empty buffer'
        )
    if replay == "keep":
        return generation, ""
    what = "scored again" if replay == "rescore" else "dropped"
    return generation, f"stored samples {what}" + f" after a change of {names}" * bool(names)


def renewed(
    setup: RunSetup, progress: Progress, search: SearchState, buffer: ReplayBuffer, replay: Replay,
    device: str, tell: Callable[[str], None],
) -> tuple[Progress, SearchState]:  # fmt: skip
    """Drop or rescore the stored samples if `replay` says so; return the updated states.

    If the buffer is empty or the run asynchronous, its first step waits for new samples. Raises
    ValueError if rescoring rejects too many samples.
    """
    c = setup.config
    delayed = search.delayed
    if replay == "drop":
        buffer.clear()
        delayed = ()
    elif replay == "rescore":
        delayed = rescore(buffer, delayed, setup.search_setup(), setup.text, device, tell)
    if c.runtime.searchers == 0 and not len(buffer):
        raise ValueError(ALONE)
    first = 0 if replay == "keep" or len(buffer) else c.first_fill
    new = c.trainer.groups + len(delayed) if c.asynchronous else 0  # no step on old data only
    progress = replace(progress, missing=max(progress.missing, first, new))
    return progress, replace(search, delayed=delayed)


def rescore(
    buffer: ReplayBuffer,
    delayed: Sequence[Group],
    setup: SearchSetup,
    text: Tokenizer,
    device: str,
    tell: Callable[[str], None],
) -> tuple[Group, ...]:
    """Score the buffer and the delayed groups again, as a search would; return the delayed ones.

    Rejected samples are dropped. Raises ValueError if their share exceeds `reward.max_rejected`.
    """
    total = SearchStats()
    scoring = setup.scoring(device)

    def score(groups: Sequence[Group]) -> list[list[float]]:
        """Return new rewards, NaN for rejected samples."""
        rewards: list[list[float]] = []
        samples = sum(len(g.trajectories) for g in groups)
        stats = SearchStats(Counter(samples_generated=samples))
        while len(rewards) < len(groups):
            tell(f"scoring stored groups again: {len(rewards)}/{len(groups)}")
            some = groups[len(rewards) :][:AT_ONCE]
            answers: list[list[Answer | Verdict]] = []
            for group in some:  # in the form that searches score
                own = [
                    text.answer(t.tokens, t.finished, setup.sampling.stop, t.version)
                    for t in group.trajectories
                ]
                answers.append(settle_truncated(own, setup.sampling.truncated))
            for verdicts in scoring([g.prompt for g in some], answers):
                stats.reject(verdicts)
                numbers = [math.nan if isinstance(v, Rejection) else float(v) for v in verdicts]
                rewards.append(numbers)
            rejected = stats.rejected.total()
            limit = setup.config.reward.max_rejected
            if rejected > limit * samples:
                raise ValueError(
                    f"--rescore: {rejected} of {samples} stored samples were rejected, more than"
                    f" reward.max_rejected = {limit}; the run is unchanged. The last error was:\n"
                    f"{stats.last_rejection}"
                )
        total.add(stats)
        return rewards

    try:
        scoring.wait_until_ready()
        buffer.rescore(score)
        kept = []
        for group, rewards in zip(delayed, score(delayed), strict=True):
            pairs = zip(group.trajectories, rewards, strict=True)
            rewarded = tuple(replace(t, reward=r) for t, r in pairs if not math.isnan(r))
            if rewarded:
                kept.append(replace(group, trajectories=rewarded))
    finally:
        scoring.close()
    reasons = ", ".join(f"{n} {reason}" for reason, n in total.rejected.items()) or "none"
    samples = total.counts["samples_generated"]
    tell(f"scored {samples:,} stored samples again; rejected: {reasons}")
    return tuple(kept)
