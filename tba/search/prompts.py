"""The stream of prompts to search. Prompts whose search was lost are issued again."""

import hashlib
import json
import logging
from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from typing import Any, NotRequired, TypedDict

from tba.engines import RewardError
from tba.prompt import Prompt
from tba.search.quarantine import Quarantine
from tba.selections import Selection
from tba.selections._interleaved import Interleaved
from tba.types import Group

PATIENCE = 1000
"""Times in a row that a selection may choose only prompts in quarantine."""


class Cursor(TypedDict):
    """Position of a stream, as JSON: the selection's class and state, and what was handed out."""

    selection: str
    state: dict[str, Any]
    outstanding: list[str]
    """Ids of prompts that were handed out and whose groups were not received."""
    data: str
    """sha256 of all prompts, to which the contents of the buffer belong."""
    deaths: NotRequired[dict[str, int]]
    """Deaths in a row of each prompt: see `Quarantine`."""


class PromptStream:
    """Endless stream of prompts: `first`, then the selection's. It records those in flight.

    A prompt is left out after so many deaths in a row as `quarantine` says; 0: never.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        selection: Selection,
        first: Sequence[Prompt] = (),
        quarantine: int = 2,
    ):
        self._prompts = {p.id: p for p in (*prompts, *first)}
        self._selection = selection
        if isinstance(selection, Interleaved):  # all of one class
            selection = next(iter(selection.selections.values()))
        self._name = f"{type(selection).__module__}.{type(selection).__qualname__}"
        self._again = [p.id for p in first]
        self._outstanding: list[str] = []
        self._quarantine = Quarantine(quarantine)

    def take(self, count: int) -> list[Prompt]:
        """Hand out the next `count` prompts, those that were put back first; a suspect alone."""
        self._again = [i for i in self._again if i not in self._quarantine]
        again = self._again[:count]
        suspects = [i for i in again if i in self._quarantine.suspects]
        if suspects:
            again = suspects[:1]
        taken = [self._prompts[i] for i in again]
        if not suspects:
            taken += self._choose(count - len(taken))
        if count and not taken:
            raise RewardError(
                "every prompt that the selection chooses is in quarantine, because what scored or"
                " searched it ended several times in a row; fix the reward function, and resume"
                " with reward.quarantine=0"
            )
        for i in again:
            self._again.remove(i)
        self._outstanding += [p.id for p in taken]
        return taken

    def _choose(self, count: int) -> list[Prompt]:
        """Return the selection's next prompts but those in quarantine, fewer if these are many."""
        chosen: list[Prompt] = []
        for _ in range(PATIENCE):
            if len(chosen) == count:
                return chosen
            choice = self._selection.choose(count - len(chosen))
            chosen += [p for p in choice if p.id not in self._quarantine]
        return chosen

    def most(self, tasks: int) -> int:
        """Return how many of `tasks` tasks a searcher may have: one while there are suspects."""
        return 1 if self._quarantine.suspects else tasks

    def done(
        self, prompts: Iterable[Prompt], groups: Iterable[Group], died: Container[str] = ()
    ) -> int:
        """Record a finished search; return how many of its prompts are quarantined now.

        A prompt whose samples were all rejected has no group. `died` are the ids of those that have
        ended the scoring process.
        """
        quarantined = 0
        for prompt in prompts:
            self._outstanding.remove(prompt.id)  # once: a prompt may be out several times
            if prompt.id in died:
                quarantined += self._quarantine.blame(prompt)
            else:
                self._quarantine.clear(prompt)
        for group in groups:
            self._selection.learn(group)
        return quarantined

    def died(self, prompts: Iterable[Prompt]) -> int:
        """Record that a searcher ended during the search of these prompts, which go out alone next.

        Return how many of them are quarantined now.
        """
        return self._quarantine.suspect(prompts)

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Hand these prompts out again, because their search was lost."""
        for prompt in prompts:
            self._outstanding.remove(prompt.id)
        self._issue_again([*self._again, *(p.id for p in prompts)])

    def _issue_again(self, names: Iterable[str]) -> None:
        """Hand out these prompts next, and suspects before the others."""
        self._again = sorted(names, key=lambda name: name not in self._quarantine.suspects)

    def cursor(self) -> Cursor:
        """Return the position from which `seek` continues."""
        state, out = self._selection.state(), self._outstanding + self._again
        cursor = Cursor(selection=self._name, state=state, outstanding=out, data=self._data)
        if self._quarantine.deaths:
            cursor["deaths"] = dict(self._quarantine.deaths)
        return cursor

    def seek(self, cursor: Cursor) -> None:
        """Continue from a cursor: prompts that were outstanding are handed out first.

        ValueError if it belongs to other prompts.
        """
        if cursor["data"] != self._data:
            raise ValueError(
                "the task's training prompts have changed since the run began;"
                " resume with the data it was started with, or start a new run"
            )
        if cursor["selection"] == self._name:
            self._selection.restore(cursor["state"])
        else:
            text = "the run's selection was %s; it is now %s, which starts from its initial state"
            logging.getLogger(__name__).warning(text, cursor["selection"], self._name)
        out, self._outstanding = cursor["outstanding"], []
        self._quarantine = Quarantine(self._quarantine.limit, cursor.get("deaths"))
        for name in out:
            if name in self._quarantine.deaths and name not in self._quarantine:
                self._quarantine.suspects.add(name)
        self._issue_again(out)

    @cached_property  # a stream that is only checked needs none
    def _data(self) -> str:
        rows = [(p.id, p.text, p.columns) for p in self._prompts.values()]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
