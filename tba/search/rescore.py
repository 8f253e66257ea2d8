"""Scoring of stored groups again, after what decides rewards has changed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tba.models.pretrained import Tokenizer
from tba.replay.buffer import ReplayBuffer
from tba.search.result import Rejected, SearchStats
from tba.search.searcher import SearchSetup
from tba.search.verdicts import judged_before
from tba.types import Group

AT_ONCE = 16
"""Groups that are given to what scores at one time."""


def rescore(
    buffer: ReplayBuffer, held: Sequence[Group], setup: SearchSetup, text: Tokenizer, device: str,
    tell: Callable[[str], None],
) -> tuple[Group, ...]:  # fmt: skip
    """Give new rewards to the buffer and to groups that are held, as a search would; return these.

    Rejected samples are dropped. ValueError if more than `reward.max_rejected` of all are.
    """
    text, stop = replace(text, steps=setup.steps), setup.sampling.stop
    total, guard = SearchStats(), setup.guard(device)

    def score(groups: Sequence[Group]) -> list[list[float]]:
        rewards: list[list[float]] = []
        stats = SearchStats()
        count = sum(len(g.trajectories) for g in groups)
        while len(rewards) < len(groups):
            tell(f"scoring stored groups again: {len(rewards)}/{len(groups)}")
            some, answers = groups[len(rewards) :][:AT_ONCE], []
            for g in some:
                own = [text.answer(t.tokens, t.finished, stop, t.version) for t in g.trajectories]
                answers.append(judged_before(own, setup.sampling.truncated))
            for verdicts in guard([g.prompt for g in some], answers):
                stats.samples += len(verdicts)
                stats.reject(verdicts)
                plain = [math.nan if isinstance(v, Rejected) else float(v) for v in verdicts]
                rewards.append(plain)
            if stats.rejected.total() > setup.reward.max_rejected * count:
                raise ValueError(
                    f"--rescore: {stats.rejected.total()} of {count} stored samples were rejected,"
                    f" more than reward.max_rejected = {setup.reward.max_rejected}; the run is as"
                    f" it was. The last error was:\n{stats.last_rejection}"
                )
        total.add(stats)
        return rewards

    try:
        guard.wait_until_ready()
        buffer.rescore(score)
        kept = []
        for group, rewards in zip(held, score(held), strict=True):
            pairs = zip(group.trajectories, rewards, strict=True)
            own = tuple(replace(t, reward=r) for t, r in pairs if not math.isnan(r))
            kept += [replace(group, trajectories=own)] if own else []
    finally:
        guard.close()
    rejected = ", ".join(f"{n} {reason}" for reason, n in total.rejected.items()) or "none"
    tell(f"scored {total.samples:,} stored samples again; rejected: {rejected}")
    return tuple(kept)
