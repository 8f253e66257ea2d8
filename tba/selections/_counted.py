"""The base of selections."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tba.config.plugins import GIVEN
from tba.types import Group, Prompt


@dataclass
class Counted:
    """A selection that depends on the seed and the number of earlier choices only."""

    prompts: Sequence[Prompt] = field(metadata=GIVEN)
    seed: int = field(metadata=GIVEN)
    pass_reward: float | None = field(metadata=GIVEN)
    _chosen: int = field(default=0, init=False)

    def learn(self, group: Group) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"chosen": self._chosen}

    def restore(self, state: dict[str, Any]) -> None:
        self._chosen = state["chosen"]
