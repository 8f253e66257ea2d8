"""Contract of a trainer: everything that loop, checkpoint and runtime know about it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tba.config.schema import Config
from tba.types import Batch
from tba.weights import Publication

MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256}
"""Bytes of AdamW's moments per parameter, by `trainer.optimizer`."""


@dataclass(frozen=True)
class TrainerSizes:
    """Sizes of a trainer's model."""

    parameters: int
    trained: int
    """Trainable parameters: all, or only the adapter's."""
    published_bytes: int
    """Bytes of one publication of the weights."""


def checkpoint_size(config: Config, sizes: TrainerSizes) -> int:
    """Return the size of a checkpoint without the replay buffer, in bytes."""
    weights = 4 * sizes.trained  # with bf16 weights, half of it is in the optimizer's file
    searcher = sizes.published_bytes if config.runtime.use == "local" else 0
    reference = weights if config.policy.reset_reference_every else 0
    moments = round(MOMENTS[config.trainer.optimizer] * sizes.trained)
    return weights + moments + searcher + reference


class Trainer(Protocol):
    """Owner of the master weights and the optimizer."""

    @property
    def computes_in_bf16(self) -> bool:
        """Return whether passes run in bf16; searchers must match, or log-probs differ."""

    @property
    def sizes(self) -> TrainerSizes:
        """Sizes of the model."""

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        """Take one step on the mean loss of the groups; on StepError, no weight has changed."""

    def send(self, version: int) -> Publication:
        """Put the weights, with their probe, where all searchers can receive them."""

    def copy(self, version: int) -> Callable[[], Publication]:
        """Copy the weights now and return a function that does what `send` does.

        The function may run in another thread while training continues.
        """

    def reference(self, version: int) -> Publication:
        """Send the weights in fp32 as a reference, whose log-probs are then as in the trainer."""

    def save(self, folder: Path) -> Callable[[], None]:
        """Copy the whole state now and return the function that writes it into `folder`.

        The function may run in another thread while training continues. It writes the model as a
        Hugging Face folder `model/`, without the tokenizer.
        """

    def load(self, folder: Path) -> None:
        """Restore a state that `save` wrote; ValueError, before any change, for another model."""
