"""The stream of prompts to search. Prompts whose search was lost are issued again."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import shorten
from typing import Any, NotRequired, TypedDict

from tba.errors import RewardError
from tba.prompt import Prompt
from tba.search.result import SearchStats
from tba.selections import InterleavedSelection, Selection
from tba.types import Group
from tba.weights import Weights

log = logging.getLogger(__name__)

MAX_QUARANTINED_CHOICES = 1000
"""Consecutive times that a selection may choose only prompts in quarantine."""


class Cursor(TypedDict):
    """Position of a stream, as JSON: the selection's class and state, and outstanding prompts."""

    selection: str
    state: dict[str, Any]
    outstanding: list[str]
    """Ids of prompts that were handed out and whose groups have not been received yet."""
    data: str
    """sha256 of all prompts; the groups in the buffer belong to them."""
    deaths: NotRequired[dict[str, int]]
    """Number of consecutive processes that ended while searching or scoring a prompt, by its id."""


class PromptStream:
    """Endless stream of the selection's prompts, which records the prompts in flight.

    A prompt is left out after `quarantine` consecutive deaths; 0: never.
    """

    def __init__(self, prompts: Sequence[Prompt], selection: Selection, quarantine: int = 2):
        self._prompts = {p.id: p for p in prompts}
        self._selection = selection
        if isinstance(selection, InterleavedSelection):  # all have the same class
            selection = next(iter(selection.selections.values()))
        self._name = f"{type(selection).__module__}.{type(selection).__qualname__}"
        self._again: list[str] = []
        self._outstanding: list[str] = []
        self._quarantine = quarantine
        self._deaths: Counter[str] = Counter()

    def take(self, count: int) -> list[Prompt]:
        """Hand out the next prompts, beginning with those that were put back.

        Returns `count` prompts, or fewer if the selection chooses only prompts in quarantine.
        """
        again = [name for name in self._again if not self._is_left_out(name)]
        self._again = again[count:]
        taken = [self._prompts[name] for name in again[:count]]
        for _ in range(MAX_QUARANTINED_CHOICES):
            missing = count - len(taken)
            if not missing:
                break
            choice = self._selection.choose(missing)
            if len(choice) != missing or any(p.id not in self._prompts for p in choice):
                raise ValueError(
                    f"selection {self._name}: choose({missing}) returned {len(choice)} prompts; it"
                    f" must return exactly {missing} of the prompts that it was built with"
                )
            taken += [p for p in choice if not self._is_left_out(p.id)]
        if count and not taken:
            raise RewardError(
                "every prompt that the selection chooses is in quarantine, because the process that"
                " scored or searched it ended several times in a row; fix the reward function, and"
                " resume with reward.quarantine=0"
            )
        self._outstanding += [p.id for p in taken]
        return taken

    def _is_left_out(self, name: str) -> bool:
        return 0 < self._quarantine <= self._deaths[name]

    def done(
        self, prompts: Iterable[Prompt], groups: Iterable[Group], died: Container[str] = ()
    ) -> int:
        """Record a finished search; return how many of its prompts are newly quarantined.

        A prompt whose samples were all rejected has no group. `died` contains the ids of the
        prompts that ended the scoring process.
        """
        ended = []
        for prompt in prompts:
            self._outstanding.remove(prompt.id)  # once: a prompt may be outstanding several times
            if prompt.id in died:
                ended.append(prompt)
            elif not self._is_left_out(prompt.id):
                self._deaths.pop(prompt.id, None)
        for group in groups:
            self._selection.learn(group)
        return self.died(ended)

    def died(self, prompts: Iterable[Prompt]) -> int:
        """Record that a process ended while it searched or scored these prompts.

        It is unknown which of them ended it. Return how many are newly quarantined.
        """
        quarantined = 0
        for prompt in {p.id: p for p in prompts}.values():
            self._deaths[prompt.id] += 1
            if self._deaths[prompt.id] == self._quarantine:
                quarantined += 1
                log.warning(
                    "prompt %r (%s) is no longer searched: the process that scored or searched it"
                    " ended %d times in a row; to search it again, resume with reward.quarantine=0",
                    prompt.id,
                    shorten(str(prompt.text), 80),
                    self._quarantine,
                )
        return quarantined

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Hand these prompts out again, because their search was lost."""
        for prompt in prompts:
            self._outstanding.remove(prompt.id)
        self._again += [p.id for p in prompts]

    def cursor(self) -> Cursor:
        """Return the position from which `seek` continues."""
        try:  # a copy: it is written to disk while the selection continues
            state = json.loads(json.dumps(self._selection.state(), default=lambda x: x.item()))
        except (TypeError, ValueError, AttributeError) as error:
            told = f"selection {self._name}: its state is not plain JSON ({error})"
            raise ValueError(f"{told}; return numbers, text, lists and dicts") from error
        cursor = Cursor(
            selection=self._name,
            state=state,
            outstanding=self._outstanding + self._again,
            data=self._data,
        )
        if self._deaths:
            cursor["deaths"] = dict(self._deaths)
        return cursor

    def seek(self, cursor: Cursor, others: bool = False) -> None:
        """Continue from a cursor: prompts that were outstanding are handed out first.

        If it belongs to other prompts, raise ValueError, or ignore it if `others` is set.
        """
        if cursor["data"] != self._data and others:
            return
        if cursor["data"] != self._data:
            raise ValueError(
                "the task's training prompts have changed since the run began;"
                " resume with the data it was started with, or start a new run"
            )
        if cursor["selection"] == self._name:
            self._selection.restore(cursor["state"])
        else:
            text = "the run's selection was %s; it is now %s, which starts from its initial state"
            log.warning(text, cursor["selection"], self._name)
        self._again = list(cursor["outstanding"])
        self._outstanding = []
        self._deaths = Counter(cursor.get("deaths", {}))

    @cached_property  # a stream that is only checked does not need it
    def _data(self) -> str:
        return digest_of(self._prompts.values())


def digest_of(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 of prompts with their columns; ValueError if these are not plain JSON."""
    try:
        plain = json.dumps([(p.id, p.text, p.columns) for p in prompts], sort_keys=True)
    except TypeError as error:
        told = f"the columns of the task's prompts are not plain JSON ({error})"
        raise ValueError(f"{told}; they may hold only numbers, text, lists and dicts") from error
    return hashlib.sha256(plain.encode()).hexdigest()


@dataclass(frozen=True)
class SearchState:
    """State of the searchers in a checkpoint."""

    cursor: Cursor
    tasks: int  # number of the next search task
    stats: SearchStats  # statistics of all groups that were found
    weights: Weights | None  # weights to search with; None: the newest
    reference: Weights | None  # weights of the reference, if it has been reset
    delayed: tuple[Group, ...] = ()
    """Groups that are not in the buffer yet, due to a lag or a search that ended the run."""
