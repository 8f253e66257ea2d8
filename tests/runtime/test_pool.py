"""Searchers that are slow or fail: few copies of weights, patient restarts, no prompt twice."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exact import toy_config

from tba.config.tables import RuntimeTable
from tba.errors import EngineError, NoAnswerError, SearchError
from tba.runtime import SearchJob
from tba.runtime.deadline import Calls, bind_ray
from tba.runtime.placement import Place
from tba.runtime.shared_memory import SharedMemory
from tba.search.prompts import SearchState
from tba.search.result import SearchResult, SearchStats
from tba.setup.setup import check
from tba.types import Group
from tba.weights import Publication, Weights

bind_ray(None)

from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError  # noqa: E402

from tba.runtime import cluster as cluster_module  # noqa: E402
from tba.runtime import ray as ray_module  # noqa: E402
from tba.runtime.cluster import Buckets, ObjectStore, Slot  # noqa: E402
from tba.runtime.pool import LOOK, PUBLISHED, Pool, SearcherHandle  # noqa: E402

SECONDS = 20.0
"""Deadline of every wait in these tests."""


@dataclass(eq=False)
class Call:
    """Ray's reference to a call with these arguments to a searcher in this slot."""

    slot: Slot
    arguments: tuple[Any, ...]


@dataclass
class Method:
    """Method of a searcher in another process that does not end by itself."""

    slot: Slot

    def options(self, concurrency_group: str) -> "Method":
        return self

    def remote(self, *arguments: Any) -> Any:
        return Call(self.slot, arguments)


class Actor:
    def __init__(self, slot: Slot):
        self.search = self.evaluate = self.load_weights = Method(slot)


@dataclass
class Clock:
    """Clock that stands still."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls(SECONDS)
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def slot(core: int) -> Slot:
    return Slot(Place("cpu", (core,)), {})


def start(pool: Pool, slot: Slot) -> None:
    """Start a searcher that is ready at once, on another machine if its core is above 1."""
    machine = "far" if slot.place.cores > (1,) else "here"
    handle = SearcherHandle(slot, Actor(slot), 0, [], pool._calls, machine=machine)
    pool.handles.append(handle)


@pytest.fixture
def pool(
    tiny_model: Path,
    tmp_path: Path,
    calls: Calls,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> Pool:
    monkeypatch.setattr(Pool, "start", start)
    pool = Pool(lambda slot, newest: (None, None), RuntimeTable(), calls, clock)
    pool.fill([slot(core) for core in range(12)])
    return pool


def sent(pool: Pool) -> set[int]:
    """Return the versions of the weights that are on their way."""
    tasks = [task for one in pool.handles for task in one.tasks]
    return {task.weights.version for task in tasks if task.weights is not None}


def test_slow_searchers_keep_few_versions_of_the_weights(pool):
    """One of them takes each version, and the others none before the last."""
    for version in range(1, 40):
        pool.newest = Publication(version, None)
        for one in pool.handles:
            one.sent = -np.inf
        pool.send_newest()
        assert len(sent(pool)) <= PUBLISHED
        pool.handles[version % 12].tasks.clear()
    assert {h.version for h in pool.handles if h.has("publish")} <= set(range(1, 40))
    for one in pool.handles:
        one.tasks.clear()
        one.sent = -np.inf
    pool.send_newest()
    assert {one.version for one in pool.handles} == {39} and sent(pool) == {39}


class Wish:
    """Request for room on a machine, which Ray grants when a test says so."""

    group = object()
    place = Place("cpu")

    def __init__(self) -> None:
        self.room: str | None = None
        self.renewed: Wish | None = None

    def machine(self) -> str | None:
        return self.room

    def anew(self) -> "Wish":
        self.renewed = Wish()
        return self.renewed


@pytest.fixture
def wide(calls: Calls, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Pool of two to four searchers."""
    monkeypatch.setattr(Pool, "start", start)
    monkeypatch.setattr(SearcherHandle, "kill", lambda self: None)
    settings = RuntimeTable(searchers=(2, 4), start_deadline=30)
    return Pool(lambda slot, newest: (None, None), settings, calls, clock)


def test_a_range_has_a_searcher_wherever_there_is_room(wide, clock):
    wishes: list[Any] = [Wish() for _ in range(4)]
    wide.fill(wishes)
    wishes[0].room = wishes[2].room = "one"
    wide.restart()
    assert [handle.machine for handle in wide.handles] == ["one", "one"]
    wishes[1].room = wishes[3].room = "other"
    wide.restart()  # Ray is not asked again at once
    assert len(wide.handles) == 2
    clock.now += LOOK
    wide.restart()
    assert Counter(handle.machine for handle in wide.handles) == {"one": 2, "other": 2}
    restarts = wide.restarts_left
    on_other = next(handle for handle in wide.handles if handle.machine == "other")
    assert len(wide.replace(on_other, lost=True)) == 2 and len(wide.handles) == 2
    assert wide.restarts_left == restarts - 1
    for _ in range(3):
        clock.now += LOOK
        wide.restart()
    assert len(wide.handles) == 2  # none on the machine that is lost
    wishes[3].renewed.room = "third"
    clock.now += LOOK
    wide.restart()
    assert [handle.machine for handle in wide.handles] == ["one", "one", "third"]
    wide.replace(wide.handles[0])
    assert len(wide.handles) == 2
    wide.restart()  # where it was
    assert [handle.machine for handle in wide.handles] == ["one", "third", "one"]


def test_too_few_searchers_for_too_long_end_the_run(wide, clock):
    wishes: list[Any] = [Wish() for _ in range(4)]
    wide.fill(wishes)
    wishes[0].room = wishes[1].room = "one"
    for _ in range(3):
        clock.now += 29
        wide.restart()
    wide.replace(wide.handles[0], lost=True)
    clock.now += 29
    wide.restart()
    clock.now += 2
    with pytest.raises(NoAnswerError, match=r"start_deadline = 30 s, only 0 .*= \[2, 4\]"):
        wide.restart()


Opens = Callable[..., ray_module.RaySearchers]


@pytest.fixture
def opens(
    tiny_model: Path, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opens]:
    """A function that opens searchers on a Ray whose calls end as two other functions say."""
    opened: list[ray_module.RaySearchers] = []

    def open_searchers(
        ended: Callable[[list[Call]], list[Call]],
        received: Callable[[Call], SearchResult],
        *settings: str,
        searchers: int = 1,
    ) -> ray_module.RaySearchers:
        monkeypatch.setattr(SearcherHandle, "kill", lambda self: None)
        monkeypatch.setattr(Pool, "start", start)
        monkeypatch.setattr(ray_module, "ended", ended)
        monkeypatch.setattr(ray_module, "received", received)
        parts = check(toy_config(tiny_model, tmp_path, "runtime.use=ray", *settings))
        stream = parts.prompt_stream()
        job = SearchJob(parts.search_setup(), stream)
        cluster: Any = SimpleNamespace(
            connection=SimpleNamespace(calls=calls),
            transport=SharedMemory(),
            machine="here",
            searchers=[slot(core) for core in range(searchers)],
        )
        state = SearchState(stream.cursor(), 0, SearchStats(), None, None)
        opened.append(ray_module.RaySearchers(job, cluster, False, state, None))
        assert opened[0].gather(0) == []  # the first call lets the searches begin
        return opened[0]

    yield open_searchers
    for searchers in opened:
        searchers.close()


def found(call: Call) -> SearchResult:
    groups = [Group(p, np.array([1], np.int32), ()) for p in call.arguments[0]]
    return SearchResult(groups, SearchStats(Counter(samples_generated=len(groups))))


def one_ends(refs: list[Call]) -> list[Call]:
    """One call after another ends, first those to the first searcher."""
    time.sleep(0.01)
    searches = [ref for ref in refs if len(ref.arguments) == 4]
    return sorted(searches, key=lambda ref: ref.slot.place.cores)[:1]


def test_a_result_of_a_searcher_that_was_replaced_is_not_taken(opens, monkeypatch):
    """Two results of one searcher are there at once, and the first leads to its restart.

    The prompts of both are issued again: taking the second would count its prompts twice.
    """
    numbers, together = count(), threading.Event()

    def ended(refs: list[Call]) -> list[Call]:
        searches = [ref for ref in refs if len(ref.arguments) == 4]
        if next(numbers) == 0:
            assert len(searches) >= 2
            together.set()
            return searches
        return searches[:1]

    def received(ref: Call) -> SearchResult:
        if ref.arguments[1] == first_seed[0]:
            raise EngineError("out of memory")
        return found(ref)

    first_seed: list[int] = []
    search = SearcherHandle.search

    def remember(self: SearcherHandle, prompts: Any, seed: int, *rest: Any) -> None:
        first_seed.append(seed)
        search(self, prompts, seed, *rest)

    monkeypatch.setattr(SearcherHandle, "search", remember)
    searchers = opens(ended, received, "runtime.max_restarts=1")
    assert together.wait(SECONDS)
    gathered = [group.prompt.id for group in searchers.gather(30)]
    searchers.close()
    assert searchers.stats.counts["searchers/restarts"] == 1
    assert len(gathered) == len(set(gathered)) >= 30
    cursor = searchers.state().cursor
    arrived = {p.id for prompts, _ in searchers._results.values() for p in prompts}
    assert not set(gathered) & set(cursor["outstanding"]) and arrived <= {*cursor["outstanding"]}
    assert cursor["state"]["chosen"] == len(gathered) + len(cursor["outstanding"])


def raised(error: Exception) -> Exception:
    """Return an error of a searcher's process as Ray raises it here."""
    traceback = f"Traceback (most recent call last):\n{error!r}"
    return RayTaskError("search", traceback, error, "searcher", 1, "::1").as_instanceof_cause()


def test_an_error_in_code_or_settings_is_one_before_which_the_run_is_saved(opens):
    def received(ref: Call) -> SearchResult:
        raise raised(RuntimeError("CUDA out of memory"))

    searchers = opens(one_ends, received)
    with pytest.raises(SearchError, match=r"failed in `search`:(.|\n)*CUDA out of memory"):
        searchers.gather(3)
    assert searchers.stats.counts["searchers/restarts"] == 0


@pytest.mark.parametrize("error", [GetTimeoutError("slow"), ObjectLostError("ab", None, "")])
def test_weights_that_do_not_arrive_cost_one_searcher_a_restart(opens, monkeypatch, error):
    def get(reference: Any, timeout: float) -> Weights:
        raise error

    monkeypatch.setattr(cluster_module.ray, "get", get)
    numbers = count()

    def received(ref: Call) -> SearchResult:
        if next(numbers) == 0:
            try:
                ObjectStore(2.5).receive(Publication(3, Buckets([], None)))
            except Exception as in_searcher:
                raise raised(in_searcher) from None
        return found(ref)

    searchers = opens(one_ends, received)
    assert len(searchers.gather(3)) >= 3
    assert searchers.stats.counts["searchers/restarts"] == 1
    with pytest.raises(EngineError, match=r"version 3 did not arrive .*task_deadline, now 2\.5 s"):
        ObjectStore(2.5).receive(Publication(3, Buckets([], None)))


def test_large_weights_are_several_objects(monkeypatch):
    """A part is put as soon as the next tensor would not fit."""
    stored: list[dict[str, np.ndarray]] = []

    def put(bucket: dict[str, np.ndarray]) -> int:
        stored.append(bucket)
        return len(stored) - 1

    monkeypatch.setattr(cluster_module, "BUCKET", 100)
    monkeypatch.setattr(
        cluster_module.ray, "get", lambda references, timeout: [stored[r] for r in references]
    )
    tensors = {"a": torch.ones(10), "b": torch.ones(15), "c": torch.ones(40), "d": torch.ones(1)}
    transport = ObjectStore(2.5, put)
    sent = transport.send(3, tensors.items(), None)
    assert [[*bucket] for bucket in stored] == [["a", "b"], ["c"], ["d"]]
    assert sent.nbytes == 4 * 66
    weights = transport.receive(sent)
    assert weights.version == 3 and [*weights.arrays] == [*tensors]


def test_a_reference_that_was_sent_is_in_the_checkpoint(opens):
    """Also if Ray is lost: it is in memory that the train loop maps."""
    searchers = opens(one_ends, found)
    searchers.reset_reference(SharedMemory().send(3, [("parameter", torch.ones(2, 3))], None))
    reference = searchers.state().reference
    assert reference is not None and reference.version == 3
    np.testing.assert_array_equal(reference.arrays["parameter"], np.ones((2, 3)))


def test_searches_that_end_a_run_in_lockstep_are_repeated_with_the_same_numbers(opens):
    """Whatever has arrived before the failure: the resumed run is reproducible."""
    numbers = count()

    def received(call: Call) -> SearchResult:
        if next(numbers) == 1:
            raise SearchError("it is lost")
        return found(call)

    searchers = opens(one_ends, received, "runtime.lag=0", "runtime.publish_every=1")
    with pytest.raises(SearchError, match="it is lost"):
        searchers.gather(9)
    state = searchers.state()
    assert state.tasks == 0
    assert len({*state.cursor["outstanding"]}) == state.cursor["state"]["chosen"] == 9


def test_searchers_of_a_lost_machine_are_one_failure(opens, monkeypatch):
    """Two of four die. Their prompts are issued again, and are not to blame."""
    asked: list[str] = []

    def is_lost(machine: str) -> bool:
        asked.append(machine)
        return True

    def last_ends(refs: list[Call]) -> list[Call]:
        time.sleep(0.01)
        searches = [ref for ref in refs if len(ref.arguments) == 4]
        return sorted(searches, key=lambda ref: ref.slot.place.cores)[-1:]

    def received(ref: Call) -> SearchResult:
        if not asked:
            raise RayActorError()
        return found(ref)

    monkeypatch.setattr(ray_module, "is_lost", is_lost)
    searchers = opens(last_ends, received, "runtime.max_restarts=1", searchers=4)
    gathered = [group.prompt.id for group in searchers.gather(30)]
    assert len(gathered) == len(set(gathered)) >= 30
    assert searchers.stats.counts["searchers/restarts"] == 1 and asked == ["far"]
    assert searchers.stats.counts["searchers/quarantined"] == 0
    assert searchers.stats.latest["searchers/running"] == 4
