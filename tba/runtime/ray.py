"""Searchers in processes of their own, on this machine or a cluster. Nobody waits for anybody, unless `runtime.lag` asks for turns.

A collector thread keeps two tasks in flight for each searcher and takes in what comes back; the train loop only empties
its tray. Weights travel through Ray's object store and are adopted between two tasks. Whatever waits has a deadline, and
a searcher that dies or misses one is replaced: its prompts are handed out again, its late results never accepted.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from tba.config.tables import RuntimeTable
from tba.runtime import SearchJob, SearchState, task_seed
from tba.runtime.actor import SearcherActor
from tba.runtime.placement import Place
from tba.runtime.reaper import Reaper, watch
from tba.search.result import Evaluation, SearchResult, SearchStats
from tba.search.rewards import RejectionMonitor
from tba.types import Group, Prompt, Trajectory
from tba.weights import Weights

IN_FLIGHT = 2
"""Tasks that each searcher has: one to do and one to go on with."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """Something a searcher was asked for: `prompts` for a search, `weights` (a reference) for an evaluation."""

    kind: Literal["start", "search", "evaluate", "reset_reference"]
    ref: Any
    prompts: tuple[Prompt, ...] = ()
    weights: Any = None


@dataclass
class Handle:
    """A searcher process as the collector sees it: what it was asked for, in order, and since when it is at the first."""

    place: Place
    actor: Any
    tasks: deque[Task] = field(default_factory=deque)
    since: float = 0.0


class RaySearchers:
    """As many searchers as `runtime.searchers` says, each in a process and on cores of its own."""

    def __init__(
        self,
        job: SearchJob,
        places: list[Place],
        bf16: bool,
        stopping: Callable[[], bool],
        resumed: SearchState | None,
        newest: Weights | None,
    ):
        self.stats = SearchStats()
        self._job, self._settings, self._stream = job, job.settings, job.stream
        self._bf16, self._stopping = bf16, stopping
        self._rejections = RejectionMonitor(job.setup.reward.max_rejected)
        self._number = 0
        self._in_turns = (
            job.settings.lag is not None
        )  # search what is waited for, and nothing in the meantime
        self._owed = 0
        if resumed is not None:
            self._stream.seek(resumed.cursor)
            self._number = resumed.tasks
            self.stats = resumed.stats
        self._changed = threading.Condition()  # guards everything below, and the stream
        self._tray: list[tuple[tuple[Prompt, ...], list[Group]]] = []
        self._wanted: deque[Any] = deque()  # weights to evaluate
        self._evaluated: list[Evaluation] = []
        self._evaluating = 0
        self._failure: Exception | None = None
        self._closing = False
        self._reaper = _start_ray(job.settings)
        self._weights: Any = (
            None if newest is None else ray.put(newest)
        )  # a reference to those last published
        self._reference = None if resumed is None else resumed.reference
        self._reference_ref: Any = None if self._reference is None else ray.put(self._reference)
        self._handles = [self._start(place) for place in places]
        self._collector = threading.Thread(target=self._collect, name="collector", daemon=True)
        self._collector.start()

    def gather(self, at_least: int) -> list[Group]:
        limit = self._settings.gather_deadline * max(1.0, at_least / self._job.batch_groups)
        with self._changed:
            self._owed = at_least
            self._changed.notify_all()  # the collector, if it has nothing else to do
        self._wait(
            lambda: sum(len(g) for _, g in self._tray) >= at_least,
            limit,
            f"runtime.gather_deadline: {at_least} groups from the searchers",
        )
        with self._changed:
            tray, self._tray, self._owed = self._tray, [], 0
            for prompts, groups in tray:
                self._stream.done(prompts, groups)
        return [g for _, groups in tray for g in groups]

    def publish(self, weights: Weights) -> None:
        with self._changed:
            self._weights = ray.put(weights)
            for handle in self._handles:
                handle.actor.publish.remote(self._weights)

    def reset_reference(self, weights: Weights) -> None:
        with self._changed:
            self._reference, self._reference_ref = weights, ray.put(weights)
            for handle in (
                self._handles
            ):  # in its turn: what was asked for before keeps the reference of before
                self._give(
                    handle,
                    Task(
                        "reset_reference", handle.actor.reset_reference.remote(self._reference_ref)
                    ),
                )

    def evaluate(self) -> None:
        with self._changed:
            self._wanted.append(self._weights)
            self._evaluating += 1

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        if finish:
            evaluations = self._job.setup.evaluation.deadline * max(1, self._evaluating)
            limit = (
                evaluations + self._settings.task_deadline * IN_FLIGHT
            )  # it waits behind searches
            self._wait(lambda: self._evaluating == 0, limit, "eval.deadline: an evaluation")
        with self._changed:
            found, self._evaluated = self._evaluated, []
        return found

    def state(self) -> SearchState:
        with self._changed:
            return SearchState(
                self._stream.cursor(), self._number, deepcopy(self.stats), None, self._reference
            )

    def close(self) -> None:
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._collector.join(timeout=10)
        try:
            for handle in self._handles:
                ray.kill(handle.actor)
            ray.shutdown()
        finally:
            if self._reaper is not None:
                self._reaper.finish()

    @property
    def pids(self) -> list[int]:
        """Process ids of the searchers (on this machine). For tests and for the curious."""
        with self._changed:
            actors = [h.actor for h in self._handles]
        return list(
            ray.get([a.pid.remote() for a in actors], timeout=self._settings.start_deadline)
        )

    def _wait(self, enough: Callable[[], bool], seconds: float, what: str) -> None:
        """Until `enough()`, the run is stopping, or the collector failed. TimeoutError names what was waited for."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not enough() and not self._stopping():
                if self._failure is not None:
                    raise self._failure
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{what} did not come within {seconds:g} s; raise that setting, or see what is slow"
                    )
                self._changed.wait(0.2)
            if self._failure is not None:
                raise self._failure

    def _start(self, place: Place) -> Handle:
        options = {
            "num_cpus": 0,
            "concurrency_groups": {"control": 1},
            "max_restarts": 0,
            **_resources(self._settings, place),
        }
        remote: Any = ray.remote(**options)(SearcherActor)
        actor = remote.remote(
            self._job.setup, place, self._bf16, sys.path, self._weights, self._reference_ref
        )
        handle = Handle(place, actor, since=time.monotonic())
        handle.tasks.append(Task("start", actor.pid.remote()))
        return handle

    def _collect(self) -> None:
        """The collector thread. An exception here ends the run: whoever waits next raises it."""
        try:
            while not self._closing:
                with self._changed:
                    self._hand_out()
                    owners = {h.tasks[0].ref: h for h in self._handles if h.tasks}
                    if not owners:
                        self._changed.wait(0.1)
                        continue
                ready, _ = ray.wait(list(owners), num_returns=1, timeout=0.1)
                for ref in ready:
                    self._receive(owners[ref])
                self._replace_late()
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _hand_out(self) -> None:
        """Each task to the searcher that has the fewest, so that all of them work on what is waited for."""
        while len((handle := min(self._handles, key=lambda h: len(h.tasks))).tasks) < IN_FLIGHT:
            if self._wanted:
                weights = self._wanted.popleft()
                self._give(
                    handle, Task("evaluate", handle.actor.evaluate.remote(weights), weights=weights)
                )
            elif count := self._due():
                prompts = self._stream.take(count)
                seed = task_seed(self._job.seed, self._number)
                self._number += 1
                weights = (
                    self._weights if self._in_turns else None
                )  # those of this turn, although a publication may overtake or be late
                self._give(
                    handle,
                    Task(
                        "search", handle.actor.search.remote(prompts, seed, weights), tuple(prompts)
                    ),
                )
            else:
                return

    def _due(self) -> int:
        """How many prompts the next task of search has: with turns, an even share of what is waited for and not yet asked for."""
        most = self._settings.prompts_per_task
        if not self._in_turns:
            return most
        found = sum(len(groups) for _, groups in self._tray)
        asked = sum(len(t.prompts) for h in self._handles for t in h.tasks)
        return max(0, min(most, -(-self._owed // len(self._handles)), self._owed - found - asked))

    def _give(self, handle: Handle, task: Task) -> None:
        if not handle.tasks:
            handle.since = time.monotonic()
        handle.tasks.append(task)

    def _receive(self, handle: Handle) -> None:
        task = handle.tasks[0]
        try:
            result = ray.get(task.ref)
        except (
            RayTaskError
        ) as error:  # a mistake in the code or the settings: another searcher would make it again
            raise RuntimeError(f"a searcher failed in `{task.kind}`:\n{error}") from error
        except RayError as error:
            if isinstance(error, ActorDiedError) and error.actor_init_failed:
                raise RuntimeError(f"a searcher could not start: {error}") from error
            self._replace(handle, "died")
            return
        with self._changed:
            handle.tasks.popleft()
            handle.since = time.monotonic()
            if task.kind == "search":
                self._take_in(task, result)
            elif task.kind == "evaluate":
                self._evaluated.append(result)
                self._evaluating -= 1
            self._changed.notify_all()

    def _take_in(self, task: Task, result: SearchResult) -> None:
        self.stats.add(result.stats)
        self._rejections.add(result.stats)
        self._tray.append((task.prompts, [_owned(g) for g in result.groups]))

    def _replace_late(self) -> None:
        task = self._settings.task_deadline
        limits = {
            "start": self._settings.start_deadline,
            "search": task,
            "reset_reference": task,
            "evaluate": self._job.setup.evaluation.deadline,
        }
        for handle in [h for h in self._handles if h.tasks]:
            if time.monotonic() - handle.since > limits[handle.tasks[0].kind]:
                self._replace(
                    handle,
                    f"did not finish `{handle.tasks[0].kind}` in {limits[handle.tasks[0].kind]:g} s",
                )

    def _replace(self, handle: Handle, why: str) -> None:
        """Ends this searcher and starts another; what it was asked for is asked again, and its own answers are lost for good."""
        ray.kill(handle.actor)
        with self._changed:
            self.stats.restarts += 1
            if self.stats.restarts > self._settings.max_restarts:
                raise RuntimeError(
                    f"a searcher {why}, and runtime.max_restarts = {self._settings.max_restarts} have been replaced already"
                )
            log.warning(
                "a searcher %s: replaced, %d tasks are handed out again",
                why,
                sum(t.kind in ("search", "evaluate") for t in handle.tasks),
            )
            for task in handle.tasks:
                self._stream.put_back(task.prompts)
                if task.kind == "evaluate":
                    self._wanted.appendleft(task.weights)
            self._handles[self._handles.index(handle)] = self._start(handle.place)


def _start_ray(settings: RuntimeTable) -> Reaper | None:
    """Joins the cluster at `runtime.address`, or starts a private Ray on loopback that ends with this process, however it ends."""
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if settings.address is not None:
        ray.init(address=settings.address, **common)
        return None
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # searchers choose their device themselves
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # at Ray's default of 15, any other program on its core starves a searcher
    context: Any = ray.init(
        address="local", include_dashboard=False, num_cpus=settings.searchers, **common
    )
    return watch(context.address_info["session_dir"])


def _resources(settings: RuntimeTable, place: Place) -> dict[str, Any]:
    """On a cluster Ray places searchers, one GPU each where there are any; on one machine `place` says where."""
    return {"num_gpus": 1} if settings.address is not None and place.device != "cpu" else {}


def _owned(group: Group) -> Group:
    """A copy that does not keep Ray's shared memory alive for as long as the replay buffer holds it."""
    return replace(
        group,
        prompt_tokens=np.array(group.prompt_tokens),
        trajectories=tuple(_copied(t) for t in group.trajectories),
    )


def _copied(t: Trajectory) -> Trajectory:
    value = None if t.value is None else np.array(t.value)
    return replace(
        t,
        tokens=np.array(t.tokens),
        behavior_logp=np.array(t.behavior_logp),
        ref_logp=np.array(t.ref_logp),
        value=value,
    )
