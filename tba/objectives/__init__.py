"""The contract of objectives: losses of log-probabilities, each in a file of this folder.

An objective is a frozen dataclass. Its loss of a group depends on that group only, so that
micro-batches cannot change the result. It may ask the trainer for parameters of its own (`Head`),
and search for value estimates (`ValueRollouts`). It states whether it compares the policy with the
one that sampled (`UsesBehavior`).
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from tba.types import Batch

PerToken = Float[Tensor, "B K T"]
PerResponse = Float[Tensor, "B K"]
PerGroup = Float[Tensor, " B"]
Loss = tuple[PerGroup, dict[str, PerGroup]]
"""One loss per group, and metrics by name with one number per group."""


@runtime_checkable
class Objective(Protocol):
    """A loss of log-probabilities."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        """Return the loss of each group; `logp` are the live policy's log-probs of its tokens."""


@dataclass(frozen=True)
class Head:
    """Parameters that an objective owns: a linear map from last hidden states to one number.

    The input is divided by sqrt(D), and the weights start at 0.
    """

    on: Literal["prompt", "response"]
    """`response`: one number per response token [B K T], from the state before it, with a gradient
    to the policy. `prompt`: one number per prompt [B], from its mean state, without."""
    learning_rate: float
    """Learning rate of AdamW for the head; it follows the schedule of the policy's."""


@runtime_checkable
class HasHead(Protocol):
    """An objective with a head; it is called with the head's output as well."""

    @property
    def head(self) -> Head: ...

    def __call__(self, logp: PerToken, batch: Batch, head: Tensor) -> Loss: ...


@dataclass(frozen=True)
class ValueRollouts:
    """Value estimates by search: `rollouts` continuations before every `step_tokens`-th token."""

    rollouts: int
    step_tokens: int


@runtime_checkable
class NeedsValues(Protocol):
    """An objective that learns from `batch.value`."""

    @property
    def value_rollouts(self) -> ValueRollouts: ...


@runtime_checkable
class UsesBehavior(Protocol):
    """An objective that may read `batch.behavior_logp`, the log-probs of the sampling policy.

    Those must then be exact: search may not cut the distribution off by `sampling.top_p`.
    """

    @property
    def uses_behavior(self) -> bool:
        """Return whether the loss depends on these log-probs, with the objective's options."""


def head_of(objective: Objective | HasHead) -> Head | None:
    """Return the head that the objective owns, if any."""
    return objective.head if isinstance(objective, HasHead) else None


def value_rollouts_of(objective: Objective | HasHead) -> ValueRollouts | None:
    """Return the value estimates that the objective needs from search, if any."""
    return objective.value_rollouts if isinstance(objective, NeedsValues) else None


def uses_behavior(objective: Objective | HasHead) -> bool:
    """Return whether the objective's loss depends on the log-probs of the sampling policy."""
    return isinstance(objective, UsesBehavior) and objective.uses_behavior
