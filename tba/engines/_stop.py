"""Stop strings: finding the token that completes one."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from tba.models.pretrained import Tokenizer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that has a part of a character, as tokens of bytes may."""


class StopStrings:
    """Finds the responses whose newest token completes a stop string.

    Few tokens of a vocabulary can be the last one of a stop string: those in `possible`. Only for
    these, `completed` searches the text of the newest tokens.
    """

    possible: Bool[Tensor, " V"]

    def __init__(self, text: Tokenizer, stop: Sequence[str], vocabulary: int, device: str):
        self.stop, self._decode = tuple(stop), text.tokenizer.decode
        last = {each[-1] for each in stop} | {INCOMPLETE}
        possible, self._silent = np.zeros(vocabulary, bool), np.zeros(vocabulary, bool)
        for token in range(min(vocabulary, len(text.tokenizer))):
            # twice: some decoders drop a space at the beginning
            shown = self._decode([token, token], skip_special_tokens=True)
            possible[token] = not last.isdisjoint(shown)
            self._silent[token] = not shown
        self.possible = torch.from_numpy(possible).to(device)
        self._reach = 1 + max(len(each.encode()) for each in stop)

    def completed(self, tokens: np.ndarray) -> bool:
        """Return whether there is a stop string at the end of a response that had none before."""
        spoken = tokens[~self._silent[tokens]]
        tail = spoken[-self._reach :]  # every token has a byte at least
        text = self._decode(tail.tolist(), skip_special_tokens=True)
        return any(each in text for each in self.stop)


def length_to_stop(text: Tokenizer, tokens: np.ndarray, stop: Sequence[str]) -> int | None:
    """Return the number of tokens up to the one that completes a stop string, if there is one."""
    if not stop:
        return None
    for length in range(1, len(tokens) + 1):
        if text.answer(tokens[:length], False, stop).finished:
            return length
    return None
