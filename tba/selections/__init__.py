"""The contract of selections, which choose the next prompts. Each other file is one selection."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tba.config.tables import GIVEN
from tba.prompt import Prompt

if TYPE_CHECKING:  # it imports PyTorch
    from tba.types import Group


class Selection(Protocol):
    """Chooses prompts without end, determined by the seed, earlier choices and groups."""

    def choose(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts. A prompt that is in flight may be chosen again."""

    def learn(self, group: "Group") -> None:
        """Record how a prompt was answered."""

    def state(self) -> dict[str, Any]:
        """Return all that later choices depend on, as JSON that shares nothing with this object."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""


@dataclass
class Counted:
    """A selection that depends on the seed and the number of earlier choices only."""

    prompts: Sequence[Prompt] = field(metadata=GIVEN)
    seed: int = field(metadata=GIVEN)
    pass_reward: float | None = field(metadata=GIVEN)
    _chosen: int = field(default=0, init=False)

    def learn(self, group: "Group") -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"chosen": self._chosen}

    def restore(self, state: dict[str, Any]) -> None:
        self._chosen = state["chosen"]
