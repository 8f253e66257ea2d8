"""The searcher processes of a run on Ray, the calls to them, and the weights that they get."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count, islice, takewhile
from math import inf
from typing import Any, Literal

import ray

from tba.config.tables import RuntimeTable
from tba.prompt import Prompt
from tba.runtime import SearchJob
from tba.runtime.deadline import Calls
from tba.runtime.placement import Place
from tba.search.evaluate import Piece
from tba.weights import Sent, Transport

SEARCH = "search"
CONTROL = "control"
"""Groups of a searcher's threads, for its work and for all else; each begins calls in order."""

POLL = 0.2
"""Seconds that the collector waits for results before it looks at deadlines again."""

PUBLICATIONS = 20
"""Most publications a second to all searchers together: each takes time of two processes."""

PUBLISHED = 4
REFERENCES = 2
"""Most versions of the weights, and of the reference, that are on their way to searchers at once.

Each keeps a copy for as long as a slow searcher needs to take it.
"""

BACKOFF = 1.0
LONGEST_BACKOFF = 60.0
"""Seconds before the second restart in a row of a searcher, which double, and most seconds."""

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


@dataclass(eq=False)
class Task:
    """Call to a searcher that has not returned."""

    kind: Kind
    ref: Any  # Ray's reference to the result
    prompts: tuple[Prompt, ...] = ()
    piece: Piece | None = None
    weights: Sent | None = None  # weights that go with it, which exist until it has ended
    published: float = 0.0  # time at which the weights of a publication were published
    reference: Sent | None = None  # reference that it needs
    began: float | None = None  # when it could begin and its deadline started
    order: int = field(default_factory=count().__next__)  # of all calls, as they were made

    @property
    def version(self) -> int:
        """Version of the weights that go with it."""
        return 0 if self.weights is None else self.weights.version

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
    calls: Calls  # that start them
    sent: float = -inf
    """Time of the last publication to it."""
    failures: int = 0
    """Searchers in a row that have failed in its place, and have delivered nothing before."""

    def work(self) -> list[Task]:
        """Return all tasks but a publication, which arrives beside them."""
        return [task for task in self.tasks if task.kind != "publish"]

    def searching(self) -> list[Prompt]:
        """Return the prompts of the searches that it may have begun."""
        return [p for task in self.tasks if task.began is not None for p in task.prompts]

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
        ref = self._call(SEARCH, self.actor.search, prompts, seed, weights, reference)
        self.tasks.append(Task("search", ref, tuple(prompts), weights=weights, reference=reference))

    def evaluate(self, piece: Piece, reference: Sent | None) -> None:
        ref = self._call(SEARCH, self.actor.evaluate, piece.number, piece.weights, reference)
        self.tasks.append(Task("evaluate", ref, piece=piece, reference=reference))

    def publish(self, weights: Sent, published: float) -> None:
        self.version = weights.version
        self.sent = time.monotonic()
        ref = self._call(CONTROL, self.actor.publish, weights)
        self.tasks.append(Task("publish", ref, weights=weights, published=published))

    def _call(self, group: str, method: Any, *arguments: Any) -> Any:
        """Start a call in the searcher's process, and return Ray's reference to its result."""
        start = method.options(concurrency_group=group).remote
        return self.calls("take a call to a searcher", start, *arguments)

    def kill(self) -> None:
        self.calls("end a searcher", ray.kill, self.actor)

    def done(self, task: Task) -> None:
        """Record that a call has returned its result."""
        self.tasks.remove(task)
        if task.kind in ("search", "evaluate"):
            self.failures = 0

    def late(self, deadlines: Mapping[Kind, float]) -> str | None:
        """Return which deadline the searcher has missed, if any."""
        now = time.monotonic()
        for task in self.tasks:
            limit = deadlines[task.kind]
            if task.began is not None and now - task.began > limit:
                return f"did not finish `{task.kind}` in {limit:g} s"
        return None


def ended(refs: list[Any]) -> list[Any]:
    """Return those of the calls that have ended, after some time if there are none."""
    some, others = ray.wait(refs, timeout=POLL)
    if some and others:  # no more than one otherwise
        some += ray.wait(others, num_returns=len(others), timeout=0)[0]
    return some


def received(ref: Any) -> Any:
    """Return a copy of the result of a call, whose arrays keep no memory of Ray's alive.

    It has ended, and whoever waits for the copy has a deadline.
    """
    return deepcopy(ray.get(ref))


@dataclass(frozen=True)
class Starter:
    """Settings from which every searcher process is started."""

    actor: type  # class of the searcher in its process
    job: SearchJob
    bf16: bool
    gpus: float  # GPUs that a searcher requests of Ray
    transport: Transport
    calls: Calls

    def start(self, place: Place, newest: Sent | None) -> Handle:
        """Start a searcher with these weights, or with the initial ones."""
        actor, ref = self.calls("start a searcher", self._begin, place, newest)
        version = 0 if newest is None else newest.version
        start = Task("start", ref, weights=newest)
        return Handle(place, actor, version, [start], self.calls)

    def _begin(self, place: Place, newest: Sent | None) -> tuple[Any, Any]:
        """Return a searcher that starts, and Ray's reference to what it says once it has."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self.gpus, "max_restarts": 0}
        options["concurrency_groups"] = {SEARCH: self.job.settings.concurrent_searches, CONTROL: 2}
        start: Any = ray.remote(**options)(self.actor)
        actor = start.remote(self.job.setup, place, self.bf16, sys.path, self.transport, newest)
        return actor, actor.pid.options(concurrency_group=CONTROL).remote()


@dataclass(frozen=True)
class Vacancy:
    """Place of a searcher that has ended."""

    place: Place
    at: float  # time at which another one may start
    failures: int  # in a row


class Pool:
    """All searchers. Whoever calls a method holds the lock of the collector."""

    def __init__(
        self, starter: Starter, settings: RuntimeTable, clock: Callable[[], float] = time.monotonic
    ):
        self._starter = starter
        self._settings = settings
        self._clock = clock
        self._vacancies: list[Vacancy] = []
        self.handles: list[Handle] = []
        self.newest: Sent | None = None  # weights that were published last
        self.published = 0.0  # time at which they were
        self.newest_reference: Sent | None = None
        self.restarts_left = settings.max_restarts

    def start(self, place: Place) -> None:
        self.handles.append(self._starter.start(place, self.newest))

    def replace(self, handle: Handle) -> float:
        """End a searcher; return the seconds until `restart` starts another in its place.

        There are none, but after failures in a row, between which it has delivered nothing.
        """
        self.restarts_left -= 1
        handle.kill()
        self.handles.remove(handle)
        failures = handle.failures + 1
        wait = 0.0
        if failures > 1:
            wait = min(LONGEST_BACKOFF, BACKOFF * 2.0 ** (failures - 2))
        self._vacancies.append(Vacancy(handle.place, self._clock() + wait, failures))
        return wait

    def restart(self) -> None:
        """Start the searchers that need not wait any longer."""
        for vacancy in [v for v in self._vacancies if v.at <= self._clock()]:
            self._vacancies.remove(vacancy)
            self.start(vacancy.place)
            self.handles[-1].failures = vacancy.failures

    def forget(self) -> None:
        """Drop all searchers, and the copies of weights that were kept for them."""
        self.handles = []
        self.newest = None
        self.newest_reference = None
        self._vacancies = []

    def least_busy_first(self) -> list[Handle]:
        return sorted(self.handles, key=lambda handle: len(handle.work()))

    def tasks(self) -> dict[Any, tuple[Handle, Task]]:
        """Return all open calls by their Ray reference, and start the deadlines that are due."""
        for handle in self.handles:
            handle.begin(self._settings.concurrent_searches)
        return {task.ref: (handle, task) for handle in self.handles for task in handle.tasks}

    def late(self, deadlines: Mapping[Kind, float]) -> list[tuple[Handle, str]]:
        """Return the searchers that have missed a deadline, and which it was."""
        whys = [(handle, handle.late(deadlines)) for handle in self.handles]
        return [(handle, why) for handle, why in whys if why is not None]

    def send_newest(self) -> None:
        """Send the newest weights to the searchers that have older ones and accept them now."""
        newest = self.newest
        if newest is None or self._settings.lag is not None:
            return
        on_their_way = {task.version for task in self._all_tasks() if task.kind == "publish"}
        if newest.version not in on_their_way and len(on_their_way) >= PUBLISHED:
            return
        for handle in self.handles:
            if handle.version != newest.version and handle.accepts_weights(len(self.handles)):
                handle.publish(newest, self.published)

    def reference(self) -> Sent | None:
        """Return the reference for the next task.

        It is the newest one, unless searchers are so slow that too many others are in use. In
        lockstep, tasks end before there is another reference.
        """
        newest = self.newest_reference
        used = {t.reference.version: t.reference for t in self._all_tasks() if t.reference}
        if newest is None or newest.version in used or len(used) < REFERENCES:
            return newest
        return newest if self._settings.lag is not None else used[max(used)]

    def copies(self, evaluated: Iterable[Sent]) -> int:
        """Return how many copies of weights exist, with those that evaluations need."""
        kept = {self.newest, self.newest_reference, *evaluated}
        for task in self._all_tasks():
            kept |= {task.weights, task.reference}
        return len(kept - {None})

    def _all_tasks(self) -> Iterable[Task]:
        return (task for handle in self.handles for task in handle.tasks)
