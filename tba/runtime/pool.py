"""The searcher processes, and what each has been asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from tba.config.tables import RuntimeTable
from tba.runtime.placement import Place
from tba.runtime.tasks import CONTROL, SEARCH, Handle, Kind, Task
from tba.types import Prompt
from tba.weights import Sent, Transport, Weights

Launch = Callable[[Place, Sent | None], Any]
"""Starts a searcher's process with these weights, and returns its actor without waiting for it."""


class Pool:
    """Searcher processes, the newest weights, and the reference. One thread at a time uses it."""

    def __init__(
        self,
        settings: RuntimeTable,
        evaluation_deadline: float,
        places: Sequence[Place],
        launch: Launch,
        transport: Transport,
        newest: Weights | None,
        reference: Weights | None,
    ):
        self._settings, self._evaluation_deadline = settings, evaluation_deadline
        self._launch, self._transport = launch, transport
        self.newest = None if newest is None else transport.send(newest)
        self._reference = None if reference is None else transport.send(reference)
        self.handles = [self._start(place) for place in places]

    def least_busy_first(self) -> list[Handle]:
        """Return the searchers, those with the fewest tasks first."""
        return sorted(self.handles, key=lambda handle: len(handle.tasks))

    def search(self, handle: Handle, prompts: list[Prompt], seed: int) -> None:
        """Ask for a search with the newest reference.

        In lockstep it has the weights of its turn, and nothing is published beside it.
        """
        weights = None if self._settings.lag is None else self.newest
        search = handle.actor.search.options(concurrency_group=SEARCH)
        ref = search.remote(prompts, seed, weights, self._reference)
        version = 0 if self._reference is None else self._reference.version
        handle.tasks.append(Task("search", ref, tuple(prompts), reference=version))

    def evaluate(self, handle: Handle, weights: Sent | None) -> None:
        """Ask for an evaluation of these weights."""
        evaluate = handle.actor.evaluate.options(concurrency_group=SEARCH)
        ref = evaluate.remote(weights, self._reference)
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
                handle.publication = Task("publish", publish.remote(self.newest))

    def reset_reference(self, weights: Weights) -> None:
        """Make these weights the reference of every search and evaluation from now on."""
        self._reference = self._transport.send(weights)

    def outstanding(self) -> dict[Any, tuple[Handle, Task]]:
        """Return who has which call, by its reference, and begin the deadlines that are due."""
        owners = {}
        for handle in self.handles:
            handle.begin(self._settings.concurrent_searches)
            for task in handle.outstanding():
                owners[task.ref] = (handle, task)
        return owners

    def late(self) -> Iterator[tuple[Handle, str]]:
        """Yield each searcher that has missed a deadline, and which."""
        now = time.monotonic()
        for handle in list(self.handles):
            for task in handle.outstanding():
                limit = self._deadline(task.kind)
                if task.began is not None and now - task.began > limit:
                    yield handle, f"did not finish `{task.kind}` in {limit:g} s"
                    break

    def restart(self, handle: Handle) -> list[Task]:
        """Kill a searcher and start another; return the searches and evaluations it had."""
        ray.kill(handle.actor)
        self.handles[self.handles.index(handle)] = self._start(handle.place)
        return [task for task in handle.tasks if task.kind != "start"]

    def kill(self) -> None:
        """Kill all searchers."""
        for handle in self.handles:
            ray.kill(handle.actor)

    @staticmethod
    def pid(actor: Any) -> Any:
        """Return Ray's reference to the id of a searcher's process."""
        return actor.pid.options(concurrency_group=CONTROL).remote()

    def _start(self, place: Place) -> Handle:
        actor = self._launch(place, self.newest)
        version = 0 if self.newest is None else self.newest.version
        return Handle(place, actor, version, [Task("start", self.pid(actor))])

    def _deadline(self, kind: Kind) -> float:
        task, evaluation = self._settings.task_deadline, self._evaluation_deadline
        match kind:
            case "start":
                return self._settings.start_deadline
            case "search":
                return task
            case "evaluate":
                return evaluation
            case "publish":
                return task + evaluation  # an evaluation may have begun before it
