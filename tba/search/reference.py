"""The reference model: log-probs of responses under the weights that training starts from."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

import numpy as np
import torch

from tba.learn import plan
from tba.learn.policy import Policy
from tba.models import lora
from tba.types import Completion, collate_tokens
from tba.weights import Weights, load_weights


class Reference:
    """A policy that is not trained. `version` is that of its weights; 0 is the initial model.

    Searches and `load_weights` may run in several threads.
    """

    def __init__(self, policy: Policy, token_budget: int):
        self.policy = policy
        self.version = 0
        self._token_budget = token_budget
        self._lock = Lock()

    def load_weights(self, weights: Weights) -> None:
        """Replace all weights by those of a policy, or raise and keep the old ones."""
        with self._lock:
            load_weights(self.policy.model, weights)
            self.version = weights.version

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Hold the model with the reference's weights."""
        with self._lock:
            yield

    @torch.inference_mode()
    def logp(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[Completion]],
        temperature: float | None = None,
    ) -> tuple[list[list[np.ndarray]], int]:
        """Return log-probs of each prompt's responses, [T] for T tokens, and their version.

        They are those of the sampling temperature, unless another one is given, and 0 where nothing
        was sampled. Groups with equally many responses run together.
        """
        logp: list[list[np.ndarray]] = [[] for _ in responses]
        with self._weights():
            for part in self._parts(prompts, responses):
                tokens = [[c.tokens for c in responses[i]] for i in part]
                sampled = [[c.sampled for c in responses[i]] for i in part]
                batch = collate_tokens([prompts[i] for i in part], tokens, sampled)
                every = plan.pieces(batch, self._token_budget)
                logps = [self.policy.logp(piece, temperature) for piece in every]
                arrays = torch.cat(logps, 1).float().cpu().numpy()
                for i, rows in zip(part, arrays, strict=True):
                    pairs = zip(rows, responses[i], strict=True)
                    logp[i] = [row[: len(c.tokens)].copy() for row, c in pairs]
            return logp, self.version

    def _parts(
        self, prompts: Sequence[np.ndarray], responses: Sequence[Sequence[Completion]]
    ) -> Iterator[list[int]]:
        """Yield groups by their places, so that one response of each fits the token budget."""
        alike = defaultdict(list)
        for i, group in enumerate(responses):
            alike[len(group)].append(i)
        for places in alike.values():
            longest = max(len(prompts[i]) + len(c.tokens) for i in places for c in responses[i])
            size = max(1, self._token_budget // longest)
            for start in range(0, len(places), size):
                yield places[start : start + size]


class AdapterReference(Reference):
    """Reference of a LoRA run: the policy's model with its adapter disabled, or a frozen adapter.

    `hold` keeps everything else from using the model, which may be an engine's.
    """

    def __init__(
        self, policy: Policy, token_budget: int, hold: Callable[[], AbstractContextManager[Any]]
    ):
        super().__init__(policy, token_budget)
        self._hold = hold

    def load_weights(self, weights: Weights) -> None:
        with self._hold():
            lora.load_reference(self.policy.model, weights)
            self.version = weights.version

    @contextmanager
    def _weights(self) -> Iterator[None]:
        with self._hold(), lora.reference_weights(self.policy.model):
            yield


class EngineReference(Reference):
    """Reference of an engine that does not depend on the weights: its own log-probs.

    They do not depend on the temperature either.
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
