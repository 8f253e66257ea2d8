"""The contract of selections, which choose the next prompts. Each other file is one selection."""

from typing import Any, Protocol, runtime_checkable

from tba.types import Group, Prompt


@runtime_checkable
class Selection(Protocol):
    """An endless choice of prompts.

    The same seed, choices and groups lead to the same choices, also after `restore`.
    """

    def choose(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts. A prompt that is in flight may be chosen again."""

    def learn(self, group: Group) -> None:
        """Record how a prompt was answered."""

    def state(self) -> dict[str, Any]:
        """Return all that later choices depend on, as JSON that shares nothing with this object."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""
