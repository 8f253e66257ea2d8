"""One searcher process: the calls to it that have not returned, and their deadlines."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf
from typing import Any, Literal

import ray

from tba.config.tables import RuntimeTable
from tba.runtime import SearchJob
from tba.runtime.placement import Place
from tba.search.evaluate import EvaluatedPiece
from tba.types import Prompt
from tba.weights import Sent, Transport

SEARCH, CONTROL = "search", "control"
"""Groups of a searcher's threads, for its work and for all else; each begins calls in order."""

PUBLICATIONS = 100
"""Most publications a second to all searchers together: each takes the trainer's process time."""

Kind = Literal["start", "search", "evaluate", "publish"]


def deadlines(settings: RuntimeTable) -> dict[Kind, float]:
    """Return the seconds that each kind of call may take."""
    task = settings.task_deadline
    return {
        "start": settings.start_deadline,
        "search": task,
        "evaluate": task,
        "publish": 3 * task,  # it may be behind a piece of an evaluation that waits for a search
    }


@dataclass(frozen=True)
class Piece:
    """Piece of an evaluation of these weights; any searcher can do it."""

    number: int
    weights: Sent
    results: dict[int, EvaluatedPiece]  # by number, of all pieces of the evaluation


@dataclass(eq=False)
class Task:
    """Call to a searcher that has not returned."""

    kind: Kind
    ref: Any  # Ray's reference to the result
    prompts: tuple[Prompt, ...] = ()
    piece: Piece | None = None
    version: int = 0  # version of the weights that go with it
    published: float = 0.0  # time at which the weights of a publication were published
    reference: Sent | None = None  # reference that it needs
    began: float | None = None  # time at which it could begin; its deadline counts from there

    def is_like(self, other: "Task") -> bool:
        """Return whether a searcher may work on both at once."""
        return (self.kind, self.reference) == (other.kind, other.reference)


@dataclass(eq=False)
class Handle:
    """Searcher process as the collector sees it."""

    place: Place
    actor: Any
    version: int  # version of the newest weights that it was sent
    tasks: list[Task]  # calls that have not returned, in the order in which it begins them
    after_gap: int | None = None
    """Version that it began with, after one with wrong weights; None once newer ones are right."""
    sent: float = -inf
    """Time of the last publication to it."""

    def work(self) -> list[Task]:
        """Return all tasks but a publication, which arrives beside them."""
        return [task for task in self.tasks if task.kind != "publish"]

    def has(self, *kinds: Kind) -> bool:
        return any(task.kind in kinds for task in self.tasks)

    def accepts_weights(self, searchers: int) -> bool:
        """Return whether weights can be sent now to this one of so many searchers.

        Each publication keeps a copy of the weights alive.
        """
        rested = time.monotonic() - self.sent >= searchers / PUBLICATIONS
        return rested and not self.has("publish", "start")

    def begin(self, concurrent: int) -> None:
        """Start the deadlines of the tasks that the searcher can work on now."""
        work = self.work()
        running = list(islice(takewhile(lambda t: t.is_like(work[0]), work), concurrent))
        for task in self.tasks:
            if task.began is None and (task.kind == "publish" or task in running):
                task.began = time.monotonic()

    def search(
        self, prompts: list[Prompt], seed: int, weights: Sent | None, reference: Sent | None
    ) -> None:
        call = self.actor.search.options(concurrency_group=SEARCH)
        ref = call.remote(prompts, seed, weights, reference)
        version = 0 if weights is None else weights.version
        self.tasks.append(Task("search", ref, tuple(prompts), version=version, reference=reference))

    def evaluate(self, piece: Piece, reference: Sent | None) -> None:
        call = self.actor.evaluate.options(concurrency_group=SEARCH)
        ref = call.remote(piece.number, piece.weights, reference)
        self.tasks.append(Task("evaluate", ref, piece=piece, reference=reference))

    def publish(self, weights: Sent, published: float) -> None:
        self.version, self.sent = weights.version, time.monotonic()
        call = self.actor.publish.options(concurrency_group=CONTROL)
        task = Task("publish", call.remote(weights), version=weights.version, published=published)
        self.tasks.append(task)

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

    actor: type  # class of the searcher in its process
    job: SearchJob
    bf16: bool
    gpus: float  # GPUs that a searcher requests of Ray
    transport: Transport

    def start(self, place: Place, newest: Sent | None) -> Handle:
        """Start a searcher with these weights, or with the initial ones."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self.gpus, "max_restarts": 0}
        options["concurrency_groups"] = {SEARCH: self.job.settings.concurrent_searches, CONTROL: 2}
        start: Any = ray.remote(**options)(self.actor)
        actor = start.remote(self.job.setup, place, self.bf16, sys.path, self.transport, newest)
        pid = actor.pid.options(concurrency_group=CONTROL)
        version = 0 if newest is None else newest.version
        return Handle(place, actor, version, [Task("start", pid.remote())])
