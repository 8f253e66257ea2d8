"""However slow searchers are, few copies of weights wait for them, and no prompt counts twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy import toy_config

from tba.engines import EngineError
from tba.runs.parts import check
from tba.runtime import SearchJob, SearchState
from tba.runtime.bind import bind_ray
from tba.runtime.deadline import Calls
from tba.runtime.placement import Place
from tba.search.result import SearchResult, SearchStats
from tba.types import Group
from tba.weights import Sent

bind_ray(None)

from tba.runtime import ray as ray_module  # noqa: E402
from tba.runtime.crew import PUBLISHED, REFERENCES, Crew  # noqa: E402
from tba.runtime.handle import Handle, Starter  # noqa: E402

SECONDS = 20.0
"""Deadline of every wait in these tests."""


class Method:
    """Method of a searcher in another process that does not end by itself."""

    def options(self, concurrency_group: str) -> Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        return Call(arguments)


class Call:
    """Ray's reference to a call with these arguments."""

    def __init__(self, arguments: tuple[Any, ...]):
        self.arguments = arguments


class Actor:
    search = evaluate = publish = Method()


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls(SECONDS)
    yield made
    made.close()


@pytest.fixture
def crew(tiny_model: Path, tmp_path: Path, calls: Calls) -> Crew:
    starter: Any = SimpleNamespace(
        start=lambda place, newest: Handle(place, Actor(), 0, [], calls),
    )
    crew = Crew(starter, toy_config(tiny_model, tmp_path).runtime)
    for _ in range(12):
        crew.start(Place("cpu"))
    return crew


def test_slow_searchers_keep_few_versions_of_the_weights(crew: Crew) -> None:
    """One of them takes each version, and the others none before the last."""
    for version in range(1, 40):
        crew.newest = Sent(version, None)
        for one in crew.handles:
            one.sent = -np.inf
        crew.send_newest()
        assert crew.copies([]) <= PUBLISHED + 1
        crew.handles[version % 12].tasks.clear()
    assert {h.version for h in crew.handles if h.has("publish")} <= set(range(1, 40))
    for one in crew.handles:
        one.tasks.clear()
        one.sent = -np.inf
    crew.send_newest()
    assert {one.version for one in crew.handles} == {39} and crew.copies([]) == 1


def test_slow_searchers_keep_few_references(crew: Crew) -> None:
    used = []
    for version, one in zip(range(1, 13), crew.handles, strict=True):
        crew.newest_reference = Sent(version, None)
        one.search([], 0, None, crew.reference())
        used.append(one.tasks[0].reference)
        assert crew.copies([]) <= REFERENCES + 1
    assert [sent.version for sent in used if sent] == [1] + [2] * 11
    crew.handles[0].tasks.clear()
    assert crew.reference() == crew.newest_reference  # there is room again


def test_a_result_of_a_searcher_that_was_replaced_is_not_taken(
    tiny_model: Path, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two results of one searcher are there at once, and the first leads to its restart.

    The prompts of both are issued again: taking the second would count its prompts twice.
    """
    parts = check(toy_config(tiny_model, tmp_path, "runtime.use=ray", "runtime.max_restarts=1"))
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
        groups = [Group(p, np.array([1], np.int32), ()) for p in ref.arguments[0]]
        return SearchResult(groups, SearchStats(samples=len(groups)))

    first_seed: list[int] = []
    search = Handle.search

    def remember(self: Handle, prompts: Any, seed: int, *rest: Any) -> None:
        first_seed.append(seed)
        search(self, prompts, seed, *rest)

    monkeypatch.setattr(Handle, "search", remember)
    monkeypatch.setattr(Handle, "kill", lambda self: None)
    monkeypatch.setattr(
        Starter, "start", lambda self, place, newest: Handle(place, Actor(), 0, [], calls)
    )
    monkeypatch.setattr(ray_module, "ended", ended)
    monkeypatch.setattr(ray_module, "received", received)
    stream = parts.prompt_stream()
    job = SearchJob(parts.search_setup(), stream, parts.config.runtime, 3, 0)
    cluster: Any = SimpleNamespace(
        connection=SimpleNamespace(calls=calls),
        transport=None,
        searcher_gpus=0.0,
        searchers=[Place("cpu")],
    )
    state = SearchState(stream.cursor(), 0, SearchStats(), None, None)
    searchers = ray_module.RaySearchers(job, cluster, False, lambda: False, state, None)
    try:
        assert together.wait(SECONDS)
        gathered = [group.prompt.id for group in searchers.gather(30)]
    finally:
        searchers.close()
    assert searchers.stats.restarts == 1
    assert len(gathered) == len(set(gathered)) >= 30
    cursor = searchers.state().cursor
    in_tray = {p.id for prompts, _ in searchers._tray.values() for p in prompts}
    assert not set(gathered) & set(cursor["outstanding"]) and in_tray <= {*cursor["outstanding"]}
    assert cursor["state"]["chosen"] == len(gathered) + len(cursor["outstanding"])
