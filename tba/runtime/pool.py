"""The searcher processes, the calls to them that have not returned, and when these are late."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Literal

import ray

from tba.config.tables import RuntimeTable
from tba.runtime.cluster import Cluster, ObjectStore
from tba.runtime.placement import Place
from tba.search.searcher import SearchSetup
from tba.types import Prompt
from tba.weights import Sent, Weights

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
    tasks: list[Task]
    """Calls that have not returned, in the order in which it begins them."""

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


class Pool:
    """Searcher processes, the newest weights, and the reference. One thread at a time uses it."""

    def __init__(
        self,
        searcher: type[Any],
        settings: RuntimeTable,
        setup: SearchSetup,
        cluster: Cluster,
        bf16: bool,
        newest: Weights | None,
        reference: Weights | None,
    ):
        self._settings, self._setup, self._bf16 = settings, setup, bf16
        task, evaluation = settings.task_deadline, setup.evaluation.deadline
        self._deadlines: dict[Kind, float] = {
            "start": settings.start_deadline,
            "search": task,
            "evaluate": evaluation,
            "publish": task + evaluation,  # an evaluation may have begun before it
        }
        self._transport = ObjectStore(task)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": cluster.searcher_gpus,
            "max_restarts": 0,
            "concurrency_groups": {CONTROL: 2, SEARCH: settings.concurrent_searches},
        }
        self._actor: Any = ray.remote(**options)(searcher)
        self.newest = None if newest is None else self._transport.send(newest)
        self._reference = None if reference is None else self._transport.send(reference)
        self.handles = [self._start(place) for place in cluster.searchers]

    def least_busy_first(self) -> list[Handle]:
        return sorted(self.handles, key=lambda handle: len(handle.work()))

    def search(self, handle: Handle, prompts: list[Prompt], seed: int) -> None:
        """Ask for a search with the newest reference.

        In lockstep it has the weights of its turn, and nothing is published beside it.
        """
        weights = None if self._settings.lag is None else self.newest
        call = handle.actor.search.options(concurrency_group=SEARCH)
        ref = call.remote(prompts, seed, weights, self._reference)
        version = 0 if self._reference is None else self._reference.version
        handle.tasks.append(Task("search", ref, tuple(prompts), reference=version))

    def evaluate(self, handle: Handle, weights: Sent | None) -> None:
        call = handle.actor.evaluate.options(concurrency_group=SEARCH)
        ref = call.remote(weights, self._reference)
        handle.tasks.append(Task("evaluate", ref, weights=weights))

    def publish(self, weights: Weights) -> None:
        """Make these the newest weights, and send them to every searcher that accepts them."""
        self.newest = self._transport.send(weights)
        self.send_newest()

    def send_newest(self) -> None:
        """Send the newest weights to the searchers that have older ones and accept them now."""
        if self.newest is None or self._settings.lag is not None:
            return
        for handle in self.handles:
            if handle.version < self.newest.version and handle.accepts_weights():
                handle.version = self.newest.version
                publish = handle.actor.publish.options(concurrency_group=CONTROL)
                handle.tasks.append(Task("publish", publish.remote(self.newest)))

    def reset_reference(self, weights: Weights) -> None:
        """Make these weights the reference of every search and evaluation from now on."""
        self._reference = self._transport.send(weights)

    def outstanding(self) -> dict[Any, tuple[Handle, Task]]:
        """Return who has which call, by its reference, and begin the deadlines that are due."""
        owners = {}
        for handle in self.handles:
            handle.begin(self._settings.concurrent_searches)
            owners.update({task.ref: (handle, task) for task in handle.tasks})
        return owners

    def late(self) -> Iterator[tuple[Handle, str]]:
        """Yield each searcher that has missed a deadline, and which."""
        now = time.monotonic()
        for handle in self.handles:
            for task in handle.tasks:
                limit = self._deadlines[task.kind]
                if task.began is not None and now - task.began > limit:
                    yield handle, f"did not finish `{task.kind}` in {limit:g} s"
                    break

    def restart(self, handle: Handle) -> list[Task]:
        """Kill a searcher and start another; return the searches and evaluations it had."""
        ray.kill(handle.actor)
        self.handles[self.handles.index(handle)] = self._start(handle.place)
        return [task for task in handle.tasks if task.kind in ("search", "evaluate")]

    def kill(self) -> None:
        for handle in self.handles:
            ray.kill(handle.actor)

    def pids(self) -> list[int]:
        """Return the process ids of the searchers, each on its own machine."""
        answers = [_pid(handle.actor) for handle in self.handles]
        return list(ray.get(answers, timeout=self._settings.start_deadline))

    def _start(self, place: Place) -> Handle:
        version = 0 if self.newest is None else self.newest.version
        actor = self._actor.remote(
            self._setup, place, self._bf16, sys.path, self._transport, self.newest
        )
        return Handle(place, actor, version, [Task("start", _pid(actor))])


def _pid(actor: Any) -> Any:
    return actor.pid.options(concurrency_group=CONTROL).remote()
