"""A searcher runs searches side by side, and keeps weights and reference fixed where it must."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba.engines._lock import SharedLock
from tba.errors import SearchError
from tba.prompt import Prompt
from tba.runs.summary import _waiting_share
from tba.runtime.actor import SearcherActor
from tba.runtime.placement import Place
from tba.search.result import SearchResult, SearchStats
from tba.search.searcher import SearchSetup
from tba.weights import Publication, Weights

SECONDS = 20
"""Deadline of every wait in these tests."""


def receive(sent: Publication) -> Weights:
    """Receive weights within a process."""
    return sent.payload


@dataclass
class Versioned:
    """Engine or reference of which only the version matters."""

    version: int = 0
    drained: float = 0.0

    def load_weights(self, weights: Weights) -> float | None:
        self.version = weights.version
        return 0.25


@dataclass
class Steps:
    """A searcher whose every search and evaluation ends when the test lets it."""

    engine: Versioned = field(default_factory=Versioned)
    reference: Versioned = field(default_factory=Versioned)
    begun: dict[Any, threading.Event] = field(default_factory=dict)
    ended: dict[Any, threading.Event] = field(default_factory=dict)
    seen: dict[Any, Any] = field(default_factory=dict)
    gradients: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("piece 0", "piece 1", *range(5)):
            self.begun[name], self.ended[name] = threading.Event(), threading.Event()

    def load_weights(self, weights: Weights) -> float | None:
        return self.engine.load_weights(weights)

    def search(self, prompts: Sequence[Prompt], seed: int) -> SearchResult:
        self._step(seed)
        return SearchResult([], SearchStats(Counter(samples_generated=1)))

    def evaluate(self, number: int) -> int:
        self._step(f"piece {number}")
        return self.engine.version

    def _step(self, name: Any) -> None:
        before = (self.engine.version, self.reference.version)
        self.gradients.append(torch.is_grad_enabled())
        self.begun[name].set()
        assert self.ended[name].wait(SECONDS)
        self.seen[name] = (before, (self.engine.version, self.reference.version))


def weights(version: int) -> Publication:
    return Publication(version, Weights(version, {}))


class Setup(SearchSetup):
    """Settings that build this searcher."""

    def __init__(self, searcher: Steps):
        object.__setattr__(self, "searcher", searcher)

    def build(self, device: str, bf16: bool) -> Any:
        return self.searcher


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def actor(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> SearcherActor:
    monkeypatch.setattr("tba.runtime.actor.evaluate_piece", Steps.evaluate)
    return SearcherActor(Setup(steps), Place("cpu"), False, {}, receive, None)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def search(
    threads: ThreadPoolExecutor,
    actor: SearcherActor,
    number: int,
    reference: Publication | None = None,
) -> Future:
    return threads.submit(actor.search, [], number, None, reference)


def wait(event: threading.Event) -> None:
    assert event.wait(SECONDS)


def test_searches_run_at_once_and_weights_arrive_under_them(actor, steps, threads):
    running = [search(threads, actor, number) for number in (0, 1)]
    for number in (0, 1):
        wait(steps.begun[number])
    threads.submit(actor.load_weights, weights(3)).result(SECONDS)
    for number in (1, 0):
        steps.ended[number].set()
        assert running[number].result(SECONDS).stats.counts["samples_generated"] == 1
    assert steps.seen[0] == ((0, 0), (3, 0))
    assert steps.gradients == [False, False]  # in every thread, not only in the first


@dataclass
class WrongSteps(Steps):
    """A searcher whose weight updates leave a gap."""

    def load_weights(self, weights: Weights) -> float | None:
        super().load_weights(weights)
        raise SearchError(f"version {weights.version}")


def test_a_wrong_searcher_returns_nothing_more(threads):
    """Neither a search that began before the weight update, nor one after it."""
    steps = WrongSteps()
    actor = SearcherActor(Setup(steps), Place("cpu"), False, {}, receive, None)
    before = search(threads, actor, 0)
    wait(steps.begun[0])
    calls = [threads.submit(actor.load_weights, weights(3))]
    wait_for(calls)
    steps.ended[0].set()
    calls += [before, search(threads, actor, 1), threads.submit(actor.load_weights, weights(4))]
    for call in calls:
        with pytest.raises(SearchError, match="version 3"):
            call.result(SECONDS)


def test_a_wrong_searcher_says_so_once_it_has_started():
    actor = SearcherActor(Setup(WrongSteps()), Place("cpu"), False, {}, receive, weights(5))
    with pytest.raises(SearchError, match="version 5"):
        actor.machine()


def test_a_machine_that_cannot_see_the_model_is_named(tmp_path):
    """Nothing is loaded, and every call says why."""
    folders = {"policy.model": str(tmp_path / "elsewhere")}
    actor = SearcherActor(Setup(Steps()), Place("cpu"), False, folders, receive, None)
    match = r"machine .* cannot see policy\.model = .*elsewhere'?: put the folder on a disk"
    for call in (actor.machine, lambda: actor.search([], 0, None, None)):
        with pytest.raises(SearchError, match=match):
            call()


def test_searches_end_with_the_reference_that_they_began_with(actor, steps, threads):
    first = search(threads, actor, 0)
    wait(steps.begun[0])
    second = search(threads, actor, 1, reference=weights(5))
    assert not steps.begun[1].wait(0.1)
    steps.ended[0].set()
    wait(steps.begun[1])
    steps.ended[1].set()
    first.result(SECONDS), second.result(SECONDS)
    assert steps.seen == {0: ((0, 0), (0, 0)), 1: ((0, 5), (0, 5))}


def test_a_piece_of_the_newest_weights_runs_beside_searches(actor, steps, threads):
    """Newer weights wait for its end, and searches that begin wait for these."""
    running = search(threads, actor, 0)
    wait(steps.begun[0])
    piece = threads.submit(actor.evaluate, 0, weights(4), None)
    wait(steps.begun["piece 0"])
    publication = threads.submit(actor.load_weights, weights(6))
    while not actor._loading.locked():
        pass
    later = search(threads, actor, 1)
    assert not steps.begun[1].wait(0.1)
    steps.ended["piece 0"].set()
    assert piece.result(SECONDS) == 4
    publication.result(SECONDS)
    wait(steps.begun[1])
    for number, future in ((0, running), (1, later)):
        steps.ended[number].set()
        future.result(SECONDS)
    assert steps.seen["piece 0"] == ((4, 0), (4, 0))
    assert steps.seen[1] == ((6, 0), (6, 0))


def test_a_piece_of_older_weights_runs_alone_and_searches_go_on_with_the_newest(
    actor, steps, threads
):
    threads.submit(actor.load_weights, weights(6)).result(SECONDS)
    running = search(threads, actor, 0)
    wait(steps.begun[0])
    pieces = [threads.submit(actor.evaluate, number, weights(4), None) for number in (0, 1)]
    while not actor._searches._entrance.locked():
        pass
    later = search(threads, actor, 1)
    assert not steps.begun["piece 0"].wait(0.1)
    for name in (0, 1, "piece 0", "piece 1"):
        steps.ended[name].set()
    for future in (running, later):
        future.result(SECONDS)
    assert [future.result(SECONDS) for future in pieces] == [4, 4]
    assert steps.seen[0] == steps.seen[1] == ((6, 0), (6, 0))
    assert steps.seen["piece 0"] == steps.seen["piece 1"] == ((4, 0), (4, 0))


def test_weights_that_arrive_while_an_older_version_is_evaluated_are_loaded_after_it(
    actor, steps, threads
):
    threads.submit(actor.load_weights, weights(6)).result(SECONDS)
    piece = threads.submit(actor.evaluate, 0, weights(4), None)
    wait(steps.begun["piece 0"])
    publication = threads.submit(actor.load_weights, weights(7))
    steps.ended["piece 0"].set()
    steps.ended[0].set()
    assert piece.result(SECONDS) == 4
    publication.result(SECONDS)
    search(threads, actor, 0).result(SECONDS)
    assert steps.seen[0] == ((7, 0), (7, 0))


def test_idle_time_and_loads_are_counted_once(actor, steps, threads):
    for number in range(4):
        steps.ended[number].set()
    threads.submit(actor.load_weights, weights(1)).result(SECONDS)
    first = search(threads, actor, 0).result(SECONDS).stats
    second = search(threads, actor, 1).result(SECONDS).stats
    assert first.seconds["load_weights"] > 0 and first.latest.get("sync/logp_gap") == 0.25
    assert second.seconds["load_weights"] == 0 and "sync/logp_gap" not in second.latest
    assert first.seconds["waiting"] > 0 and second.seconds["waiting"] > 0


def test_a_busy_searcher_is_not_idle(actor, steps, threads):
    """A search that begins beside another was not waited for."""
    running = search(threads, actor, 0)
    wait(steps.begun[0])
    steps.ended[1].set()
    second = search(threads, actor, 1).result(SECONDS).stats
    assert second.seconds["waiting"] > 0  # before the first one
    steps.ended[2].set()
    assert search(threads, actor, 2).result(SECONDS).stats.seconds["waiting"] == 0
    steps.ended[0].set()
    running.result(SECONDS)


def test_time_in_which_several_searches_run_counts_once(actor, steps, threads, monkeypatch):
    """By a clock that only this test moves: idle for 5 s, two searches for 2 s, idle for 3 s."""
    now = [actor._since]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("tba.runtime.actor.time", clock)
    now[0] += 5
    running = [search(threads, actor, number) for number in (0, 1)]
    for number in (0, 1):
        wait(steps.begun[number])
    now[0] += 2
    # checkpoints of earlier versions have `idle` and no `busy` seconds: these do not count
    stats = SearchStats.from_json({"seconds": {"idle": 90.0, "generate": 10.0}})
    for number in (0, 1):
        steps.ended[number].set()
        stats.add(running[number].result(SECONDS).stats)
    now[0] += 3
    steps.ended[2].set()
    stats.add(search(threads, actor, 2).result(SECONDS).stats)
    assert _waiting_share(stats.seconds) == pytest.approx(0.8)


def test_who_waits_to_be_alone_goes_before_those_that_share_later(threads):
    """Or an endless row of batches would keep newer weights out."""
    lock, order = SharedLock(), []
    inside, leave = threading.Event(), threading.Event()

    def share(name: str) -> None:
        with lock.shared():
            order.append(name)
            inside.set()
            assert leave.wait(SECONDS)

    def alone() -> None:
        with lock.alone():
            order.append("alone")

    first = threads.submit(share, "first")
    wait(inside)
    waiting = threads.submit(alone)
    while not lock._entrance.locked():
        pass
    later = threads.submit(share, "later")
    leave.set()
    for future in (first, waiting, later):
        future.result(SECONDS)
    assert order == ["first", "alone", "later"]
