"""Choice of the next token: temperature, top-k, top-p, and stop strings."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.models.tokenizer import INCOMPLETE, Tokenizer, decode
from tba.types import Sampling


def choose_tokens(
    logits: Float[Tensor, "N V"],
    uniform: Float[Tensor, "N R"],
    sampling: Sampling,
) -> tuple[Int[Tensor, "N R"], Float[Tensor, "N R"]]:
    """Return R tokens of each distribution, and their log-probs before any reshaping.

    Reshaping is by `explore`, top-k and top-p, in this order, which is vLLM's. Tokens are found by
    inverse transform sampling: for a number u in (0, 1], the first token whose cumulative
    probability is at least u. Temperature 0 is greedy.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    total = scaled.logsumexp(-1, keepdim=True)
    if sampling.temperature == 0:
        tokens = scaled.argmax(-1, keepdim=True).expand(uniform.shape)
    else:
        if sampling.explore is None:
            p = (scaled - total).exp_()
        else:
            p = (scaled * (sampling.temperature / sampling.explore)).softmax(-1)
        if 0 < sampling.top_k < p.shape[-1]:
            least = p.topk(sampling.top_k).values[:, -1:]
            p = p.masked_fill(p < least, 0.0)
        if sampling.top_p < 1:  # the smallest set of tokens whose share is top_p
            ordered, order = p.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            outside = before >= sampling.top_p * p.sum(-1, keepdim=True)
            p = p.scatter(1, order, ordered.masked_fill(outside, 0.0))
        cumulative = p.cumsum(-1)
        found = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])  # p is unnormalised
        tokens = found.clamp_(max=logits.shape[-1] - 1)  # for NaN, it is past the last token
    return tokens, scaled.gather(1, tokens) - total


class StopStrings:
    """Finds the responses whose newest token completes a stop string.

    Few tokens of a vocabulary can complete a stop string; `possible` marks them. Only for these,
    `completed` searches the text of the newest tokens.
    """

    possible: Bool[Tensor, " V"]

    def __init__(self, text: Tokenizer, stop: Sequence[str], device: str):
        self.stop = tuple(stop)
        self._tokenizer = text.tokenizer
        last = {each[-1] for each in stop} | {INCOMPLETE}
        possible = np.zeros(text.vocabulary, bool)
        for token in text.tokenizer.get_vocab().values():
            if token < text.vocabulary:
                # twice: some decoders drop a space at the beginning
                possible[token] = not last.isdisjoint(decode(text.tokenizer, [token, token]))
        self.possible = torch.from_numpy(possible).to(device)
        self._reach = 1 + max(len(each.encode()) for each in stop)

    def completed(self, tokens: np.ndarray) -> bool:
        """Return whether a response that had no stop string before now ends with one."""
        tail = tokens[-self._reach :]  # every token has at least one byte
        text = decode(self._tokenizer, tail.tolist())
        return any(each in text for each in self.stop)
