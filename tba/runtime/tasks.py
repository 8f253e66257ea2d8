"""Calls to searchers that have not returned, and when their deadlines begin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, Literal

from tba.runtime.placement import Place
from tba.types import Prompt
from tba.weights import Sent

SEARCH, CONTROL = "search", "control"
"""Threads of a searcher: those for searches and evaluations, and those for everything else."""

Kind = Literal["start", "search", "evaluate", "publish"]


@dataclass(eq=False)
class Task:
    """Call to a searcher that has not returned."""

    kind: Kind
    ref: Any
    """Ray's reference to the result."""
    prompts: tuple[Prompt, ...] = ()
    """Prompts of a search."""
    weights: Sent | None = None
    """Weights to evaluate."""
    reference: int = 0
    """Version of the reference that a search needs."""
    began: float | None = None
    """Time at which the searcher could begin it; its deadline counts from there."""


@dataclass(eq=False)
class Handle:
    """Searcher process as the collector sees it."""

    place: Place
    actor: Any
    version: int
    """Newest version of the weights that it was sent."""
    tasks: list[Task] = field(default_factory=list)
    """Its start, searches and evaluations, in the order in which it begins them."""
    publication: Task | None = None
    """Weights on their way to it. There are never two, or each would keep a copy alive."""

    def outstanding(self) -> Iterator[Task]:
        """Yield every call that has not returned."""
        yield from self.tasks
        if self.publication is not None:
            yield self.publication

    def done(self, task: Task) -> None:
        """Forget a call that has returned."""
        if task is self.publication:
            self.publication = None
        else:
            self.tasks.remove(task)

    def accepts_weights(self) -> bool:
        """Return whether weights can be sent now.

        An evaluation is of the weights that were newest when it was requested, so that newer ones
        wait for it.
        """
        fixed = any(task.kind in ("start", "evaluate") for task in self.tasks)
        return self.publication is None and not fixed

    def accepts_evaluation(self) -> bool:
        """Return whether it has no evaluation yet."""
        return not any(task.kind == "evaluate" for task in self.tasks)

    def begin(self, concurrent: int) -> None:
        """Begin the deadlines of the tasks that the searcher can work on by now."""
        for task in self._startable(concurrent):
            if task.began is None:
                task.began = time.monotonic()

    def _startable(self, concurrent: int) -> Iterator[Task]:
        """Yield the publication, and the first task or the searches that run side by side.

        A start and an evaluation run alone; searches wait for those with an older reference.
        """
        if self.publication is not None:
            yield self.publication
        if self.tasks:
            first = self.tasks[0]
            alike = takewhile(
                lambda t: t.kind == "search" and t.reference == first.reference, self.tasks
            )
            yield from islice(alike, concurrent) if first.kind == "search" else [first]
