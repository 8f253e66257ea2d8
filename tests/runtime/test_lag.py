"""With a constant lag, a run gets every group, in order, a fixed number of groups late."""

from collections import deque
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from tba.prompt import Prompt
from tba.run import Run
from tba.types import Group


def groups(*names: str) -> list[Group]:
    return [Group(Prompt(name, "?"), np.array([1], np.int32), ()) for name in names]


def lagged(behind: int, *delayed: str) -> tuple[Any, Callable[[int], list[str]]]:
    """Return searchers that find groups 0, 1, 2, …, and what a run gathers so many groups late.

    They find at most `most` groups in a call, as after a stop.
    """
    numbers = count()
    searchers: Any = SimpleNamespace(most=1_000)
    searchers.gather = lambda n: groups(
        *(str(next(numbers)) for _ in range(min(n, searchers.most)))
    )
    config = SimpleNamespace(runtime=SimpleNamespace(lag=behind))
    own = {"config": config, "groups": 1, "delayed": deque(groups(*delayed))}
    run: Any = SimpleNamespace(searchers=searchers, **own)
    return searchers, lambda at_least: [group.prompt.id for group in Run.gather(run, at_least)]


def test_groups_arrive_in_order_and_late():
    _, gather = lagged(4)
    assert [gather(n) for n in (2, 2, 0, 1)] == [["0", "1"], ["2", "3"], [], ["4"]]


def test_delayed_groups_come_first():
    """After a resume, and when a search has ended the run; a lag stays what it is."""
    _, gather = lagged(2, "a", "b", "c")
    assert gather(2) == ["a", "b"] and gather(2) == ["c", "0"]
    assert lagged(0, "a", "b")[1](2) == ["a", "b"]


def test_a_stop_during_the_search_delivers_nothing_and_loses_nothing():
    searchers, gather = lagged(3)
    searchers.most = 1
    assert gather(2) == []
    searchers.most = 1_000
    assert gather(2) == ["0", "1"]
