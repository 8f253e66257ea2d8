"""Contract of engines, which generate completions. Each other file is one engine."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from tba.config.schema import Config
from tba.config.tables import FILLED_IN, LOGP_NOISE_BF16, LOGP_NOISE_FP32, EngineTable, PolicyTable
from tba.models.tokenizer import Tokenizer
from tba.types import Completion, Sampling, Turn
from tba.weights import Weights


@dataclass
class Engine(ABC):
    """Base class of engines, which generate completions with the policy's weights.

    An engine must define `version`, `generate` and `load_weights`. The rest has defaults. The run
    fills in the fields of this class; the other fields of an engine are its options.

    All methods may be called from several threads at once: an actor runs several searches
    concurrently, and newer weights arrive while completions are being generated. Every
    completion carries the version of the weights with which it began.
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
    """Whether the engine has `sleep` and `wake`; otherwise `runtime.colocate=sleep` is an error."""
    longest_block: ClassVar[int] = 128
    """Tokens of a block of the prefix cache, the maximum over devices; 0 without a cache.

    The probe of a weight update has a prompt longer than a block, to detect a stale block.
    """
    joins_batches: ClassVar[bool] = False
    """Whether new turns join a running batch; otherwise they wait for the next batch."""
    explores: ClassVar[bool] = True
    """Whether log-probs are at `sampling.temperature` even if `sampling.explore` is set."""
    constrains: ClassVar[bool] = False
    """Whether `complete` can sample a turn so that it follows a JSON schema (`Turn.schema`)."""
    own_reference = False
    """Whether the engine's log-probs are the reference's, so that no reference model is loaded."""
    model: Any = field(default=None, init=False)
    """Model that the engine lends to the reference of a LoRA run: one model instead of two.

    It is from `tba.models.lora.load_adapted`; None if the engine lends none.
    """
    drained: float = field(default=0.0, init=False)
    """Total seconds that newer weights have waited for running completions to end."""

    @classmethod
    def defaults(cls, config: Config) -> Mapping[str, Any]:
        """Return the engine's defaults for settings of `[runtime]`."""
        return {}

    @classmethod
    def chosen(cls, config: Config) -> Mapping[str, Any]:
        """Return defaults of the engine's options that depend on other settings."""
        return {}

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ValueError, with advice, if the engine cannot work with this config.

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
        """Version of the weights with which the next completion will begin."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """Return `sampling.samples` completions of each prompt's tokens.

        The same seed and weights give the same completions. Temperature 0 is greedy. Log-probs are
        at `sampling.temperature`, unaffected by `explore`, `top_k` and `top_p`.
        """

    def complete(self, turns: Sequence[Turn]) -> list[Completion]:
        """Return the completion of each turn. It depends on the turn's seed, not on other turns.

        Engines override this to sample several at once, or with a schema. A ValueError is about it.
        """
        completions = []
        for turn in turns:
            alone = replace(turn.sampling, samples=1)
            completions.append(self.generate([turn.context], alone, turn.seed)[0][0])
        return completions

    @abstractmethod
    def load_weights(self, weights: Weights) -> float | None:
        """Load all weights, or raise and keep the old ones.

        Returns the mean absolute difference between the engine's and the trainer's log-probs of
        `weights.probe`, in nats, or None if there is nothing to compare.
        """

    def sleep(self, keep: bool = True) -> None:
        """Release the memory of weights and cache until `wake`, while the trainer trains.

        Meanwhile, nothing is generated and no weights arrive. Without `keep`, the weights may be
        dropped: others are loaded after `wake`, before anything is generated.
        """

    def wake(self) -> None:
        """Restore the state before `sleep`, with the same weights if they were kept."""

    def lend(self) -> AbstractContextManager[None]:
        """Hold `model`: until released, nothing is generated and no weights arrive.

        Meanwhile, the reference may disable the adapter.
        """
        return nullcontext()

    def close(self) -> None:
        """End the engine and all calls to it. May be called twice."""


def engine_in_bf16(engine: EngineTable, trainer_does: bool) -> bool:
    """Return whether an engine computes in bf16: by its option `dtype`, or like the trainer."""
    dtype = engine.options.get("dtype", "auto")
    return trainer_does if dtype == "auto" else dtype == "bf16"


def logp_gap_limit(engine: EngineTable, trainer_in_bf16: bool) -> float:
    """Return the largest allowed log-prob gap after a weight update, in nats."""
    if engine.max_logp_gap is not None:
        return engine.max_logp_gap
    in_bf16 = trainer_in_bf16 or engine_in_bf16(engine, trainer_in_bf16)
    return LOGP_NOISE_BF16 if in_bf16 else LOGP_NOISE_FP32
