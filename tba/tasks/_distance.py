"""Distances of texts: by their words, or by sentence embeddings."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from tba.tasks.judges._model import JudgeModel

REMEMBERED = 1000
"""Texts with which new ones are compared: the latest ones that were far from those before."""
TOKENS = 8192
"""Tokens in one pass of an encoder, padding included."""


class Encoder(JudgeModel):
    """Sentence embeddings of length 1: the mean of a model's last hidden states."""

    def __init__(self, name: str):
        from transformers import AutoModel

        super().__init__(name, AutoModel, "fp32", TOKENS, "task.encoder")

    def check(self) -> None:
        """ValueError if there is no such model."""
        _ = self.tokenizer

    def __call__(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        shown = [text or "." for text in texts]
        rows = self.tokenizer(shown, truncation=True)["input_ids"]
        return self.run(rows, _mean_state, 0, "right").numpy()


def _mean_state(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    summed = (states * mask[..., None]).sum(1)  # its direction is that of the mean
    return torch.nn.functional.normalize(summed, dim=-1)


def mean_distance(embeddings: Float[np.ndarray, "N D"]) -> float:
    """Return the mean cosine distance of all pairs of N embeddings of length 1, or 0 if unknown."""
    n = len(embeddings)
    alike = np.square(embeddings.sum(0, np.float64)).sum() - np.square(embeddings).sum()
    return float(1 - alike / (n * (n - 1)))


@dataclass
class NearDuplicates:
    """Recognises texts that are near to one that came before.

    With an encoder, the distance is the cosine distance. Without, it is the number of words to
    insert, delete or replace, over the words of both texts together.
    """

    distance: float
    """Texts are near to one another below this distance."""
    encoder: Encoder | None = None
    _kept: deque[Any] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)

    def far(self, texts: Sequence[str]) -> list[int]:
        """Return the places of texts that are far from those kept, and from earlier ones."""
        if not texts:
            return []
        represented, kept = self._represented(texts), list(self._kept)
        distances = self._distances(represented, kept + represented)
        places: list[int] = []
        for place, row in enumerate(distances):
            earlier = [*range(len(kept)), *(len(kept) + i for i in places)]
            if (row[earlier] >= self.distance).all():
                places.append(place)
        return places

    def keep(self, texts: Sequence[str]) -> None:
        """Compare later texts with these."""
        if texts:
            self._kept.extend(self._represented(texts))

    def _represented(self, texts: Sequence[str]) -> list[Any]:
        if self.encoder is not None:
            return list(self.encoder(texts))
        return [text.lower().split() for text in texts]

    def _distances(self, some: list[Any], others: list[Any]) -> Float[np.ndarray, "N M"]:
        if self.encoder is not None:
            return 1 - np.stack(some) @ np.stack(others).T
        from rapidfuzz.distance import Levenshtein
        from rapidfuzz.process import cdist

        words = np.add.outer([len(a) for a in some], [len(b) for b in others])
        return cdist(some, others, scorer=Levenshtein.distance) / np.maximum(words, 1)
