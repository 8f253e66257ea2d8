"""Which prompt is searched next. What was handed out and did not come back is handed out again, also after a resume."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np

from tba.types import Prompt


class Cursor(TypedDict):
    """Where a stream stands, as JSON; `outstanding` are the ids of prompts handed out whose groups were not received."""

    epoch: int
    position: int
    outstanding: list[str]


class PromptStream:
    """All prompts in an order shuffled anew each epoch, without end."""

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        if not prompts:
            raise ValueError("there are no prompts to train on")
        self._prompts = {p.id: p for p in prompts}
        self._ids = list(self._prompts)
        self._seed = seed
        self._epoch, self._position = 0, 0
        self._again: list[str] = []
        self._outstanding: list[str] = []

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, those that came back unanswered first."""
        taken = [self._again.pop(0) if self._again else self._advance() for _ in range(count)]
        self._outstanding += taken
        return [self._prompts[i] for i in taken]

    def done(self, prompts: Iterable[Prompt]) -> None:
        """These were answered and their groups received."""
        for prompt in prompts:
            self._outstanding.remove(prompt.id)

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """These will not be answered by whoever had them."""
        self.done(prompts)
        self._again += [p.id for p in prompts]

    def cursor(self) -> Cursor:
        return Cursor(epoch=self._epoch, position=self._position, outstanding=self._outstanding + self._again)

    def seek(self, cursor: Cursor) -> None:
        """Goes on from there; what was outstanding is handed out first. ValueError when the data set has changed."""
        if unknown := [i for i in cursor["outstanding"] if i not in self._prompts]:
            raise ValueError(f"the checkpoint waits for prompt {unknown[0]!r}, which the data set no longer has; resume with the data it was started with")
        self._epoch, self._position = cursor["epoch"], cursor["position"]
        self._again, self._outstanding = list(cursor["outstanding"]), []

    def _advance(self) -> str:
        if self._position == len(self._ids):
            self._epoch, self._position = self._epoch + 1, 0
        if self._position == 0 or self._order_of != self._epoch:
            self._order = np.random.default_rng([self._seed, self._epoch]).permutation(len(self._ids))
            self._order_of = self._epoch
        self._position += 1
        return self._ids[self._order[self._position - 1]]

    _order: np.ndarray
    _order_of: int = -1
