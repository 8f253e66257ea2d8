"""Runtimes, which run the searchers. `Searchers` is their interface to the train loop."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tba.errors import NoAnswerError, RewardError, SearchError, StepError, TrainerLost
from tba.learn import Trainer
from tba.scoring.verdicts import Reason
from tba.search.prompts import PromptStream, SearchState
from tba.search.result import Evaluation, SearchStats
from tba.search.searcher import SearchSetup
from tba.stop import Stop
from tba.streams import Use, seed_of
from tba.types import Group
from tba.weights import Publication

WINDOW = 64
"""Minimum number of scored samples before rejections count."""
TRUNCATED_AT_MOST = 256
"""The run stops after this many consecutive samples that are rejected as truncated."""


@dataclass(frozen=True)
class SearchJob:
    """Everything that a runtime needs to search."""

    setup: SearchSetup
    stream: PromptStream
    tell: Callable[[str], None] = lambda phase: None
    """Called repeatedly, while the trainer waits, with a description of what it waits for."""
    stop: Stop = field(default_factory=Stop)
    """Once it is requested, nothing waits any longer."""

    def search_seed(self, number: int) -> int:
        """Return the seed of the search with this number."""
        return seed_of(self.setup.config.run.seed, Use.SEARCH, number)

    def seconds_for(self, groups: int) -> float:
        """Return the deadline in seconds for these groups; the setting is per batch."""
        trainer = self.setup.config.trainer
        return trainer.deadline * max(1.0, groups * trainer.group_size / trainer.batch_size)


class RejectionMonitor:
    """Stops the run when more than `max_share` of the last 64 or more samples were rejected.

    Samples that are rejected as truncated do not count, unless all of them are.
    """

    def __init__(self, max_share: float):
        self._max_share = max_share
        self._recent = deque[SearchStats]()
        self._truncated = 0

    def add(self, stats: SearchStats) -> None:
        """Add the statistics of one search; SearchError if too many samples were rejected."""
        cut_off = 0 < stats.generated == stats.rejected[Reason.TRUNCATED]
        self._truncated = self._truncated + stats.generated if cut_off else 0
        if self._truncated >= TRUNCATED_AT_MOST:
            raise SearchError(
                f"the last {self._truncated} samples were all cut off by sampling.max_tokens, and"
                " rejected (sampling.truncated = reject), so nothing is left to train on;"
                " raise sampling.max_tokens, or set sampling.truncated=keep"
            )
        if not stats.scored:
            return
        self._recent.append(stats)
        total = sum(one.scored for one in self._recent)
        while total - self._recent[0].scored >= WINDOW:
            total -= self._recent.popleft().scored
        recent = SearchStats()
        for one in self._recent:
            recent.add(one)
        del recent.rejected[Reason.TRUNCATED]
        rejected = recent.rejected.total()
        if total >= WINDOW and rejected > self._max_share * total:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in recent.rejected.items())
            raise RewardError(
                f"{rejected} of the last {total} samples were rejected ({reasons}), more than"
                f" reward.max_rejected = {self._max_share}; fix the scoring function. The last"
                f" error was:\n{recent.last_rejection}"
            )


class Searchers(Protocol):
    """One searcher or many, in this process or elsewhere."""

    @property
    def stats(self) -> SearchStats:
        """Statistics of all groups that `gather` has returned."""

    def gather(self, at_least: int) -> list[Group]:
        """Return the groups found since the last call.

        Blocks only until there are `at_least` of them; TimeoutError after its deadline.
        """

    def publish(self, trainer: Trainer, version: int) -> None:
        """Make the trainer's weights the searchers' newest; slow searchers may skip versions.

        They are copied before this returns; the rest may happen in the background.
        """

    def reset_reference(self, sent: Publication) -> None:
        """Make these weights the reference of all searches that start from now on.

        Except in lockstep, slow searchers may get it later.
        """

    def evaluate(self, step: int) -> int:
        """Request an evaluation of the last published weights, and return their version at once.

        Its result names the `step` at which it was requested. An earlier request whose evaluation
        has not started ends without scores.
        """

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        """Return evaluations that ended since the last call; `finish` waits for all open ones."""

    def state(self) -> SearchState:
        """Return the state for a checkpoint."""

    def close(self) -> None:
        """End the search. May be called twice."""


@contextmanager
def search_errors(problem: str) -> Iterator[None]:
    """Raise errors of searchers as SearchError, prefixed with `problem`: the run is then saved.

    Whatever has happened to searchers, the trainer is intact.
    """
    try:
        yield
    except (SearchError, NoAnswerError, StepError, TrainerLost):
        raise
    except Exception as error:
        raise SearchError(f"{problem} ({type(error).__name__}): {error}") from error
