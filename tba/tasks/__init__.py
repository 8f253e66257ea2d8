"""Tasks provide prompts and score answers. This module is their contract; each other file is one task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tba.types import Answer, Prompt


@runtime_checkable
class Task(Protocol):
    """A source of prompts, and the reward of an answer.

    `pass_reward` is the least reward of a correct answer, or None if answers are not right or wrong.
    """

    @property
    def pass_reward(self) -> float | None: ...

    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on."""

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts to evaluate on; none of them is among `prompts()`."""

    def score(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Sequence[float | None]:
        """Return one reward for each answer to the prompt at the same place; None if it cannot be scored."""


class WrongLength(ValueError):
    """A reward function returned a different number of rewards than it received completions."""
