"""Which prompt is searched next. What was handed out and did not come back is handed out again, also after a resume."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypedDict

from tba.selections import Selection
from tba.types import Group, Prompt

log = logging.getLogger(__name__)


class Cursor(TypedDict):
    """Where a stream stands, as JSON; `outstanding` are the ids of prompts handed out whose groups were not received."""

    selection: str
    state: dict[str, Any]
    outstanding: list[str]
    data: str
    """sha256 of all prompts: what is in the buffer belongs to them."""


class PromptStream:
    """The prompts that a selection chooses, without end, and account of those that are out."""

    def __init__(self, prompts: Sequence[Prompt], selection: Selection):
        if not prompts:
            raise ValueError("there are no prompts to train on")
        self._prompts = {p.id: p for p in prompts}
        self._selection = selection
        self._again: list[str] = []
        self._outstanding: list[str] = []

    @cached_property
    def _data(self) -> str:
        """Made when it is first asked for: a stream that is only checked needs none."""
        return hashlib.sha256(
            json.dumps(
                [(p.id, p.text, p.columns) for p in self._prompts.values()], sort_keys=True
            ).encode()
        ).hexdigest()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, those that came back unanswered first."""
        again, self._again = self._again[:count], self._again[count:]
        taken = [self._prompts[i] for i in again]
        if len(taken) < count:
            taken += self._selection.choose(count - len(taken))
        self._outstanding += [p.id for p in taken]
        return taken

    def done(self, prompts: Iterable[Prompt], groups: Iterable[Group]) -> None:
        """These were answered and their groups received. A prompt whose answers were all rejected has none."""
        self._returned(prompts)
        for group in groups:
            self._selection.learn(group)

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """These will not be answered by whoever had them."""
        self._returned(prompts)
        self._again += [p.id for p in prompts]

    def cursor(self) -> Cursor:
        state, outstanding = self._selection.state(), self._outstanding + self._again
        return Cursor(
            selection=_name(self._selection), state=state, outstanding=outstanding, data=self._data
        )

    def check(self, cursor: Cursor) -> None:
        """ValueError when the data set is another one."""
        if cursor["data"] != self._data:
            raise ValueError(
                "the task's training prompts have changed since the run began; resume with the data it was started with, or start anew"
            )

    def seek(self, cursor: Cursor) -> None:
        """Goes on from there; what was outstanding is handed out first. ValueError as `check`."""
        self.check(cursor)
        if cursor["selection"] == _name(self._selection):
            self._selection.restore(cursor["state"])
        else:
            log.warning(
                "prompts were chosen by %s, and are from now on by %s, which starts afresh",
                cursor["selection"],
                _name(self._selection),
            )
        self._again, self._outstanding = list(cursor["outstanding"]), []

    def _returned(self, prompts: Iterable[Prompt]) -> None:
        for prompt in prompts:
            self._outstanding.remove(prompt.id)  # once: a prompt may be out several times


def _name(selection: Selection) -> str:
    return f"{type(selection).__module__}.{type(selection).__qualname__}"
