"""The replay buffer of a run that is resumed: it is kept, dropped, or scored again."""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tba.models.pretrained import Tokenizer
from tba.prompt import Answer
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import STATE, Progress, newest
from tba.runs.checks import check_resumed, config_of
from tba.runs.console import Console
from tba.runs.log import CHECKPOINTS, Replay
from tba.runs.setup import RunSetup
from tba.runs.stop import Stop
from tba.runtime import SearchState
from tba.search.result import SearchStats
from tba.search.scoring import Scoring
from tba.search.searcher import SearchSetup
from tba.search.verdicts import Rejected, Verdict, settle_truncated
from tba.tasks._source import RewardSource
from tba.types import Group

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Groups whose answers are scored at one time."""


@dataclass(frozen=True)
class Stored:
    """The checkpoint that a run goes on from, and what becomes of the samples in it."""

    generation: Path
    replay: Replay
    changed: list[str]
    """What decides rewards, and has changed since those of the samples were computed."""

    @property
    def note(self) -> str:
        """What has become of the samples, in words; empty if they are kept."""
        if self.replay == "keep":
            return ""
        what = "scored again" if self.replay == "rescore" else "dropped"
        after = f" after a change of {', '.join(self.changed)}" if self.changed else ""
        return f"stored samples {what}{after}"

    def renew(
        self, progress: Progress, search: SearchState, buffer: ReplayBuffer, parts: RunSetup,
        device: str, console: Console, stop: Stop,
    ) -> tuple[Progress, SearchState]:  # fmt: skip
        """Drop the samples or score them again; return the states with what that changes in them.

        ValueError, before a file is changed, if that does not succeed.
        """

        def tell(text: str) -> None:
            if stop.requested:
                raise ValueError("--rescore was interrupted; the run is as it was")
            console.phase(text)

        console.note(f"resumed from {self.generation.name}")
        held = search.held
        c = parts.config
        first = 0
        if self.replay == "drop":
            buffer.clear()
            held = ()
        elif self.replay == "rescore":
            held = rescore(buffer, held, parts.search_setup(), parts.text, device, tell)
        if self.replay != "keep" and not len(buffer):
            first = c.first_fill
        new = c.trainer.groups + len(held) if c.asynchronous else 0  # no step on old data
        progress = replace(progress, missing=max(progress.missing, first, new))
        return progress, replace(search, held=held)


def choose_stored(parts: RunSetup, run: Path, replay: Replay) -> Stored:
    """Choose the checkpoint to resume; ValueError for a change that its samples do not allow."""
    check_resumed(parts.config, config_of(run))
    generation = newest(run / CHECKPOINTS)
    before = json.loads((generation / STATE).read_text("utf-8"))["progress"].get("rewards")
    if before is None:
        told = "%s does not say what has decided its rewards: a change of that is not noticed"
        log.warning(told, generation)
    changed = [] if before is None else parts.rewards.changed(RewardSource(**before))
    lost = ""
    if parts.task.tools is not None or parts.config.task.use == "redteam":
        lost = "the environment or the victim of the stored samples is gone"
    elif parts.objective.at(0).value_rollouts is not None:
        lost = "the stored samples have value estimates"
    if replay == "rescore" and lost:
        raise ValueError(f"--rescore: {lost}; use --drop-replay, which starts an empty buffer")
    if changed and replay == "keep":
        again = "" if lost else "--rescore to score the stored samples again, or "
        raise ValueError(
            f"{', '.join(changed)}: changed since the rewards in the replay buffer were computed;"
            f" undo that, or add {again}--drop-replay to start with an empty buffer"
        )
    return Stored(generation, replay, changed)


def rescore(
    buffer: ReplayBuffer,
    held: Sequence[Group],
    setup: SearchSetup,
    text: Tokenizer,
    device: str,
    tell: Callable[[str], None],
) -> tuple[Group, ...]:
    """Give new rewards to the buffer and to groups that are held, as a search would; return these.

    Rejected samples are dropped. ValueError if more than `reward.max_rejected` of all are.
    """
    total = SearchStats()
    scoring = setup.scoring(device)

    def score(groups: Sequence[Group]) -> list[list[float]]:
        rewards, stats = _rewards(groups, setup, text, scoring, tell)
        total.add(stats)
        return rewards

    try:
        scoring.wait_until_ready()
        buffer.rescore(score)
        kept = []
        for group, rewards in zip(held, score(held), strict=True):
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


def _rewards(
    groups: Sequence[Group],
    setup: SearchSetup,
    text: Tokenizer,
    scoring: Scoring,
    tell: Callable[[str], None],
) -> tuple[list[list[float]], SearchStats]:
    """Return new rewards of stored groups, NaN where a sample is rejected, and what is counted."""
    rewards: list[list[float]] = []
    samples = sum(len(g.trajectories) for g in groups)
    stats = SearchStats(Counter(samples_generated=samples))
    while len(rewards) < len(groups):
        tell(f"scoring stored groups again: {len(rewards)}/{len(groups)}")
        some = groups[len(rewards) :][:AT_ONCE]
        answers = [_answers(group, setup, text) for group in some]
        for verdicts in scoring([g.prompt for g in some], answers):
            stats.reject(verdicts)
            rewards.append([math.nan if isinstance(v, Rejected) else float(v) for v in verdicts])
        rejected = stats.rejected.total()
        if rejected > setup.reward.max_rejected * samples:
            raise ValueError(
                f"--rescore: {rejected} of {samples} stored samples were rejected,"
                f" more than reward.max_rejected = {setup.reward.max_rejected}; the run is as"
                f" it was. The last error was:\n{stats.last_rejection}"
            )
    return rewards, stats


def _answers(group: Group, setup: SearchSetup, text: Tokenizer) -> list[Answer | Verdict]:
    """Return the answers of a stored group as a search would score them."""
    answers = []
    for t in group.trajectories:
        answers.append(text.answer(t.tokens, t.finished, setup.sampling.stop, t.version))
    return settle_truncated(answers, setup.sampling.truncated)
