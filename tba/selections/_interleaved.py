"""A selection for each part of a mixture, which take turns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tba.prompt import Prompt
from tba.selections import Selection
from tba.types import Group


@dataclass
class Interleaved:
    """Prompts of several selections, interleaved in proportion to weights.

    Smooth weighted round-robin: at each turn every part gains its weight, the one with the most
    goes, and pays the sum of all weights. A part is never more than one prompt behind its share.
    """

    selections: Mapping[str, Selection]
    weights: Mapping[str, float]
    part: Callable[[Prompt], str]
    """Returns the part that a prompt belongs to."""
    _credit: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self._credit = dict.fromkeys(self.selections, 0.0)

    def choose(self, count: int) -> list[Prompt]:
        turns = [self._turn() for _ in range(count)]
        chosen = {}
        for name, selection in self.selections.items():
            chosen[name] = iter(selection.choose(turns.count(name)))
        return [next(chosen[name]) for name in turns]

    def _turn(self) -> str:
        for name in self._credit:
            self._credit[name] += self.weights[name]
        name = max(self._credit, key=self._credit.__getitem__)
        self._credit[name] -= sum(self.weights.values())
        return name

    def learn(self, group: Group) -> None:
        self.selections[self.part(group.prompt)].learn(group)

    def state(self) -> dict[str, Any]:
        parts = {name: selection.state() for name, selection in self.selections.items()}
        return {"credit": dict(self._credit), "parts": parts}

    def restore(self, state: dict[str, Any]) -> None:
        self._credit = dict(state["credit"])
        for name, selection in self.selections.items():
            selection.restore(state["parts"][name])
