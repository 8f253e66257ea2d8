"""Runtimes, in which searchers run. `Searchers` is their interface to the train loop."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tba.config.tables import RuntimeTable
from tba.engines import RewardError, SearchError
from tba.learn import Trainer
from tba.search.prompts import PromptStream, SearchState
from tba.search.result import Evaluation, SearchStats
from tba.search.searcher import SearchSetup
from tba.search.verdicts import TRUNCATED
from tba.streams import Use, seed_of
from tba.types import Group
from tba.weights import Sent

WINDOW = 64
"""Samples that must have been scored before their rejections count."""
TRUNCATED_AT_MOST = 256
"""Samples in a row that may be rejected because they are cut off, before the run stops."""


@dataclass(frozen=True)
class SearchJob:
    """Everything that a runtime needs to search."""

    setup: SearchSetup
    stream: PromptStream
    tell: Callable[[str], None] = lambda phase: None
    """Told what the trainer waits for, again and again while it waits."""

    @property
    def settings(self) -> RuntimeTable:
        return self.setup.config.runtime

    def search_seed(self, number: int) -> int:
        """Return the seed of the search with this number."""
        return seed_of(self.setup.config.run.seed, Use.SEARCH, number)

    def seconds_for(self, groups: int) -> float:
        """Return the seconds in which the groups must arrive. The setting is for a batch."""
        trainer = self.setup.config.trainer
        return trainer.deadline * max(1.0, groups / trainer.groups)


class RejectionMonitor:
    """Stops the run when more than `max_share` of the last 64 or more samples were rejected.

    Samples that are rejected because they are cut off do not count, unless all are.
    """

    def __init__(self, max_share: float):
        self._max_share = max_share
        self._recent = deque[SearchStats]()
        self._truncated = 0

    def add(self, stats: SearchStats) -> None:
        """Add the statistics of one search; RewardError if too many samples were rejected."""
        self._count_truncated(stats)
        if not stats.scored:
            return
        self._recent.append(stats)
        total = sum(one.scored for one in self._recent)
        while total - self._recent[0].scored >= WINDOW:
            total -= self._recent.popleft().scored
        recent = SearchStats()
        for one in self._recent:
            recent.add(one)
        del recent.rejected[TRUNCATED.reason]
        rejected = recent.rejected.total()
        if total >= WINDOW and rejected > self._max_share * total:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in recent.rejected.items())
            raise RewardError(
                f"{rejected} of the last {total} samples were rejected ({reasons}), more than"
                f" reward.max_rejected = {self._max_share}; fix the scoring function. The last"
                f" error was:\n{recent.last_rejection}"
            )

    def _count_truncated(self, stats: SearchStats) -> None:
        """Count the samples in a row that were cut off; SearchError if nothing else is left."""
        cut_off = 0 < stats.generated == stats.rejected[TRUNCATED.reason]
        self._truncated = self._truncated + stats.generated if cut_off else 0
        if self._truncated >= TRUNCATED_AT_MOST:
            raise SearchError(
                f"the last {self._truncated} samples were all cut off by sampling.max_tokens, and"
                " rejected (sampling.truncated = reject), so that nothing is left to train on;"
                " raise sampling.max_tokens, or set sampling.truncated=keep"
            )


class Searchers(Protocol):
    """One searcher or many, in this process or elsewhere."""

    @property
    def stats(self) -> SearchStats:
        """Statistics of all groups that `gather` has returned."""

    def gather(self, at_least: int) -> list[Group]:
        """Return the groups found since the last call.

        Blocks only until there are `at_least` of them; TimeoutError past its deadline.
        """

    def publish(self, trainer: Trainer, version: int) -> None:
        """Send the trainer's weights to every searcher, without waiting for one.

        They are copied before this returns; the rest may happen in the background.
        """

    def reset_reference(self, sent: Sent) -> None:
        """Make these weights the reference of the searches that begin from now on.

        Outside of lockstep, searchers that are slow may get it later.
        """

    def evaluate(self, step: int) -> int:
        """Request an evaluation of the weights published last, and return their version at once.

        Its result names the `step` at which it is requested. Another one that has been requested
        and has not begun ends without scores.
        """

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        """Return the evaluations that ended since the last call; `finish` waits for all of them."""

    def state(self) -> SearchState:
        """Return what a checkpoint keeps."""

    def close(self) -> None:
        """End the search. It may be called twice."""
