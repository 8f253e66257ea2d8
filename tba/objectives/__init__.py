"""The contract of objectives: losses of log-probabilities, each in a file of this folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

PerToken = Float[Tensor, "B K T"]
PerResponse = Float[Tensor, "B K"]
PerGroup = Float[Tensor, " B"]
Loss = tuple[PerGroup, dict[str, PerGroup]]
"""One loss per group, and metrics by name with one number per group."""


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


@dataclass(frozen=True)
class ValueRollouts:
    """Value estimates by search: `rollouts` continuations before every `step_tokens`-th token."""

    rollouts: int
    step_tokens: int


class Objective:
    """Loss of log-probabilities; a subclass is a frozen dataclass, whose fields are its options.

    The loss of a group depends on that group only, so that micro-batches cannot change the result.
    """

    positive: ClassVar[Sequence[str]] = ()
    """Options that must be above 0, or None."""

    __call__: Callable[..., Loss]
    """`objective(logp, batch)` returns the loss of each group; `logp` [B K T] are the live policy's
    log-probs of the tokens. An objective with a head is called with `(logp, batch, head)`."""

    def __post_init__(self) -> None:
        for name in self.positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"objective.{name} = {value}: give a number above 0")

    @property
    def head(self) -> Head | None:
        """Return the parameters that the trainer keeps for this objective, if any."""
        return None

    @property
    def value_rollouts(self) -> ValueRollouts | None:
        """Return the value estimates that the objective reads in `batch.value`, if any."""
        return None

    @property
    def uses_behavior(self) -> bool:
        """Return whether the loss depends on `batch.behavior_logp`, with the objective's options.

        The log-probs of the sampling policy must then be exact: settings that change the
        distribution of the samples, such as `sampling.top_p`, are refused.
        """
        return False
