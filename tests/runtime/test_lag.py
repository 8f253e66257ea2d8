"""With a constant lag, a run gets every group, in order, a fixed number of groups late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from tba.prompt import Prompt
from tba.run import Run
from tba.types import Group


@dataclass
class Numbered:
    """Searchers that find groups 0, 1, 2, ...; `most` of them in a call, as after a stop."""

    numbers: count = field(default_factory=count)
    most: int = 1_000

    def gather(self, at_least: int) -> list[Group]:
        return groups(*(str(next(self.numbers)) for _ in range(min(at_least, self.most))))


def groups(*names: str) -> list[Group]:
    return [Group(Prompt(name, "?"), np.array([1], np.int32), ()) for name in names]


def ids(groups: list[Group]) -> list[str]:
    return [group.prompt.id for group in groups]


class Lagged:
    """A run of which only the searchers matter; they are so many groups behind."""

    def __init__(self, searchers: Numbered, behind: int, held: list[Group]):
        config = SimpleNamespace(
            runtime=SimpleNamespace(lag=behind), trainer=SimpleNamespace(groups=1)
        )
        self.run: Any = SimpleNamespace(config=config, searchers=searchers, held=deque(held))

    def gather(self, at_least: int) -> list[str]:
        return ids(Run.gather(self.run, at_least))

    def held(self) -> list[str]:
        return ids(list(self.run.held))


def test_groups_arrive_in_order_and_late() -> None:
    lagged = Lagged(Numbered(), behind=4, held=[])
    assert lagged.gather(2) == ["0", "1"]  # 0 to 5 were found
    assert lagged.gather(2) == ["2", "3"]
    assert lagged.held() == ["4", "5", "6", "7"]
    assert lagged.gather(0) == []
    assert lagged.held() == ["4", "5", "6", "7"]


def test_held_groups_come_first() -> None:
    """After a resume, and when a search has ended the run; a lag stays what it is."""
    lagged = Lagged(Numbered(), behind=2, held=groups("a", "b", "c"))
    assert lagged.gather(2) == ["a", "b"]
    assert lagged.held() == ["c", "0"]
    assert Lagged(Numbered(), behind=0, held=groups("a", "b")).gather(2) == ["a", "b"]


def test_a_stop_during_the_search_delivers_nothing_and_loses_nothing() -> None:
    searchers = Numbered(most=1)
    lagged = Lagged(searchers, behind=3, held=[])
    assert lagged.gather(2) == []
    searchers.most = 1_000
    assert lagged.gather(2) == ["0", "1"]
