"""One searcher process: the calls to it that have not returned, and when these are late."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Literal

import ray

from tba.runtime.actor import SearcherActor
from tba.runtime.placement import Place
from tba.search.searcher import SearchSetup
from tba.types import Prompt
from tba.weights import Sent, Transport

SEARCH, CONTROL = "search", "control"
"""Groups of a searcher's threads: one for its work, one that is free for everything else.

Calls of a group begin in the order in which they are made.
"""

Kind = Literal["start", "search", "evaluate", "publish"]


@dataclass(eq=False)
class Task:
    """Call to a searcher that has not returned."""

    kind: Kind
    ref: Any
    """Ray's reference to the result."""
    prompts: tuple[Prompt, ...] = ()
    weights: Sent | None = None
    """Weights to evaluate."""
    published: float = 0.0
    """Time at which the weights of a publication were published."""
    reference: Sent | None = None
    """Reference that a search needs."""
    began: float | None = None
    """Time at which the searcher could begin it; its deadline counts from there."""


@dataclass(eq=False)
class Handle:
    """Searcher process as the collector sees it."""

    place: Place
    actor: Any
    version: int
    """Version of the newest weights that it was sent."""
    tasks: list[Task]
    """Calls that have not returned, in the order in which it begins them."""
    after_gap: bool = False
    """Whether it replaces a searcher that failed the check of a weight update, and still starts."""

    def work(self) -> list[Task]:
        """Return all tasks but a publication, which arrives beside them."""
        return [task for task in self.tasks if task.kind != "publish"]

    def has(self, *kinds: Kind) -> bool:
        return any(task.kind in kinds for task in self.tasks)

    def accepts_weights(self) -> bool:
        """Return whether weights can be sent now.

        Of two publications on their way, each would keep a copy of the weights alive. An evaluation
        is of the weights that were newest when it was requested, so that newer ones wait for it.
        """
        return not self.has("publish", "start", "evaluate")

    def begin(self, concurrent: int) -> None:
        """Begin the deadlines of the tasks that the searcher can work on by now.

        A start and an evaluation run alone; searches wait for those with an older reference.
        """
        work = self.work()
        alike = takewhile(lambda t: t.kind == "search" and t.reference == work[0].reference, work)
        running = list(islice(alike, concurrent)) or work[:1]
        for task in self.tasks:
            if task.began is None and (task.kind == "publish" or task in running):
                task.began = time.monotonic()

    def search(
        self, prompts: list[Prompt], seed: int, weights: Sent | None, reference: Sent | None
    ) -> None:
        call = self.actor.search.options(concurrency_group=SEARCH)
        ref = call.remote(prompts, seed, weights, reference)
        self.tasks.append(Task("search", ref, tuple(prompts), reference=reference))

    def evaluate(self, weights: Sent | None, reference: Sent | None) -> None:
        call = self.actor.evaluate.options(concurrency_group=SEARCH)
        ref = call.remote(weights, reference)
        self.tasks.append(Task("evaluate", ref, weights=weights))

    def publish(self, weights: Sent, published: float) -> None:
        self.version = weights.version
        call = self.actor.publish.options(concurrency_group=CONTROL)
        self.tasks.append(Task("publish", call.remote(weights), published=published))

    def late(self, deadlines: Mapping[Kind, float]) -> str | None:
        """Return which deadline the searcher has missed, if any."""
        for task in self.tasks:
            limit = deadlines[task.kind]
            if task.began is not None and time.monotonic() - task.began > limit:
                return f"did not finish `{task.kind}` in {limit:g} s"
        return None


@dataclass(frozen=True)
class Starter:
    """Settings from which every searcher process is started."""

    setup: SearchSetup
    bf16: bool
    gpus: float
    """GPUs that a searcher requests of Ray."""
    concurrent: int
    """Searches that it runs at once."""
    transport: Transport

    def start(self, place: Place, newest: Sent | None) -> Handle:
        """Start a searcher with these weights, or with the initial ones."""
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": self.gpus,
            "max_restarts": 0,
            "concurrency_groups": {SEARCH: self.concurrent, CONTROL: 2},
        }
        start: Any = ray.remote(**options)(SearcherActor)
        actor = start.remote(self.setup, place, self.bf16, sys.path, self.transport, newest)
        pid = actor.pid.options(concurrency_group=CONTROL)
        version = 0 if newest is None else newest.version
        return Handle(place, actor, version, [Task("start", pid.remote())])
