"""The reference model: log-probs of responses under the weights that training starts from."""

from collections import defaultdict
from collections.abc import Sequence
from threading import Lock

import numpy as np
import torch

from tba.learn.policy import Policy
from tba.types import TokenBatch, collate_tokens
from tba.weights import Weights, load_weights


class Reference:
    """A policy that is not trained. `version` is that of its weights; 0 is the initial model.

    Searches and `load_weights` may run in several threads.
    """

    def __init__(self, policy: Policy, token_budget: int, version: int = 0):
        self.policy = policy
        self.version = version
        self._token_budget = token_budget
        self._lock = Lock()

    def load_weights(self, weights: Weights) -> None:
        """Replace all weights by those of a policy, or raise and keep the old ones."""
        with self._lock:
            load_weights(self.policy.model, weights)
            self.version = weights.version

    def logp(
        self, prompts: Sequence[np.ndarray], responses: Sequence[Sequence[np.ndarray]]
    ) -> tuple[list[list[np.ndarray]], int]:
        """Return log-probs of each prompt's responses, [T] for T tokens, and their version.

        Groups with equally many responses run together.
        """
        places = defaultdict(list)
        for i, group in enumerate(responses):
            places[len(group)].append(i)
        logp: list[list[np.ndarray]] = [[] for _ in responses]
        with self._lock:
            for same in places.values():
                for part in self._parts(same, prompts, responses):
                    batch = collate_tokens([prompts[i] for i in part], [responses[i] for i in part])
                    for i, rows in zip(part, self._rows(batch), strict=True):
                        tokens = responses[i]
                        logp[i] = [r[: len(t)].copy() for r, t in zip(rows, tokens, strict=True)]
            return logp, self.version

    def _parts(
        self,
        places: Sequence[int],
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[np.ndarray]],
    ) -> list[Sequence[int]]:
        """Divide groups, so that one response of each fits the token budget."""
        longest = max(len(prompts[i]) + max(map(len, responses[i])) for i in places)
        size = max(1, self._token_budget // longest)
        return [places[start : start + size] for start in range(0, len(places), size)]

    @torch.inference_mode()
    def _rows(self, batch: TokenBatch) -> np.ndarray:
        """Return [B K T] log-probs, 0 at padding."""
        pieces = [self.policy.logp(piece) for piece in batch.pieces(self._token_budget)]
        return torch.cat(pieces, 1).float().cpu().numpy()
