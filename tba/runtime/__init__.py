"""Runtimes, in which searchers run. `Searchers` is their interface to the train loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tba.config.runtime import RuntimeTable
from tba.learn import Trainer
from tba.search.prompts import PromptStream, SearchState
from tba.search.result import Evaluation, SearchStats
from tba.search.searcher import SearchSetup
from tba.streams import Use, seed_of
from tba.types import Group
from tba.weights import Sent


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

    def gather_deadline(self, groups: int) -> float:
        """Return the seconds in which the groups must arrive. The setting is for a batch."""
        batches = groups / self.setup.config.trainer.groups
        return self.settings.gather_deadline * max(1.0, batches)


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
