"""Searchers with a constant lag deliver every group, in order, a fixed number of groups late."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from tba.learn import Trainer
from tba.prompt import Prompt
from tba.runtime import LaggedSearchers, SearchState
from tba.search.prompts import Cursor
from tba.search.result import Evaluation, SearchStats
from tba.types import Group
from tba.weights import Weights


@dataclass
class Numbered:
    """Searchers that find groups 0, 1, 2, ...; `most` of them in a call, as after a stop."""

    numbers: count = field(default_factory=count)
    most: int = 1_000
    found: list[str] = field(default_factory=list)
    """In a call that has not returned."""
    stats: SearchStats = field(default_factory=SearchStats)

    def gather(self, at_least: int) -> list[Group]:
        return groups(*(str(next(self.numbers)) for _ in range(min(at_least, self.most))))

    def publish(self, trainer: Trainer, version: int) -> None: ...

    def reset_reference(self, weights: Weights) -> None: ...

    def evaluate(self, step: int) -> None: ...

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        return [Evaluation(int(finish), {}, [])]

    def state(self) -> SearchState:
        cursor = Cursor(selection="", state={}, outstanding=[], data="")
        return SearchState(cursor, 3, self.stats, None, None, tuple(groups(*self.found)))

    def close(self) -> None: ...


def groups(*names: str) -> list[Group]:
    return [Group(Prompt(name, "?"), np.array([1], np.int32), ()) for name in names]


def ids(groups: list[Group]) -> list[str]:
    return [group.prompt.id for group in groups]


def test_groups_arrive_in_order_and_late() -> None:
    searchers = LaggedSearchers(Numbered(), behind=4, held=())
    assert ids(searchers.gather(2)) == ["0", "1"]  # 0 to 5 were found
    assert ids(searchers.gather(2)) == ["2", "3"]
    assert ids(list(searchers.state().held)) == ["4", "5", "6", "7"]
    assert searchers.gather(0) == []
    assert ids(list(searchers.state().held)) == ["4", "5", "6", "7"]


def test_held_groups_survive_a_resume() -> None:
    first = Numbered()
    before = LaggedSearchers(first, behind=3, held=())
    delivered = ids(before.gather(2))
    resumed = LaggedSearchers(first, behind=3, held=before.state().held)
    delivered += ids(resumed.gather(2)) + ids(resumed.gather(1))
    assert delivered == ["0", "1", "2", "3", "4"]


def test_groups_that_were_found_before_a_search_ended_the_run_come_first() -> None:
    """They count, and a lag stays what it is."""
    ended = Numbered(found=["0"])
    before = LaggedSearchers(ended, behind=2, held=groups("a", "b"))
    held = before.state().held
    assert ids(list(held)) == ["a", "b", "0"]
    after = LaggedSearchers(Numbered(count(1)), behind=2, held=held)
    assert ids(after.gather(2)) == ["a", "b"]
    assert ids(list(after.state().held)) == ["0", "1"]
    assert ids(LaggedSearchers(Numbered(count(1)), behind=0, held=held).gather(2)) == ids(
        list(held)
    )


def test_a_stop_during_the_search_delivers_nothing_and_loses_nothing() -> None:
    inner = Numbered(most=1)
    searchers = LaggedSearchers(inner, behind=3, held=())
    assert searchers.gather(2) == []
    inner.most = 1_000
    assert ids(searchers.gather(2)) == ["0", "1"]
