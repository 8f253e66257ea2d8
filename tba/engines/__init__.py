"""Engines generate completions. This module is their contract; each other file is one engine."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from tba.config.schema import Config
from tba.config.tables import FILLED_IN, LOGP_NOISE_BF16, LOGP_NOISE_FP32, EngineTable, PolicyTable
from tba.models.pretrained import Tokenizer
from tba.types import Completion, Sampling, Turn
from tba.weights import Weights


class SearchError(RuntimeError):
    """Search cannot go on. The run is saved before it ends."""


class RewardError(SearchError):
    """Fault of the reward function, of which the message has the traceback."""


class EngineError(SearchError):
    """Fault of an engine, and not of the user's code or settings: its searcher is restarted."""


@dataclass
class Engine(ABC):
    """Generates completions with some version of the policy's weights. Engines inherit from it.

    An engine must define `version`, `generate` and `load_weights`. The rest has defaults. The run
    fills in the fields of this class; the other fields of an engine are its options.

    All methods may be called from several threads at once: an actor runs several searches
    side by side, and newer weights arrive while completions are being generated. Every
    completion carries the version of the weights that began it.
    """

    policy: PolicyTable = field(metadata=FILLED_IN)
    text: Tokenizer = field(metadata=FILLED_IN)
    device: str = field(metadata=FILLED_IN)
    bf16: bool = field(metadata=FILLED_IN)
    """Whether the trainer computes in bf16."""
    sampling: Sampling = field(metadata=FILLED_IN)
    """How the searches of the run sample."""
    sleeps: bool = field(default=False, kw_only=True, metadata=FILLED_IN)
    """Whether the run will call `sleep` (`runtime.colocate`)."""

    can_sleep: ClassVar[bool] = False
    """Whether the engine has `sleep` and `wake`; the run refuses others by name."""
    longest_block: ClassVar[int] = 128
    """Tokens of a block of the prefix cache, on the device where it is longest; 0 without a cache.

    The probe of a weight update has a prompt longer than a block, so that a stale block shows.
    """
    joins_batches: ClassVar[bool] = False
    """Whether turns that come later join a running batch; else they are collected meanwhile."""
    explores: ClassVar[bool] = True
    """Whether log-probs are those at `sampling.temperature` where tokens are chosen at another."""
    own_reference = False
    """Whether the reference's log-probs are the engine's own, and no reference model is loaded."""
    model: Any = field(default=None, init=False)
    """Model that the engine lends to the reference of a LoRA run: one model instead of two.

    It is from `tba.models.lora.load_adapted`; None if the engine lends none.
    """
    drained: float = field(default=0.0, init=False)
    """Seconds that newer weights have waited for running completions to end, in all."""

    @classmethod
    def defaults(cls, config: Config) -> Mapping[str, Any]:
        """Return the settings of `[runtime]` that suit the engine where the config has none."""
        return {}

    @classmethod
    def chosen(cls, config: Config) -> Mapping[str, Any]:
        """Return options of the engine that follow from other settings, where it has none."""
        return {}

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ValueError, which says what to do, if the engine cannot work with this config.

        Called before any process starts.
        """

    @classmethod
    def check_here(cls, config: Config) -> None:
        """Raise ValueError if the engine cannot work on this machine: a library may be missing.

        Called after `check`, unless a run is planned for another machine.
        """

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights that the next completion will begin with."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """Return `sampling.samples` completions of each prompt's tokens.

        The same seed and weights give the same completions. Temperature 0 is greedy. Log-probs are
        those at `sampling.temperature`, also where others are chosen (`explore`, `top_k`).
        """

    def complete(self, turns: Sequence[Turn]) -> list[Completion]:
        """Return the completion of each turn. It depends on its seed, not on the others.

        An engine overrides this to sample several at once.
        """
        completions = []
        for turn in turns:
            alone = replace(turn.sampling, samples=1)
            completions.append(self.generate([turn.context], alone, turn.seed)[0][0])
        return completions

    @abstractmethod
    def load_weights(self, weights: Weights) -> float | None:
        """Load all weights or raise, leaving the old ones in place.

        Returns the mean absolute difference between the engine's and the trainer's log-probs of
        `weights.probe`, in nats, or None if there is nothing to compare.
        """

    def sleep(self, keep: bool = True) -> None:
        """Give up the memory of weights and cache until `wake`, while the trainer trains.

        Nothing is generated and no weights arrive meanwhile. If it need not `keep` the weights,
        others are loaded after `wake`, before anything is generated.
        """

    def wake(self) -> None:
        """Be as before `sleep`, with the same weights if they were kept."""

    def lend(self) -> AbstractContextManager[None]:
        """Hold `model` while nothing is generated and no weights arrive.

        Meanwhile the reference may disable the adapter.
        """
        return nullcontext()

    def close(self) -> None:
        """End the engine and every call to it. It may be called twice."""


class SharedLock:
    """Lock that threads hold shared or alone. A thread that waits to hold it alone goes first."""

    def __init__(self) -> None:
        self._entrance = threading.Lock()
        self._changed = threading.Condition()
        self._sharing = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._entrance:
            self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._entrance, self._changed:
            self._changed.wait_for(lambda: self._sharing == 0)
            yield

    def _count(self, change: int) -> None:
        with self._changed:
            self._sharing += change
            self._changed.notify_all()


def engine_in_bf16(engine: EngineTable, trainer_does: bool) -> bool:
    """Return whether an engine computes in bf16: by its option `dtype`, or as the trainer."""
    dtype = engine.options.get("dtype", "auto")
    return trainer_does if dtype == "auto" else dtype == "bf16"


def logp_gap_limit(engine: EngineTable, trainer_in_bf16: bool) -> float:
    """Return the largest log-prob gap, in nats, that a weight update may leave."""
    if engine.max_logp_gap is not None:
        return engine.max_logp_gap
    in_bf16 = trainer_in_bf16 or engine_in_bf16(engine, trainer_in_bf16)
    return LOGP_NOISE_BF16 if in_bf16 else LOGP_NOISE_FP32
