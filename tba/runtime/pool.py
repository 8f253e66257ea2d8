"""The searcher processes, the calls to them that have not returned, and when these are late."""

import sys
import time
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Literal

import ray

from tba.runtime import SearchJob
from tba.runtime.actor import SearcherActor
from tba.runtime.cluster import Cluster, ObjectStore
from tba.runtime.placement import Place
from tba.types import Prompt
from tba.weights import Sent, Weights

CONTROL = "control"
"""Threads of a searcher that are free while others search or evaluate."""

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
    reference: Sent | None = None
    """Reference that a search needs."""
    began: float | None = None
    """Time at which the searcher could begin it; its deadline counts from there."""


@dataclass(eq=False)
class Handle:
    """Searcher process as the collector sees it."""

    place: Place
    actor: Any
    sent: Sent | None
    """Newest weights that it was sent."""
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
        job: SearchJob,
        cluster: Cluster,
        bf16: bool,
        newest: Weights | None,
        reference: Weights | None,
    ):
        self._settings, self._setup, self._bf16 = job.settings, job.setup, bf16
        task, evaluation = job.settings.task_deadline, job.setup.evaluation.deadline
        self._deadlines: dict[Kind, float] = {
            "start": job.settings.start_deadline,
            "search": task,
            "evaluate": evaluation,
            "publish": task + evaluation,  # an evaluation may have begun before it
        }
        self._transport = ObjectStore(task)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": cluster.searcher_gpus,
            "max_restarts": 0,
            "max_concurrency": job.settings.concurrent_searches,
            "concurrency_groups": {CONTROL: 2},
        }
        self._actor: Any = ray.remote(**options)(SearcherActor)
        self.newest = None if newest is None else self._transport.send(newest)
        self._reference = None if reference is None else self._transport.send(reference)
        self.handles = [self._start(place) for place in cluster.searchers]

    def least_busy_first(self) -> list[Handle]:
        return sorted(self.handles, key=lambda handle: len(handle.work()))

    def search(self, handle: Handle, prompts: list[Prompt], seed: int) -> None:
        """Ask for a search with the newest reference; in lockstep, with the weights of its turn."""
        weights = None if self._settings.lag is None else self.newest
        ref = handle.actor.search.remote(prompts, seed, weights, self._reference)
        handle.tasks.append(Task("search", ref, tuple(prompts), reference=self._reference))

    def evaluate(self, handle: Handle, weights: Sent | None) -> None:
        ref = handle.actor.evaluate.remote(weights, self._reference)
        handle.tasks.append(Task("evaluate", ref, weights=weights))

    def publish(self, weights: Weights) -> None:
        """Make these the newest weights, and send them to every searcher that accepts them."""
        self.newest = self._transport.send(weights)
        self.send_newest()

    def send_newest(self) -> None:
        """Send the newest weights to the searchers that have older ones and accept them now."""
        if self._settings.lag is not None:
            return
        for handle in self.handles:
            if handle.sent is not self.newest and handle.accepts_weights():
                handle.sent = self.newest
                publish = handle.actor.publish.options(concurrency_group=CONTROL)
                handle.tasks.append(Task("publish", publish.remote(self.newest)))

    def reset_reference(self, weights: Weights) -> None:
        """Make these weights the reference of every search and evaluation from now on."""
        self._reference = self._transport.send(weights)

    def calls(self) -> dict[Any, tuple[Handle, Task]]:
        """Return who has which task, by its reference, and begin the deadlines that are due."""
        calls = {}
        for handle in self.handles:
            handle.begin(self._settings.concurrent_searches)
            calls.update({task.ref: (handle, task) for task in handle.tasks})
        return calls

    def late(self, handle: Handle) -> str | None:
        """Return which deadline a searcher has missed, if any."""
        for task in handle.tasks:
            limit = self._deadlines[task.kind]
            if task.began is not None and time.monotonic() - task.began > limit:
                return f"did not finish `{task.kind}` in {limit:g} s"
        return None

    def restart(self, handle: Handle) -> None:
        """Kill a searcher and start another at its place."""
        ray.kill(handle.actor)
        self.handles[self.handles.index(handle)] = self._start(handle.place)

    def _start(self, place: Place) -> Handle:
        transport, newest = self._transport, self.newest
        actor = self._actor.remote(self._setup, place, self._bf16, sys.path, transport, newest)
        pid = actor.pid.options(concurrency_group=CONTROL)
        return Handle(place, actor, newest, [Task("start", pid.remote())])
