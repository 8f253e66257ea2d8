"""What an objective is, and what it may ask for: parameters of its own from the trainer, rollouts from the searchers.

An objective is a plug-in: a frozen dataclass that is called with log-probabilities and a batch. It gives one loss for each
group and looks at that group only, so that micro-batches cannot change the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from tba.types import Batch

Loss = tuple[Float[Tensor, " B"], dict[str, Float[Tensor, " B"]]]
"""What an objective returns: one loss for each group, and metrics by name, one number for each group."""


@runtime_checkable
class Objective(Protocol):
    """A loss of log-probabilities."""

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss: ...


@dataclass(frozen=True)
class Head:
    """Parameters that an objective owns: a linear map from the policy's last hidden states (over sqrt(D)) to one number, 0 at first.

    `response`: of the state before each response token, [B K T], and the policy learns from it too (a value head).
    `prompt`: of the mean state of the prompt, [B], which the policy does not learn from (log Z).
    """

    on: Literal["prompt", "response"]
    learning_rate: float
    """Of AdamW; it follows the schedule of the policy's."""


@runtime_checkable
class HasHead(Protocol):
    """An objective with a head; it is called with the head's output as well."""

    @property
    def head(self) -> Head: ...

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch, head: Tensor) -> Loss: ...


@dataclass(frozen=True)
class ValueRollouts:
    """Monte-Carlo values that searchers find: `rollouts` new endings from the state before every `step_tokens`-th token."""

    rollouts: int
    step_tokens: int


@runtime_checkable
class NeedsValues(Protocol):
    """An objective that learns from `batch.value`."""

    @property
    def value_rollouts(self) -> ValueRollouts: ...


def head_of(objective: Objective | HasHead) -> Head | None:
    """Return the head that the objective owns, if any."""
    return objective.head if isinstance(objective, HasHead) else None


def value_rollouts_of(objective: Objective | HasHead) -> ValueRollouts | None:
    """Return the value estimates that the objective needs from search, if any."""
    return objective.value_rollouts if isinstance(objective, NeedsValues) else None
