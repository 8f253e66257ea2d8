"""Searchers in separate processes, on this machine or a cluster.

A collector thread keeps every searcher busy; the train loop takes results that have arrived. A
searcher that dies, is late or has a faulty engine is restarted, and its tasks are issued again. If
Ray is lost, the next call raises ClusterLostError; `state` and `close` still work.

    train loop            collector thread                  searcher process (actor.py)
    gather                _collect, in a loop
      waits for             Pool.restart
      _results              _hand_out_evaluations  -->      evaluate(piece, weights)
      PromptStream.done     _hand_out_searches
                              PromptStream.take
                              SearcherHandle.search -->     search(prompts)
                            Pool.send_newest       -->      load_weights(weights)
                            ended, _receive        <--      results: _results, Evaluations.done
    evaluate                Pool.late, _restart    -->      killed; PromptStream.put_back
      Evaluations.request
                          publisher thread
    publish                 Publisher._run
      Trainer.copy            the copy is converted and sent, with its probe
      Publisher.publish       _publish: Pool.send_newest

The lock `_changed` guards pool, stream, results and evaluations. `Calls` limits calls to Ray.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from queue import Empty, Queue
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from tba.errors import EngineError, NoAnswerError, NotFinite, SearchError
from tba.learn import Trainer
from tba.prompt import Prompt
from tba.runtime import RejectionMonitor, SearchJob, search_errors
from tba.runtime.actor import SearcherActor
from tba.runtime.cluster import Cluster, Slot, folders, is_lost
from tba.runtime.pool import (
    CONTROL,
    POLL,
    SEARCH,
    Evaluations,
    Pool,
    SearcherHandle,
    SearcherTask,
    ended,
    received,
)
from tba.runtime.shared_memory import receive_mapped
from tba.search.prompts import SearchState
from tba.search.result import Evaluation, SearchResult, SearchStats
from tba.types import Group
from tba.weights import Publication, Weights, resend

log = logging.getLogger(__name__)


class RaySearchers:
    """Searchers on a cluster, each in its own process. They start with the weights `newest`."""

    def __init__(
        self,
        job: SearchJob,
        cluster: Cluster,
        bf16: bool,
        state: SearchState,
        newest: Publication | None,
    ):
        self._job = job
        self._settings = job.setup.config.runtime
        self._stream = job.stream
        self._in_flight = self._settings.concurrent_searches + 1
        self._rejections = RejectionMonitor(job.setup.config.reward.max_rejected)
        self._calls = cluster.connection.calls
        self._transport = cluster.transport
        self._bf16 = bf16
        self._here = cluster.machine
        self._folders = folders(job.setup.config.policy)
        self._changed = threading.Condition()  # guards everything below, and the stream
        self._stats = deepcopy(state.stats)
        self._number = state.tasks
        self._requested = 0
        self._owed = 0  # in lockstep: prompts still to hand out, before rejected ones are replaced
        self._results: dict[int, tuple[tuple[Prompt, ...], SearchResult]] = {}
        self._evaluations = Evaluations(job.setup)
        self._searching = False  # started by `gather`, after requested evaluations
        self._closing = False
        self._failure: Exception | None = None
        self._pool = Pool(self._begin, self._settings, self._calls)
        self._pool.newest = newest
        self._reference: Weights | None = None
        if state.reference is not None:
            self.reset_reference(resend(state.reference, self._transport))
        self._pool.fill(cluster.searchers)
        self._publisher = Publisher(self._publish, self._fail, self._settings.task_deadline)
        self._collector = threading.Thread(target=self._collect, name="collector", daemon=True)
        self._collector.start()

    def _begin(self, slot: Slot, newest: Publication | None) -> tuple[Any, Any]:
        """Start a searcher; return it, and Ray's reference to its machine's id once started."""
        options = {**slot.options, "max_restarts": 0}
        options["concurrency_groups"] = {SEARCH: self._settings.concurrent_searches, CONTROL: 2}
        start: Any = ray.remote(**options)(SearcherActor)
        receive: Callable[[Publication], Weights] = self._transport.receive
        if self._job.setup.config.engine.options.get("tensor_parallel_size", 1) > 1:
            receive = partial(receive_mapped, receive)
        actor = start.remote(
            self._job.setup, slot.place, self._bf16, self._folders, receive, newest
        )
        return actor, actor.machine.options(concurrency_group=CONTROL).remote()

    @property
    def stats(self) -> SearchStats:
        """Return a copy, because the collector keeps counting."""
        with self._changed:
            self._stats.counts["searchers/evaluations_left_out"] = self._evaluations.left_out
            running = self._pool.running()
            self._stats.latest["searchers/running"] = len(running)
            self._stats.latest["searchers/nodes"] = len({handle.machine for handle in running})
            return deepcopy(self._stats)

    def gather(self, at_least: int) -> list[Group]:
        limit = self._job.seconds_for(at_least)
        what = f"trainer.deadline: {at_least} groups from the searchers"
        groups: list[Group] = []
        with self._changed:
            if not self._searching:
                first = self._settings.start_deadline + self._job.setup.config.trainer.deadline
                what_first = "trainer.deadline: the evaluation before the first search"
                self._wait(self._evaluations.handed_out, first, what_first)
            first_task = self._number
            self._requested = at_least
            self._searching = True
            self._changed.notify_all()  # wakes the collector if it has nothing else to do
            try:
                self._wait(lambda: self._arrived() >= at_least, limit, what)
            finally:
                self._requested = 0
                self._owed = 0
                if self._settings.lag is not None and self._arrived() < at_least:
                    # for reproducibility, a resumed run repeats all of these searches
                    self._number = first_task
                    self._results = {}
            for _, (prompts, result) in sorted(self._results.items()):  # in lockstep, reproducible
                quarantined = self._stream.done(prompts, result.groups, result.died)
                self._stats.counts["searchers/quarantined"] += quarantined
                self._stats.add(result.stats)
                groups += result.groups
            self._results = {}
        return groups

    def publish(self, trainer: Trainer, version: int) -> None:
        self._raise_failure()
        if self._settings.lag is None:
            self._publisher.publish(trainer, version)
        else:  # in lockstep, the next search needs exactly these weights
            published = time.monotonic()
            self._publish(trainer.send(version), published)

    def _publish(self, sent: Publication, published_at: float) -> None:
        """Send weights, published at this time, to all searchers that accept them now."""
        with self._changed:
            self._pool.newest = sent
            self._pool.published_at = published_at
            self._stats.counts["sync/bytes"] += sent.nbytes
            self._stats.publish_seconds += time.monotonic() - published_at
            self._pool.send_newest()
            self._changed.notify_all()  # wakes the collector if it has nothing else to do

    def _fail(self, error: Exception) -> None:
        """End the run: the next call that waits or publishes raises the error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        self._calls.check()  # a lost Ray may have caused other errors
        if self._failure is not None:
            raise self._failure

    def reset_reference(self, sent: Publication) -> None:
        # a checkpoint needs it even if Ray is lost
        weights = self._calls("return the reference", self._transport.receive, sent)
        with self._changed:
            self._reference = weights
            self._pool.newest_reference = sent

    def evaluate(self, step: int) -> int:
        self._publisher.finish()  # afterwards, the newest weights are the last published ones
        with self._changed:
            self._raise_failure()
            newest = self._pool.newest
            assert newest is not None  # a run that evaluates also passes the initial weights
            self._evaluations.request(newest, step)
            self._hand_out_evaluations()
            return newest.version

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        with self._changed:
            if finish:
                self._searching = False  # until the next call to `gather`
                each = self._job.setup.config.trainer.deadline
                limit = each * max(1, len(self._evaluations.open))
                limit += self._settings.task_deadline * self._in_flight  # searches before them
                what = "trainer.deadline: an evaluation"
                self._wait(lambda: not self._evaluations.open, limit, what)
            return self._evaluations.collect()

    def state(self) -> SearchState:
        with self._changed:
            cursor = self._stream.cursor()
            stats = deepcopy(self._stats)
            return SearchState(cursor, self._number, stats, None, self._reference)

    def close(self) -> None:
        """End the threads. Ray ends the searchers when this process leaves it."""
        self._closing = True
        # first the publisher, which needs the pool
        self._publisher.close()
        self._collector.join(timeout=10)
        with self._changed:
            self._pool = Pool(self._begin, self._settings, self._calls)  # frees copies of weights

    def _wait(self, enough: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait, holding the condition, until `enough()` or a stop; raise a failure."""
        deadline = time.monotonic() + seconds
        self._raise_failure()
        while not enough() and not self._job.stop.requested:
            if time.monotonic() > deadline:
                raise NoAnswerError(f"{what} did not come within {seconds:g} s; raise that setting")
            arrived = self._arrived()
            self._job.tell(self._pool.phase(self._evaluations, arrived, self._requested))
            self._changed.wait(POLL)
            self._raise_failure()

    def _arrived(self) -> int:
        return sum(len(result.groups) for _, result in self._results.values())

    def _collect(self) -> None:
        """Run the collector thread: hand out work, and receive results that arrive within POLL.

        An exception ends the run: the next waiting call raises it.
        """
        try:
            while not self._closing:
                with search_errors("the search failed"):
                    with self._changed:
                        self._pool.restart()
                        self._hand_out_evaluations()
                        self._hand_out_searches()
                        self._pool.send_newest()
                        tasks = self._pool.tasks()
                        if not tasks:
                            self._changed.wait(POLL)
                            continue
                    # without the lock, which the train loop needs to publish
                    for ref in self._calls("wait for results", ended, list(tasks)):
                        (handle, task) = tasks[ref]
                        if handle in self._pool.handles:  # otherwise its tasks are issued again
                            self._receive(handle, task)
                    with self._changed:
                        late = self._pool.late()
                    for handle, why in late.items():
                        self._restart(handle, why)
        except Exception as error:
            self._fail(error)

    def _hand_out_evaluations(self) -> None:
        """Give each searcher one piece of an evaluation at a time, between its searches."""
        for handle in self._pool.least_busy_first():
            if not handle.has("evaluate") and (piece := self._evaluations.take()):
                handle.evaluate(piece, self._pool.newest_reference)

    def _hand_out_searches(self) -> None:
        """Give searches to the least busy searchers, so that all work for the waiting trainer.

        In lockstep, a search has a share of the prompts still owed, and no search depends on the
        order in which others end.
        """
        while self._searching and self._pool.handles:
            count = self._settings.prompts_per_task
            if self._settings.lag is not None:
                tasks = [task for handle in self._pool.handles for task in handle.tasks]
                if not self._owed and not any(task.prompts for task in tasks):
                    self._owed = self._requested - self._arrived()
                share = -(-self._requested // len(self._pool.handles))
                count = min(count, share, self._owed)
            handle = self._pool.least_busy_first()[0]
            if count <= 0 or len(handle.work()) >= self._in_flight:
                return
            prompts = self._stream.take(count)
            self._owed -= len(prompts)
            seed = self._job.search_seed(self._number)
            self._number += 1
            # in lockstep `send_newest` sends nothing: the weights come with the search
            weights = None if self._settings.lag is None else self._pool.newest
            handle.search(prompts, seed, weights, self._pool.newest_reference)

    def _receive(self, handle: SearcherHandle, task: SearcherTask) -> None:
        try:
            result = self._calls("return a result", received, task.ref)
        except EngineError as error:
            self._restart(handle, f"failed ({error.args[0]})")
            return
        except RayTaskError as error:
            if isinstance(error.cause, NotFinite | SearchError):
                raise error.cause from error  # without Ray's own traceback
            # an error in code or settings: another searcher would raise it too
            raise SearchError(f"a searcher failed in `{task.kind}`:\n{error}") from error
        except RayError as error:
            is_full = isinstance(error, OutOfMemoryError)
            why = "died" + " (Ray ended it, because this machine's memory is full)" * is_full
            if isinstance(error, ActorDiedError) and error.actor_init_failed:
                why = f"could not start: {error}"
                if not self._pool.worked:
                    raise SearchError(f"a searcher {why}") from error
            self._restart(handle, why)
            return
        with self._changed:
            handle.tasks.remove(task)
            if task.kind == "start":
                handle.machine = result
                self._pool.worked = True
            elif task.kind == "publish":
                self._stats.latest["sync/adopted"] = time.monotonic() - task.published_at
            elif task.kind == "search":
                self._rejections.add(result.stats)
                self._results[task.order] = task.prompts, result
            elif task.piece is not None:
                self._evaluations.done(task.piece, result)
            self._changed.notify_all()

    def _restart(self, handle: SearcherHandle, why: str) -> None:
        """Replace a searcher, or all searchers of a lost machine; issue their tasks again.
        Late results of the old searchers are dropped."""
        machine = handle.machine
        elsewhere = machine is not None and machine != self._here
        # without the lock: a lost machine answers after a second, or not at all
        lost = elsewhere and self._calls("look at a machine", is_lost, machine)
        with self._changed:
            if handle not in self._pool.handles:  # it was lost with its machine
                return
            if not lost:
                handle.begin(self._settings.concurrent_searches)  # its start may just have ended
                searching = [p for t in handle.tasks if t.began is not None for p in t.prompts]
                self._stats.counts["searchers/quarantined"] += self._stream.died(searching)
            if self._pool.restarts_left == 0:
                raise EngineError(
                    f"a searcher {why} after runtime.max_restarts = {self._settings.max_restarts}"
                    " restarts; see why searchers fail, or raise that setting"
                )
            self._stats.counts["searchers/restarts"] += 1
            ended_handles = self._pool.replace(handle, lost)
            if lost:
                log.warning(
                    "a machine with %d searchers is lost: they are started elsewhere as soon as"
                    " there is room, and their tasks are issued again",
                    len(ended_handles),
                )
            else:
                log.warning("a searcher %s: it is restarted, and its tasks are issued again", why)
            for task in (task for each in ended_handles for task in each.tasks):
                self._stream.put_back(task.prompts)
                self._owed += len(task.prompts)
                if task.piece is not None:
                    self._evaluations.put_back(task.piece)


class Publisher:
    """Thread that sends the newest weights. A newer publication replaces one that is waiting.

    At most two copies of the weights exist: the one being sent, and the next. `publish` gets the
    sent weights and the time of their publication. `fail` gets an error of the thread, after which
    nothing is published.
    """

    def __init__(
        self,
        publish: Callable[[Publication, float], None],
        fail: Callable[[Exception], None],
        deadline: float,
    ):
        self._publish = publish
        self._fail = fail
        self._deadline = deadline
        self._waiting: Queue[tuple[Callable[[], Publication], float] | None] = (
            Queue()
        )  # at most one
        self._sending_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, trainer: Trainer, version: int) -> None:
        """Copy the weights and return; they are sent in the background."""
        started = time.monotonic()
        since = self._sending_since
        if since is not None and started - since > self._deadline:
            raise self._late()
        self._drop()  # first: frees its memory for the new copy
        self._waiting.put((trainer.copy(version), started))

    def finish(self) -> None:
        """Wait until everything that was published has been sent."""
        done = self._waiting.all_tasks_done  # `Queue.join` has no timeout
        with done:
            if not done.wait_for(lambda: self._waiting.unfinished_tasks == 0, self._deadline):
                raise self._late()

    def close(self) -> None:
        """End the thread; unsent weights are dropped."""
        self._drop()
        self._waiting.put(None)
        self._thread.join(timeout=10)

    def _drop(self) -> None:
        with suppress(Empty):
            self._waiting.get_nowait()
            self._waiting.task_done()

    def _late(self) -> NoAnswerError:
        limit = f"runtime.task_deadline = {self._deadline:g} s"
        return NoAnswerError(f"the weights were not sent within {limit}; raise that setting")

    def _run(self) -> None:
        while (publication := self._waiting.get()) is not None:
            (copy, published) = publication
            self._sending_since = time.monotonic()
            try:
                with search_errors("the weights could not be published"):
                    self._publish(copy(), published)
            except Exception as error:  # raised when the train loop next waits or publishes
                self._fail(error)
            del copy, publication  # first: frees their memory for a new copy
            self._sending_since = None
            self._waiting.task_done()
