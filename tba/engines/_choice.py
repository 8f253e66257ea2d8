"""Choice of the next token, and of where a response ends, for engines that compute here."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tba.types import Completion, Sampling


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
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])
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


def shortened(response: Completion, limit: int) -> Completion:
    """Return a response as it is with this limit of tokens."""
    if len(response.tokens) <= limit:
        return response
    switches = tuple(switch for switch in response.switches if switch[0] < limit)
    return replace(
        response,
        tokens=response.tokens[:limit],
        logp=response.logp[:limit],
        finished=False,
        switches=switches,
    )
