"""The fake that ships: fixed answers with seeded latencies, for tests, and for studies of waiting."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tba.config.plugins import GIVEN
from tba.config.tables import PolicyTable
from tba.models.pretrained import Text
from tba.types import Completion, Sampling
from tba.weights import Weights


@dataclass
class Scripted:
    """Draws uniformly from `answers` (greedy: the first), after a pause of `latency` seconds, long-tailed when `tail` > 0.

    The pause is latency * exp(tail * normal). Answers end with EOS; log-probs are the true ones, ln(share of the answer),
    placed on the first token. It holds no weights: `load_weights` only takes the version.
    """

    policy: PolicyTable = field(metadata=GIVEN)
    text: Text = field(metadata=GIVEN)
    device: str = field(metadata=GIVEN)
    bf16: bool = field(metadata=GIVEN)
    answers: tuple[str, ...] = ("0", "1", "2", "3")
    latency: float = 0.0
    tail: float = 0.0
    version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not self.answers:
            raise ValueError(
                "engine.answers is empty; give at least one: engine.answers=['yes', 'no']"
            )

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        rng = np.random.default_rng(seed)
        time.sleep(self.latency * math.exp(self.tail * rng.normal()))
        if sampling.temperature == 0:
            return [
                [self._completion(self.answers[0], sampling.max_tokens)] * sampling.samples
                for _ in prompts
            ]
        drawn = rng.integers(len(self.answers), size=(len(prompts), sampling.samples))
        return [
            [self._completion(self.answers[i], sampling.max_tokens) for i in row] for row in drawn
        ]

    def load_weights(self, weights: Weights) -> float | None:
        self.version = weights.version
        return None

    def _completion(self, answer: str, max_tokens: int) -> Completion:
        share = self.answers.count(answer) / len(self.answers)
        whole = [
            *self.text.tokenizer(answer, add_special_tokens=False)["input_ids"],
            min(self.text.eos_ids),
        ]
        tokens = np.asarray(whole[:max_tokens], np.int32)
        logp = np.zeros(len(tokens), np.float32)
        logp[0] = math.log(share)
        return Completion(tokens, logp, len(whole) <= max_tokens, self.version)
