"""Engines generate completions. This module is their contract; each other file is one engine."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tba.config.plugins import GIVEN
from tba.config.schema import Config
from tba.config.tables import PolicyTable
from tba.models.pretrained import Tokenizer
from tba.types import Completion, Sampling
from tba.weights import Weights


@runtime_checkable
class Engine(Protocol):
    """Generates completions with some version of the policy's weights.

    Both methods may be called from several threads at once: an actor runs several searches
    side by side, and newer weights arrive while completions are being generated. Every
    completion carries the version of the weights that began it.
    """

    version: int
    """Version of the weights that the next completion will begin with."""

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """Return `sampling.samples` completions of each prompt's tokens.

        The same seed and weights give the same completions. Temperature 0 is greedy. Log-probs are
        those at `sampling.temperature`, also where others are chosen (`explore`, `top_k`).
        """

    def load_weights(self, weights: Weights) -> float | None:
        """Load all weights or raise, leaving the old ones in place.

        Returns the mean absolute difference between the engine's and the trainer's log-probs of
        `weights.probe`, in nats, or None if there is nothing to compare.
        """


class SearchError(RuntimeError):
    """Search cannot go on. The run is saved before it ends."""


@dataclass
class Built:
    """Base of engines, with the fields that the run fills in."""

    policy: PolicyTable = field(metadata=GIVEN)
    text: Tokenizer = field(metadata=GIVEN)
    device: str = field(metadata=GIVEN)
    bf16: bool = field(metadata=GIVEN)
    """Whether the trainer computes in bf16."""


class RewardError(SearchError):
    """Fault of the reward function, of which the message has the traceback."""


class EngineError(SearchError):
    """Fault of an engine, and not of the user's code or settings: its searcher is restarted."""


@runtime_checkable
class Closes(Protocol):
    """Engine that holds memory or threads until it is closed."""

    def close(self) -> None:
        """End the engine and every call to it. It may be called twice."""


@runtime_checkable
class Checked(Protocol):
    """An engine class with requirements that are checked before any process starts."""

    @classmethod
    def check(cls, config: Config) -> None:
        """ValueError, which says what to do, if the engine cannot work with this config."""


@runtime_checkable
class CachesPrompts(Protocol):
    """An engine class that declares the block size of its prefix cache.

    The probe of a weight update has a prompt longer than a block, so that a stale block shows. For
    engines that declare nothing, it is as long as for vLLM.
    """

    longest_block: int
    """Tokens of a block, on the device where it is longest; 0 if nothing is kept."""


@runtime_checkable
class Drains(Protocol):
    """Engine that lets running completions end before it loads newer weights."""

    drained: float
    """Seconds that newer weights have waited for that, in all."""


@runtime_checkable
class KnowsLogp(Protocol):
    """Engine that does not depend on the weights, and can take the place of the reference."""

    own_reference: bool
    """Whether it does: the reference's log-probs are its own, and no reference model is loaded."""


@runtime_checkable
class LendsModel(Protocol):
    """Engine that lends its model to the reference of a LoRA run: one model instead of two."""

    model: Any
    """Model from `tba.models.lora.load_adapted`."""

    def lend(self) -> AbstractContextManager[None]:
        """Hold the model while nothing is generated and no weights arrive.

        Meanwhile the reference may disable the adapter.
        """
