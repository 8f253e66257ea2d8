"""Contract of a trainer: everything that loop, checkpoint and runtime know about it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tba.types import Batch
from tba.weights import Sent


@dataclass(frozen=True)
class TrainerSizes:
    """Sizes of a trainer's model."""

    parameters: int
    trained: int
    """Parameters that are trained: all, or those of an adapter."""
    published_bytes: int
    """Bytes of one publication of the weights."""


class Trainer(Protocol):
    """Owner of the master weights and the optimizer."""

    @property
    def computes_in_bf16(self) -> bool:
        """Return whether passes run in bf16. Searchers then compute alike, or log-probs differ."""

    @property
    def sizes(self) -> TrainerSizes:
        """Sizes of the model."""

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        """Take one step on the mean loss of the groups; NotFinite before any weight has changed."""

    def send(self, version: int) -> Sent:
        """Send the weights to all searchers, with their probe."""

    def copy(self, version: int) -> Callable[[], Sent]:
        """Copy the weights now and return the function that sends them, with their probe.

        That function may run in another thread while the trainer goes on.
        """

    def reference(self, version: int) -> Sent:
        """Send the weights in fp32, to compute log-probs with as the trainer does."""

    def save(self, folder: Path) -> Callable[[], None]:
        """Copy the whole state now and return the function that writes it into `folder`.

        That function may run in another thread while the trainer goes on. It writes the model as
        a Hugging Face folder `model/`, without the tokenizer.
        """

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote; ValueError, before any change, for another model's."""


class WrongReference(ValueError):
    """In the first step, policy and reference are not the same model; no weight has changed."""


class TrainerLost(RuntimeError):
    """A rank of the trainer has died, has failed, or is late; all ranks have ended.

    Nothing can be saved: the run goes on from its newest checkpoint.
    """


class NotFinite(RuntimeError):
    """A batch, a loss or a gradient is not finite; no weight has been changed."""
