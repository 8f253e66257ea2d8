"""A constant lag between search and learning, for clean experiments."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from tba.evaluate import Evaluation
from tba.runtime import Searchers, SearchState
from tba.types import Group
from tba.weights import Weights


class Delayed:
    """Searchers whose groups are handed on in the order they came, `behind` groups later.

    With `behind` = L batches and a batch's worth of fresh groups a step, step v learns from what the weights of version v - L
    found (before step L: from what version 0 found). Weights and evaluations are not delayed.
    """

    def __init__(self, searchers: Searchers, behind: int, resumed: SearchState | None):
        self.account = searchers.account
        self._searchers, self._behind = searchers, behind
        self._held: deque[Group] = deque(() if resumed is None else resumed.held)

    def gather(self, at_least: int) -> list[Group]:
        if at_least == 0:
            return []
        missing = self._behind + at_least - len(self._held)
        self._held.extend(self._searchers.gather(missing))
        return [self._held.popleft() for _ in range(len(self._held) - self._behind)]

    def publish(self, weights: Weights) -> None:
        self._searchers.publish(weights)

    def reset_reference(self, weights: Weights) -> None:
        self._searchers.reset_reference(weights)

    def evaluate(self) -> None:
        self._searchers.evaluate()

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        return self._searchers.evaluations(finish)

    def state(self) -> SearchState:
        return replace(self._searchers.state(), held=tuple(self._held))

    def close(self) -> None:
        self._searchers.close()
