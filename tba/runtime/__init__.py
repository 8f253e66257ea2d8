"""Where searchers run. `Searchers` is everything that the train loop knows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from tba.config.tables import RuntimeTable
from tba.search.prompts import Cursor, PromptStream
from tba.search.result import Evaluation, SearchStats
from tba.search.setup import SearchSetup
from tba.types import Group
from tba.weights import Weights


@dataclass(frozen=True)
class SearchState:
    """What a checkpoint needs of the searchers: the prompt cursor, the next task's number, and the weights they
    search with where those decide what comes next (local); None where searchers go on with the newest (ray).

    `reference` are the weights of the reference if it has been reset.
    """

    cursor: Cursor
    tasks: int
    stats: SearchStats
    weights: Weights | None
    reference: Weights | None
    held: tuple[Group, ...] = ()
    """Groups on their way to the buffer, with a constant lag."""


@dataclass(frozen=True)
class SearchJob:
    """What a runtime searches, and with which settings."""

    setup: SearchSetup
    stream: PromptStream
    settings: RuntimeTable
    batch_groups: int
    """Groups in a batch; `gather_deadline` is for so many."""
    seed: int


@runtime_checkable
class Searchers(Protocol):
    """Everything that searches."""

    @property
    def stats(self) -> SearchStats: ...

    def gather(self, at_least: int) -> list[Group]:
        """Groups found since the last call; blocks only until there are `at_least` so many, and never past its deadline."""

    def publish(self, weights: Weights) -> None:
        """Hands out newer weights. Waits for nobody."""

    def reset_reference(self, weights: Weights) -> None:
        """What is searched from now on has these weights for its reference. Waits for nobody."""

    def evaluate(self) -> None:
        """Asks for an evaluation of the weights last published. Waits for nobody."""

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        """Those that have ended since the last call; with `finish`, waits for all that were asked for."""

    def state(self) -> SearchState: ...

    def close(self) -> None:
        """Ends every process, idempotently."""


def task_seed(seed: int, task: int) -> int:
    """The random seed of a search task: the same for the same run seed and task number, wherever it runs."""
    return int(np.random.SeedSequence([seed, task]).generate_state(1, np.uint64)[0] >> 1)
