"""Searchers in processes of their own, on this machine or a cluster.

A collector thread keeps every searcher busy and receives the results. The train loop only takes the
results that have arrived. A searcher that dies, misses a deadline or has a faulty engine is
restarted, and its tasks are issued again.
"""

import logging
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from tba.engines import EngineError
from tba.runtime import SearchJob, SearchState
from tba.runtime.actor import SearcherActor
from tba.runtime.cluster import Cluster, ObjectStore
from tba.runtime.evaluations import Evaluations, phase
from tba.runtime.handle import Handle, Starter, Task, deadlines
from tba.runtime.publisher import Publisher
from tba.search.rejections import RejectionMonitor
from tba.search.result import Evaluation, SearchResult, SearchStats
from tba.search.searcher import LogpGapError, task_seed
from tba.types import Group, Prompt
from tba.weights import Sent, Source, Weights

log = logging.getLogger(__name__)


class RaySearchers:
    """Searchers on a cluster, each in a process of its own, which start with `newest`."""

    def __init__(
        self,
        job: SearchJob,
        cluster: Cluster,
        bf16: bool,
        stopping: Callable[[], bool],
        state: SearchState,
        newest: Weights | None,
    ):
        self._job, self._settings, self._stream = job, job.settings, job.stream
        self._stopping = stopping
        self._in_flight = job.settings.concurrent_searches + 1
        self._rejections = RejectionMonitor(job.setup.reward.max_rejected)
        self._changed = threading.Condition()  # guards everything below, and the stream
        self._stats, self._number, self._owed = deepcopy(state.stats), state.tasks, 0
        self._tray: list[tuple[tuple[Prompt, ...], SearchResult]] = []
        self._evaluations = Evaluations(job.setup)
        self._finishing = False
        self._restarts_left = job.settings.max_restarts
        self._failure: Exception | None = None
        self._closing = False
        self._reference = state.reference
        self._deadlines, task = deadlines(job.settings), job.settings.task_deadline
        self._transport, gpus = ObjectStore(task), cluster.searcher_gpus
        self._starter = Starter(SearcherActor, job, bf16, gpus, self._transport)
        self._newest = None if newest is None else self._transport.send(newest)
        self._published = time.monotonic()
        self._sent_reference: Sent | None = None
        if self._reference is not None:
            self._sent_reference = self._transport.send(self._reference)
        self._handles = [self._starter.start(p, self._newest) for p in cluster.searchers]
        self._publisher = Publisher(self._send, self._fail, task)
        self._collector = threading.Thread(target=self._collect, name="collector", daemon=True)
        self._collector.start()

    @property
    def stats(self) -> SearchStats:
        """Return a copy, because the collector keeps counting."""
        with self._changed:
            return deepcopy(self._stats)

    def gather(self, at_least: int) -> list[Group]:
        limit = self._job.gather_deadline(at_least)
        what = f"runtime.gather_deadline: {at_least} groups from the searchers"
        groups: list[Group] = []
        with self._changed:
            self._owed = at_least
            self._changed.notify_all()  # wakes the collector if it has nothing else to do
            self._wait(lambda: self._arrived() >= at_least, limit, what)
            for prompts, result in self._tray:
                self._stream.done(prompts, result.groups)
                self._stats.add(result.stats)
                groups += result.groups
            self._tray, self._owed = [], 0
        return groups

    def publish(self, source: Source, version: int) -> None:
        self._raise_failure()
        if self._settings.lag is None:
            self._publisher.publish(source, version)
        else:  # in lockstep, the next search needs exactly these
            self._send(source.weights(version), published=time.monotonic())

    def _send(self, weights: Weights, published: float) -> None:
        """Send weights that were published at this time to all searchers that accept them now."""
        sent = self._transport.send(weights)
        with self._changed:
            self._newest, self._published = sent, published
            self._stats.published_bytes += weights.nbytes
            self._stats.publish_seconds += time.monotonic() - published
            self._send_newest()
            self._changed.notify_all()  # wakes the collector if it has nothing else to do

    def _fail(self, error: Exception) -> None:
        """End the run: the next call that waits or publishes raises the error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def reset_reference(self, weights: Weights) -> None:
        with self._changed:
            self._reference = weights
            self._sent_reference = self._transport.send(weights)

    def evaluate(self) -> int:
        self._publisher.finish()  # so that the newest weights are those published last
        with self._changed:
            assert self._newest is not None  # a run that evaluates gives the first weights as well
            self._evaluations.request(self._newest)
            self._hand_out_evaluations()
            return self._newest.version

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        with self._changed:
            if finish:
                self._finishing = True  # no more searches
                limit = self._job.setup.evaluation.deadline * max(1, self._evaluations.running)
                limit += self._settings.task_deadline * self._in_flight  # searches before them
                what = "eval.deadline: an evaluation"
                self._wait(lambda: self._evaluations.running == 0, limit, what)
                self._finishing = False
            return self._evaluations.collect()

    def state(self) -> SearchState:
        with self._changed:
            cursor, stats = self._stream.cursor(), deepcopy(self._stats)
            return SearchState(cursor, self._number, stats, None, self._reference)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._publisher.close()
        self._collector.join(timeout=10)
        for handle in self._handles:
            ray.kill(handle.actor)

    def _wait(self, enough: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait, holding the condition, until `enough()`, a stop, or a failure, which is raised."""
        deadline = time.monotonic() + seconds
        while self._failure is None and not enough() and not self._stopping():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come within {seconds:g} s; raise that setting")
            self._job.tell(phase(self._handles, self._evaluations, self._arrived(), self._owed))
            self._changed.wait(0.2)
        self._raise_failure()

    def _arrived(self) -> int:
        return sum(len(result.groups) for _, result in self._tray)

    def _collect(self) -> None:
        """Run the collector thread. An exception ends the run: whoever waits next raises it."""
        try:
            while not self._closing:
                with self._changed:
                    self._hand_out_evaluations()
                    self._hand_out_searches()
                    self._send_newest()
                    calls = self._calls()
                    if not calls:
                        self._changed.wait(0.1)
                        continue
                ready, _ = ray.wait(list(calls), timeout=0.1)
                for ref in ready:
                    if calls[ref][0] in self._handles:  # else its tasks have been issued again
                        self._receive(*calls[ref])
                with self._changed:
                    for handle in list(self._handles):
                        if why := handle.late(self._deadlines):
                            self._restart(handle, why)
        except Exception as error:
            self._fail(error)

    def _send_newest(self) -> None:
        """Send the newest weights to the searchers that have older ones and accept them now."""
        newest = self._newest
        if newest is None or self._settings.lag is not None:
            return
        for handle in self._handles:
            if handle.version != newest.version and handle.accepts_weights(len(self._handles)):
                handle.publish(newest, self._published)

    def _calls(self) -> dict[Any, tuple[Handle, Task]]:
        """Return all open calls by their Ray reference, and start the deadlines that are due."""
        for handle in self._handles:
            handle.begin(self._settings.concurrent_searches)
        return {task.ref: (handle, task) for handle in self._handles for task in handle.tasks}

    def _least_busy_first(self) -> list[Handle]:
        return sorted(self._handles, key=lambda handle: len(handle.work()))

    def _hand_out_evaluations(self) -> None:
        """Give each searcher one piece of an evaluation at a time, between its searches."""
        for handle in self._least_busy_first():
            if not handle.has("evaluate") and (piece := self._evaluations.take()):
                handle.evaluate(piece, self._sent_reference)

    def _hand_out_searches(self) -> None:
        """Give searches to the least busy searchers: all work on what the trainer waits for."""
        while count := self._due():
            handle = self._least_busy_first()[0]
            if len(handle.work()) >= self._in_flight:
                return
            prompts, seed = self._stream.take(count), task_seed(self._job.seed, self._number)
            self._number += 1
            weights = None if self._settings.lag is None else self._newest  # exactly these
            handle.search(prompts, seed, weights, self._sent_reference)

    def _due(self) -> int:
        """Return the prompts of the next search; in lockstep, a share of those still owed."""
        most = self._settings.prompts_per_task
        if self._finishing:
            return 0
        if self._settings.lag is None:
            return most
        asked = sum(len(task.prompts) for handle in self._handles for task in handle.tasks)
        share = -(-self._owed // len(self._handles))
        return max(0, min(most, share, self._owed - self._arrived() - asked))

    def _receive(self, handle: Handle, task: Task) -> None:
        try:
            result = ray.get(task.ref, timeout=self._settings.task_deadline)
        except LogpGapError as error:
            self._replace_wrong(handle, error)
            return
        except EngineError as error:
            self._restart(handle, f"has a faulty engine ({error.args[0]})")
            return
        except RayTaskError as error:
            # an error in code or settings: another searcher would raise it too
            raise RuntimeError(f"a searcher failed in `{task.kind}`:\n{error}") from error
        except RayError as error:
            if isinstance(error, ActorDiedError) and error.actor_init_failed:
                raise RuntimeError(f"a searcher could not start: {error}") from error
            self._restart(handle, "died")
            return
        with self._changed:
            handle.tasks.remove(task)
            if handle.after_gap is not None and task.version > handle.after_gap:
                handle.after_gap = None
            if task.kind == "publish":
                self._stats.adopt_seconds = time.monotonic() - task.published
            elif task.kind == "search":
                self._rejections.add(result.stats)
                # a copy: its arrays would keep Ray's shared memory as long as the buffer has them
                self._tray.append((task.prompts, deepcopy(result)))
            elif task.piece is not None:
                self._evaluations.done(task.piece, result)
            self._changed.notify_all()

    def _replace_wrong(self, handle: Handle, error: LogpGapError) -> None:
        """Restart a searcher with wrong weights; LogpGapError if that has not helped before.

        It helps if the next weight update is right as well.
        """
        original = LogpGapError(str(error.args[0]))
        if handle.after_gap is not None or self._restarts_left == 0:
            raise original.repeated()
        started = self._restart(handle, f"loaded weights wrongly ({original})", error.gap)
        started.after_gap = started.version

    def _restart(self, handle: Handle, why: str, gap: float = 0.0) -> Handle:
        """End a searcher and start another with its tasks; late results of the old one are lost."""
        with self._changed:
            if self._restarts_left == 0:
                raise RuntimeError(
                    f"a searcher {why} after runtime.max_restarts = {self._settings.max_restarts}"
                    " restarts; see why searchers fail, or raise that setting"
                )
            self._restarts_left -= 1
            self._stats.replaced(gap)
            ray.kill(handle.actor)
            started = self._starter.start(handle.place, self._newest)
            self._handles[self._handles.index(handle)] = started
            log.warning("a searcher %s: restarted, its tasks are issued again", why)
            for task in handle.tasks:
                self._stream.put_back(task.prompts)
                if task.piece is not None:
                    self._evaluations.put_back(task.piece)
        return started
