"""Search in the trainer's own process, inside `gather`.

It is bit-reproducible on a CPU, except with agents.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace

from tba.errors import Interruption, NoAnswerError
from tba.learn import Trainer
from tba.runtime import RejectionMonitor, SearchJob
from tba.search.evaluate import evaluate_held_out
from tba.search.prompts import SearchState
from tba.search.result import Evaluation, SearchResult
from tba.search.searcher import Searcher
from tba.types import Group
from tba.weights import Publication, Weights


class LocalSearchers:
    """A single searcher, which searches exactly as many prompts as the trainer waits for.

    With `runtime.colocate=sleep`, its engine sleeps from the end of a search until it is needed:
    the trainer takes a step, copies its weights for the engine, and the engine wakes to load them.
    """

    def __init__(self, job: SearchJob, searcher: Searcher, state: SearchState):
        """Load the weights of `state`."""
        self.stats = deepcopy(state.stats)
        self._tasks = state.tasks
        self._job = job
        self._settings = job.setup.config.runtime
        self._stream = job.stream
        self._searcher = searcher
        self._rejections = RejectionMonitor(job.setup.config.reward.max_rejected)
        self._weights: Weights | None = None
        self._reference = state.reference
        self._found: list[Group] = []  # by a `gather` that has not returned
        self._evaluations: list[Evaluation] = []
        self._asleep = False
        self._since = time.perf_counter()  # when work last began or ended
        if state.weights is not None:
            self._load(state.weights)
        if self._reference is not None:
            self._searcher.reference.load_weights(self._reference)

    def gather(self, at_least: int) -> list[Group]:
        deadline = time.monotonic() + self._job.seconds_for(at_least)
        groups = self._found  # part of the state if a search ends the run
        while len(groups) < at_least and not self._job.stop.requested:
            if time.monotonic() > deadline:
                few = f"only {len(groups)} of {at_least} groups within trainer.deadline"
                why = f"rejected since the run began: {dict(self.stats.rejected)}"
                raise NoAnswerError(f"{few} ({why}); raise that setting")
            self._job.tell(f"generating {len(groups)}/{at_least} prompts")
            most = self._settings.prompts_per_task
            prompts = self._stream.take(min(most, at_least - len(groups)))
            result: SearchResult | None = None
            with suppress(Interruption), self._job.stop.interrupting(), self._work() as searcher:
                result = searcher.search(prompts, self._job.search_seed(self._tasks))
            if result is None:  # a resumed run searches these prompts first
                break
            self._tasks += 1
            self._rejections.add(result.stats)  # first: if it ends the run, no prompt is done
            quarantined = self._stream.done(prompts, result.groups, result.died)
            self.stats.counts["searchers/quarantined"] += quarantined
            self.stats.add(result.stats)
            groups += result.groups
        self._found = []
        # after a stop, requests of an engine may still run, for which `sleep` would wait
        if self._settings.colocate == "sleep" and not (self._asleep or self._job.stop.requested):
            self._asleep = True  # first: after a failure, the engine is woken up
            self._searcher.engine.sleep(keep=self._weights is None)  # otherwise reloaded
        return groups

    @contextmanager
    def _work(self, loads: bool = False) -> Iterator[Searcher]:
        """Wrap work of the searcher: its engine is awake, and the time counts as busy.

        The engine gets its weights back, unless the work `loads` others.
        """
        self._count("waiting")
        if self._asleep:
            self._searcher.engine.wake()
            self._asleep = False
            if self._weights is not None and not loads:
                self._searcher.load_weights(self._weights)
        yield self._searcher
        self._count("busy")

    def _count(self, name: str) -> None:
        now = time.perf_counter()
        self.stats.seconds[name] += now - self._since
        self._since = now

    def publish(self, trainer: Trainer, version: int) -> None:
        started = time.perf_counter()
        sent = trainer.send(version)
        self.stats.counts["sync/bytes"] += sent.nbytes
        self.stats.publish_seconds += time.perf_counter() - started
        self._load(sent.payload)
        self.stats.latest["sync/adopted"] = time.perf_counter() - started

    def _load(self, weights: Weights) -> None:
        started = time.perf_counter()
        self._weights = weights
        with self._work(loads=True) as searcher:
            self.stats.measured(searcher.load_weights(weights))
        self.stats.seconds["load_weights"] += time.perf_counter() - started

    def reset_reference(self, sent: Publication) -> None:
        self._reference = sent.payload
        with self._work() as searcher:
            searcher.reference.load_weights(sent.payload)  # the engine may lend its model

    def evaluate(self, step: int) -> int:
        with suppress(Interruption), self._job.stop.interrupting(), self._work() as searcher:
            evaluation = evaluate_held_out(searcher, tell=self._job.tell)
            self._evaluations.append(replace(evaluation, requested=step))
        return self._searcher.engine.version

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        evaluations = self._evaluations
        self._evaluations = []
        return evaluations

    def state(self) -> SearchState:
        cursor = self._stream.cursor()
        stats = deepcopy(self.stats)
        found = tuple(self._found)
        return SearchState(cursor, self._tasks, stats, self._weights, self._reference, found)

    def close(self) -> None:
        self._searcher.close()
