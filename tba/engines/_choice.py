"""How the next token is chosen: temperature, top-k, top-p, and stop strings."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.models.decoding import INCOMPLETE, decode
from tba.models.pretrained import Tokenizer
from tba.types import Sampling


def choose(
    logits: Float[Tensor, "N V"],
    uniform: Float[Tensor, "N R"],
    sampling: Sampling,
) -> tuple[Int[Tensor, "N R"], Float[Tensor, "N R"]]:
    """Return R tokens of each distribution and their log-probs, which `sampling` does not change.

    The log-probs are those before `explore`, top-k and top-p, in this order. The tokens are found
    by inverse transform sampling: for a number u in (0, 1], the first one whose cumulative
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
        cumulative = _without_unlikely(p, sampling).cumsum(-1)
        found = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])
        tokens = found.clamp_(max=logits.shape[-1] - 1)  # of NaN, it is behind all tokens
    return tokens, scaled.gather(1, tokens) - total


def _without_unlikely(p: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Return probabilities, which need not sum to 1, with 0 for the tokens that are left out.

    vLLM has the same order.
    """
    if 0 < sampling.top_k < p.shape[-1]:
        least = p.topk(sampling.top_k).values[:, -1:]
        p = p.masked_fill(p < least, 0.0)
    if sampling.top_p < 1:
        p = _nucleus(p, sampling.top_p)
    return p


def _nucleus(p: Float[Tensor, "N V"], top_p: float) -> Float[Tensor, "N V"]:
    """Return 0 outside the smallest set of tokens that have this share of the probability."""
    ordered, order = p.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    outside = before >= top_p * p.sum(-1, keepdim=True)
    return p.scatter(1, order, ordered.masked_fill(outside, 0.0))


class StopStrings:
    """Finds the responses whose newest token completes a stop string.

    Few tokens of a vocabulary can be the last one of a stop string: those in `possible`. Only for
    these, `completed` searches the text of the newest tokens.
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
        """Return whether there is a stop string at the end of a response that had none before."""
        tail = tokens[-self._reach :]  # every token has a byte at least
        text = decode(self._tokenizer, tail.tolist())
        return any(each in text for each in self.stop)
