"""The searchers of a run on Ray, the weights that they get, and the copies that exist of them."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tba.config.tables import RuntimeTable
from tba.runtime.handle import Handle, Kind, Starter, Task
from tba.runtime.placement import Place
from tba.weights import Sent

PUBLISHED, REFERENCES = 4, 2
"""Most versions of the weights, and of the reference, that are on their way to searchers at once.

Each keeps a copy for as long as a slow searcher needs to take it.
"""

BACKOFF, LONGEST_BACKOFF = 1.0, 60.0
"""Seconds before the second restart in a row of a searcher, which double, and most seconds."""


@dataclass(frozen=True)
class Vacancy:
    """Place of a searcher that has ended."""

    place: Place
    at: float  # time at which another one may start
    failures: int  # in a row


class Crew:
    """All searchers. Whoever calls a method holds the lock of the collector."""

    def __init__(
        self, starter: Starter, settings: RuntimeTable, clock: Callable[[], float] = time.monotonic
    ):
        self._starter, self._settings, self._clock = starter, settings, clock
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
        failures, wait = handle.failures + 1, 0.0
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
        self.handles, self.newest, self.newest_reference = [], None, None
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
