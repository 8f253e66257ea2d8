"""A constant lag: searchers whose groups arrive a fixed number of groups late."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from tba.runtime import Searchers, SearchState
from tba.search.result import SearchStats
from tba.types import Group


class LaggedSearchers:
    """Searchers that hold back the newest `behind` groups.

    With a batch's worth of groups gathered at each step, step v then learns from what version
    v - lag found, where `behind` = lag x the groups of a batch.
    """

    def __init__(self, searchers: Searchers, behind: int, held: Iterable[Group]):
        self._searchers, self._behind = searchers, behind
        self._held = deque(held)
        self.publish, self.reset_reference = searchers.publish, searchers.reset_reference
        self.evaluate, self.evaluations = searchers.evaluate, searchers.evaluations
        self.close = searchers.close

    @property
    def stats(self) -> SearchStats:
        return self._searchers.stats

    def gather(self, at_least: int) -> list[Group]:
        missing = max(0, self._behind - len(self._held))
        self._held.extend(self._searchers.gather(at_least + missing))
        ready = len(self._held) - self._behind  # negative when a stop has cut the search short
        return [self._held.popleft() for _ in range(ready)]

    def state(self) -> SearchState:
        return replace(self._searchers.state(), held=tuple(self._held))
