"""The searcher processes of a run on Ray, the calls to them, and their tasks."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count, islice, takewhile
from math import inf
from typing import Any, Literal

import ray

from tba.config.tables import RuntimeTable
from tba.errors import NoAnswerError
from tba.prompt import Prompt
from tba.runtime.cluster import Slot
from tba.runtime.deadline import Calls
from tba.search.evaluate import EvaluatedPiece, join, pieces_of
from tba.search.result import Evaluation
from tba.search.searcher import SearchSetup
from tba.weights import PUBLICATIONS, PUBLISHED, Publication

log = logging.getLogger(__name__)

SEARCH = "search"
CONTROL = "control"
"""Concurrency groups of a searcher, for work and for other calls; each starts calls in order."""

POLL = 0.2
"""Seconds that the collector waits for results before it checks deadlines again."""

UNDER_WAY = 2
"""Maximum number of running evaluations; each keeps a copy of the weights."""

LOOK = 1.0
"""Seconds until Ray is asked again whether there is room for a waiting searcher."""

Kind = Literal["start", "search", "evaluate", "publish"]


@dataclass(eq=False)
class EvaluationInProgress:
    """Unfinished evaluation of these weights."""

    weights: Publication
    step: int  # at which it was requested
    waiting: deque[int]  # numbers of pieces to hand out
    results: dict[int, EvaluatedPiece] = field(default_factory=dict)  # by piece number


@dataclass(frozen=True)
class Piece:
    """Piece of an evaluation, for any searcher."""

    number: int
    evaluation: EvaluationInProgress


@dataclass(eq=False)
class SearcherTask:
    """Call to a searcher that has not returned."""

    kind: Kind
    ref: Any  # Ray's reference to the result
    prompts: tuple[Prompt, ...] = ()
    piece: Piece | None = None
    weights: Publication | None = None  # weights sent with it, kept alive until it ends
    published_at: float = 0.0  # time at which the weights of a publication were published
    reference: Publication | None = None  # reference that it requires
    began: float | None = None  # when it could start, which started its deadline
    order: int = field(default_factory=count().__next__)  # of creation, among all calls


@dataclass(eq=False)
class SearcherHandle:
    """Searcher process as the collector sees it."""

    slot: Slot
    actor: Any
    version: int  # of the newest weights sent to it
    tasks: list[SearcherTask]  # open calls, in the order in which it starts them
    calls: Calls  # makes the calls to Ray
    sent: float = -inf
    """Time of the last publication to it."""
    machine: str | None = None
    """Ray's id of its machine, if known."""

    def work(self) -> list[SearcherTask]:
        """Return all tasks except publications, which run concurrently."""
        return [task for task in self.tasks if task.kind != "publish"]

    def has(self, *kinds: Kind) -> bool:
        return any(task.kind in kinds for task in self.tasks)

    def accepts_weights(self, searchers: int) -> bool:
        """Return whether weights can be sent now to this one of `searchers` searchers.

        Each publication keeps a copy of the weights alive.
        """
        rested = time.monotonic() - self.sent >= searchers / PUBLICATIONS
        return rested and not self.has("publish", "start")

    def begin(self, concurrent: int) -> None:
        """Start the deadlines of the tasks on which the searcher can work now."""
        work = self.work()
        # concurrent tasks of a searcher have the same kind and reference
        alike = takewhile(
            lambda t: (t.kind, t.reference) == (work[0].kind, work[0].reference), work
        )
        running = list(islice(alike, concurrent))
        for task in self.tasks:
            if task.began is None and (task.kind == "publish" or task in running):
                task.began = time.monotonic()

    def search(
        self,
        prompts: list[Prompt],
        seed: int,
        weights: Publication | None,
        reference: Publication | None,
    ) -> None:
        ref = self._call(SEARCH, self.actor.search, prompts, seed, weights, reference)
        self.tasks.append(
            SearcherTask("search", ref, tuple(prompts), weights=weights, reference=reference)
        )

    def evaluate(self, piece: Piece, reference: Publication | None) -> None:
        weights = piece.evaluation.weights
        ref = self._call(SEARCH, self.actor.evaluate, piece.number, weights, reference)
        self.tasks.append(SearcherTask("evaluate", ref, piece=piece, reference=reference))

    def send(self, weights: Publication, published_at: float) -> None:
        self.version = weights.version
        self.sent = time.monotonic()
        ref = self._call(CONTROL, self.actor.load_weights, weights)
        self.tasks.append(SearcherTask("publish", ref, weights=weights, published_at=published_at))

    def _call(self, group: str, method: Any, *arguments: Any) -> Any:
        """Start a call in the searcher's process, and return Ray's reference to its result."""
        start = method.options(concurrency_group=group).remote
        return self.calls("take a call to a searcher", start, *arguments)

    def kill(self) -> None:
        self.calls("end a searcher", ray.kill, self.actor)


def ended(refs: list[Any]) -> list[Any]:
    """Return the calls that have ended; wait up to POLL seconds for the first one."""
    some, others = ray.wait(refs, timeout=POLL)
    if some and others:  # the first call returns at most one
        some += ray.wait(others, num_returns=len(others), timeout=0)[0]
    return some


def received(ref: Any) -> Any:
    """Return a copy of a call's result, whose arrays keep none of Ray's memory alive.

    The call must have ended; the caller applies a deadline to the copy.
    """
    return deepcopy(ray.get(ref))


class Pool:
    """All searchers. Callers must hold the collector's lock."""

    def __init__(
        self,
        begin: Callable[[Slot, Publication | None], tuple[Any, Any]],
        settings: RuntimeTable,
        calls: Calls,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._begin = begin  # start a searcher with these weights: (actor, reference to its start)
        self._settings = settings
        self._calls = calls
        self._clock = clock
        task = settings.task_deadline
        self._deadlines: dict[Kind, float] = {
            "start": settings.start_deadline,
            "search": task,
            "evaluate": task,
            "publish": 3 * task,  # it may wait for a piece of an evaluation, and that for a search
        }
        # slots of searchers to start, and when to start them
        self._vacancies: list[tuple[Slot, float]] = []
        self._enough = clock()  # last time at which there were enough searchers
        self.handles: list[SearcherHandle] = []
        self.newest: Publication | None = None  # weights published last
        self.published_at = 0.0  # when they were published
        self.newest_reference: Publication | None = None
        self.restarts_left = settings.max_restarts
        self.worked = False  # whether any searcher has started

    def fill(self, slots: Sequence[Slot]) -> None:
        """Start the searchers of these slots, or queue them until Ray has room."""
        for slot in slots:
            if slot.group is None:  # a fixed number of searchers: all start now
                self.start(slot)
            else:
                self._vacancies.append((slot, self._clock()))

    def start(self, slot: Slot) -> None:
        """Start a searcher with the newest weights, or with the initial ones."""
        newest = self.newest
        actor, ref = self._calls("start a searcher", self._begin, slot, newest)
        version = 0 if newest is None else newest.version
        # the task keeps the weights alive until the searcher has loaded them
        tasks = [SearcherTask("start", ref, weights=newest)]
        self.handles.append(SearcherHandle(slot, actor, version, tasks, self._calls))

    def replace(self, handle: SearcherHandle, lost: bool = False) -> list[SearcherHandle]:
        """End a searcher, or all searchers of its `lost` machine; return those that have ended.

        `restart` starts others in their slots, or where Ray has room on other machines.
        """
        self.restarts_left -= 1
        ended = [handle]
        if lost:
            ended = [each for each in self.handles if each.machine == handle.machine]
        for each in ended:
            each.kill()
            self.handles.remove(each)
            slot = self._calls("look for another machine", each.slot.anew) if lost else each.slot
            self._vacancies.append((slot, self._clock()))
        return ended

    def restart(self) -> None:
        """Start the queued searchers that are due and for which there is room.

        NoAnswerError if, for too long, fewer searchers have run than the range requires.
        """
        now = self._clock()
        for slot, at in [*self._vacancies]:  # a copy: the loop changes the list
            if at > now:
                continue
            self._vacancies.remove((slot, at))
            if slot.group is None:
                self.start(slot)
            elif machine := self._calls("look for room", slot.machine):
                self.start(slot)
                self.handles[-1].machine = machine
            else:
                self._vacancies.append((slot, now + LOOK))
        running = len(self.running())
        wanted = self._settings.searchers
        limit = self._settings.start_deadline
        if isinstance(wanted, int) or running >= wanted[0]:
            self._enough = self._clock()
        elif self._clock() - self._enough > limit:
            raise NoAnswerError(
                f"for runtime.start_deadline = {limit:g} s, only {running} searchers have run, but"
                f" runtime.searchers = {[*wanted]}: add machines (`ray status` lists the"
                " present ones), or lower runtime.searchers"
            )

    def running(self) -> list[SearcherHandle]:
        """Return the searchers that have started."""
        return [handle for handle in self.handles if not handle.has("start")]

    def least_busy_first(self) -> list[SearcherHandle]:
        return sorted(self.handles, key=lambda handle: len(handle.work()))

    def tasks(self) -> dict[Any, tuple[SearcherHandle, SearcherTask]]:
        """Start the deadlines that are due, and return all open calls by their Ray reference."""
        for handle in self.handles:
            handle.begin(self._settings.concurrent_searches)
        return {task.ref: (handle, task) for handle in self.handles for task in handle.tasks}

    def late(self) -> dict[SearcherHandle, str]:
        """Return the searchers that have missed a deadline, with a description of it."""
        late = {}
        for handle in self.handles:
            for task in handle.tasks:
                limit = self._deadlines[task.kind]
                if task.began is not None and time.monotonic() - task.began > limit:
                    late[handle] = f"did not finish `{task.kind}` in {limit:g} s"
        return late

    def send_newest(self) -> None:
        """Send the newest weights to all searchers that have older ones and can accept them now."""
        newest = self.newest
        if newest is None or self._settings.lag is not None:
            return
        tasks = [task for handle in self.handles for task in handle.tasks]
        on_their_way = {task.weights for task in tasks if task.kind == "publish"}
        if newest not in on_their_way and len(on_their_way) >= PUBLISHED:
            return
        for handle in self.handles:
            if handle.version != newest.version and handle.accepts_weights(len(self.handles)):
                handle.send(newest, self.published_at)

    def phase(self, evaluations: "Evaluations", arrived: int, wanted: int) -> str:
        """Describe what the trainer waits for: groups, if `wanted` is not 0, or evaluations."""
        if all(handle.has("start") for handle in self.handles):
            return "starting the searchers, which load the model"
        phases = [f"generating {arrived}/{wanted} prompts"] if wanted else []
        phases += [f"evaluating {evaluations.percent()} %"] if evaluations.open else []
        return ", ".join(phases) or "waiting for the searchers"


class Evaluations:
    """Divides evaluations into pieces, which may end in any order, and joins their results.

    Evaluations are handed out in order. A newer one replaces the last one, unless that has started
    or is the only one; a replaced one ends without scores.
    """

    def __init__(self, setup: SearchSetup):
        self._count = len(pieces_of(setup))
        self.open: list[EvaluationInProgress] = []  # in the order in which they were requested
        self._ended: list[Evaluation] = []
        self.left_out = 0  # evaluations that were replaced

    def request(self, weights: Publication, step: int) -> None:
        if len(self.open) > 1 and len(self.open[-1].waiting) == self._count:
            replaced = self.open.pop()
            self._ended.append(Evaluation(replaced.weights.version, {}, [], replaced.step))
            self.left_out += 1
            if self.left_out == 1:
                log.warning(
                    "evaluations take longer than eval.every: one that has not started is skipped"
                    " when the next one is due"
                )
        self.open.append(EvaluationInProgress(weights, step, deque(range(self._count))))

    def handed_out(self) -> bool:
        """Return whether all pieces of the requested evaluations have been handed out."""
        return not any(evaluation.waiting for evaluation in self.open)

    def percent(self) -> int:
        """Return the completed percentage of the open evaluations."""
        done = sum(len(evaluation.results) for evaluation in self.open)
        return 100 * done // max(1, len(self.open) * self._count)

    def take(self) -> Piece | None:
        """Return a piece to hand out, or None."""
        for evaluation in self.open[:UNDER_WAY]:
            if evaluation.waiting:
                return Piece(evaluation.waiting.popleft(), evaluation)
        return None

    def put_back(self, piece: Piece) -> None:
        """Hand this piece out again, because its searcher was lost."""
        piece.evaluation.waiting.appendleft(piece.number)

    def done(self, piece: Piece, result: EvaluatedPiece) -> None:
        """Record the result of a piece; the last one ends its evaluation."""
        evaluation = piece.evaluation
        evaluation.results[piece.number] = result
        if len(evaluation.results) == self._count:
            in_order = [evaluation.results[number] for number in range(self._count)]
            scored = join(evaluation.weights.version, in_order)
            self._ended.append(replace(scored, requested=evaluation.step))
            self.open.remove(evaluation)

    def collect(self) -> list[Evaluation]:
        """Return the evaluations that have ended since the last call."""
        ended = self._ended
        self._ended = []
        return ended
