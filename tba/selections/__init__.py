"""Contract of selections, which choose the next prompts. Each other file is one selection."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tba.config.tables import FILLED_IN
from tba.prompt import Prompt

if TYPE_CHECKING:  # it imports PyTorch
    from tba.types import Group


class Selection(Protocol):
    """Chooses prompts endlessly; choices depend on the seed, earlier choices, and groups."""

    def choose(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts. A prompt that is in flight may be chosen again."""

    def learn(self, group: "Group") -> None:
        """Record the answers to a prompt."""

    def state(self) -> dict[str, Any]:
        """Return everything that later choices depend on, as a JSON-compatible copy."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""


@dataclass
class CountedSelection:
    """A selection that depends on the seed and the number of earlier choices only."""

    prompts: Sequence[Prompt] = field(metadata=FILLED_IN)
    seed: int = field(metadata=FILLED_IN)
    pass_reward: float | None = field(metadata=FILLED_IN)
    _chosen: int = field(default=0, init=False)

    def learn(self, group: "Group") -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"chosen": self._chosen}

    def restore(self, state: dict[str, Any]) -> None:
        self._chosen = state["chosen"]


@dataclass
class InterleavedSelection:
    """Prompts of several selections, interleaved in proportion to weights.

    Smooth weighted round-robin: at each turn, every source gains credit equal to its weight; the
    source with the most credit is chosen, and pays the sum of all weights. It is never more than
    one prompt behind its share.
    """

    selections: Mapping[str, Selection]
    weights: Mapping[str, float]
    source: Callable[[Prompt], str]
    """Returns the source that a prompt belongs to."""
    _credit: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self._credit = dict.fromkeys(self.selections, 0.0)

    def choose(self, count: int) -> list[Prompt]:
        turns = []
        for _ in range(count):
            for name in self._credit:
                self._credit[name] += self.weights[name]
            turns.append(max(self._credit, key=self._credit.__getitem__))
            self._credit[turns[-1]] -= sum(self.weights.values())
        chosen = {}
        for name, selection in self.selections.items():
            chosen[name] = iter(selection.choose(turns.count(name)))
        return [next(chosen[name]) for name in turns]

    def learn(self, group: "Group") -> None:
        self.selections[self.source(group.prompt)].learn(group)

    def state(self) -> dict[str, Any]:
        states = {name: selection.state() for name, selection in self.selections.items()}
        return {"credit": dict(self._credit), "sources": states}

    def restore(self, state: dict[str, Any]) -> None:
        self._credit = dict(state["credit"])
        for name, selection in self.selections.items():
            selection.restore(state["sources"][name])
