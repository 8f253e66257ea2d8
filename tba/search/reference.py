"""The reference model: log-probs under the initial weights, or the weights of the last reset."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import numpy as np
import torch

from tba.learn.policy import Policy
from tba.models import lora
from tba.types import Completion, collate_tokens, marks_of
from tba.weights import Weights, load_weights


class Reference:
    """A policy that is not trained. `version` is its weights' version; 0 is the initial model.

    In a LoRA run it is the policy's model without its adapter, or with a frozen one. Searches and
    `load_weights` may run in several threads. `exclusive` gives exclusive use of the model, because
    it may belong to an engine.
    """

    def __init__(
        self,
        policy: Policy,
        token_budget: int,
        exclusive: Callable[[], AbstractContextManager[Any]] | None = None,
    ):
        self.policy = policy
        self.version = 0
        self._is_adapted = lora.is_adapted(policy.model)
        self._token_budget = token_budget
        lock = Lock()  # weights are not replaced during a forward pass
        self._exclusive = exclusive or (lambda: lock)

    def load_weights(self, weights: Weights) -> None:
        """Replace all weights with a policy's; if that raises, keep the old ones."""
        load = lora.load_reference if self._is_adapted else load_weights
        with self._exclusive():
            load(self.policy.model, weights)
            self.version = weights.version

    @torch.inference_mode()
    def logp(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[Completion]],
        temperature: float | None = None,
    ) -> tuple[list[list[np.ndarray]], int]:
        """Return log-probs of each prompt's responses, [T] for T tokens, and their version.

        They are at the sampling temperature unless another one is given, and 0 for tokens that were
        not sampled. Groups with the same number of responses run together.
        """
        by_samples = defaultdict(list)
        for i, group in enumerate(responses):
            by_samples[len(group)].append(i)
        parts = []  # indices of groups, such that one response of each fits the token budget
        for places in by_samples.values():
            longest = max(len(prompts[i]) + len(c.tokens) for i in places for c in responses[i])
            size = max(1, self._token_budget // longest)
            parts += [places[first : first + size] for first in range(0, len(places), size)]
        logp: list[list[np.ndarray]] = [[] for _ in responses]
        in_use: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        if self._is_adapted:
            in_use = lora.reference_weights
        # the version is read under the lock: another thread may load other weights afterwards
        with self._exclusive(), in_use(self.policy.model):
            for part in parts:
                tokens = [[c.tokens for c in responses[i]] for i in part]
                marks = [[marks_of(c) for c in responses[i]] for i in part]
                batch = collate_tokens([prompts[i] for i in part], tokens, marks)
                every = batch.pieces(self._token_budget, self.policy.share_prompt)
                logps = [self.policy.logp(piece, temperature) for piece in every]
                arrays = torch.cat(logps, 1).float().cpu().numpy()
                for i, rows in zip(part, arrays, strict=True):
                    pairs = zip(rows, responses[i], strict=True)
                    logp[i] = [row[: len(c.tokens)].copy() for row, c in pairs]
            return logp, self.version


class EngineReference(Reference):
    """Reference of an engine whose log-probs depend on neither weights nor temperature.

    It returns the engine's log-probs.
    """

    def __init__(self) -> None:
        self.version = 0

    def load_weights(self, weights: Weights) -> None:
        self.version = weights.version

    def logp(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[Completion]],
        temperature: float | None = None,
    ) -> tuple[list[list[np.ndarray]], int]:
        return [[c.logp for c in group] for group in responses], self.version
