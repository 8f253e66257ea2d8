"""Fake engine that ships with the package: fixed answers with seeded latencies."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from tba.engines import Engine
from tba.models.tokenizer import Tokenizer
from tba.types import Completion, Sampling, Turn
from tba.weights import Weights


@dataclass
class Scripted(Engine):
    """Draws uniformly from `answers` after a pause; a greedy completion is the first answer.

    The pause is latency * exp(tail * normal) seconds, long-tailed when `tail` > 0. Answers end with
    EOS, or with a stop string that they contain. The log-prob of an answer, ln(its share of
    `answers`), is placed on its first token. The engine holds no weights: `load_weights` only sets
    the version. With `own_reference`, the reference has the same log-probs, and no model is loaded.
    """

    longest_block: ClassVar[int] = 0
    can_sleep: ClassVar[bool] = True
    constrains: ClassVar[bool] = True
    answers: tuple[str, ...] = ("0", "1", "2", "3")
    """Answers to draw from."""
    latency: float = 0.0
    """Median pause in seconds."""
    tail: float = 0.0
    """Standard deviation of the logarithm of the pause."""
    own_reference: bool = False
    """Use the log-probs of the engine as the reference's, and load no model."""
    version: int = field(default=0, init=False)
    asleep: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.answers:
            raise ValueError("engine.answers is empty; set engine.answers=['yes', 'no']")

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        if self.asleep:
            raise RuntimeError("the engine sleeps: nothing can be generated before `wake`")
        rng = np.random.default_rng(seed)
        version = self.version  # newer weights may arrive during the pause
        time.sleep(self.latency * math.exp(self.tail * rng.normal()))
        size = (len(prompts), sampling.samples)
        if sampling.temperature == 0:
            drawn = np.zeros(size, int)
        else:
            drawn = rng.integers(len(self.answers), size=size)
        completions = [self._completion(a, sampling, version) for a in self.answers]
        return [[completions[answer] for answer in row] for row in drawn]

    def complete(self, turns: Sequence[Turn]) -> list[Completion]:
        """Draw answers; for a schema, take the first object with the keys that it requires."""
        completions: list[Completion] = []
        for turn in turns:
            if turn.schema is None:
                completions += super().complete([turn])
                continue
            keys = {*json.loads(turn.schema).get("required", ())}
            objects = [answer for answer in self.answers if answer.startswith("{")]
            following = [each for each in objects if keys <= json.loads(each).keys()]
            if not following:
                raise ValueError(f"no answer is an object with the keys {sorted(keys)}")
            completions.append(self._completion(following[0], turn.sampling, self.version))
        return completions

    def load_weights(self, weights: Weights) -> float | None:
        self.version = weights.version
        return None

    def sleep(self, keep: bool = True) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def _completion(self, answer: str, sampling: Sampling, version: int) -> Completion:
        encoded = self.text.tokenizer(answer, add_special_tokens=False)["input_ids"]
        whole = np.asarray([*encoded, self.text.eos_id], np.int32)
        end = length_to_stop(self.text, whole, sampling.stop) or len(whole)
        tokens = whole[: min(end, sampling.max_tokens)]
        logp = np.zeros(len(tokens), np.float32)
        logp[0] = math.log(self.answers.count(answer) / len(self.answers))
        return Completion(tokens, logp, end <= sampling.max_tokens, version)


def length_to_stop(text: Tokenizer, tokens: np.ndarray, stop: Sequence[str]) -> int | None:
    """Return the number of tokens up to and including the first stop string, or None."""
    lengths = range(1, len(tokens) + 1) if stop else ()
    return next((n for n in lengths if text.answer(tokens[:n], False, stop).finished), None)
