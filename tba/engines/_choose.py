"""Choosing the next tokens, and their log-probs."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tba.types import Sampling


def choose(
    logits: Float[Tensor, "N V"],
    uniform: Float[Tensor, "N R"],
    sampling: Sampling,
    seen: Bool[Tensor, "N V"] | None = None,
) -> tuple[Int[Tensor, "N R"], Float[Tensor, "N R"]]:
    """Return R tokens of each distribution and their log-probs, which `sampling` does not change.

    Those are before repetition penalty, `explore`, min-p, top-k and top-p, in this order. `seen`
    has the tokens that the penalty is for. The tokens are found by inverse transform sampling: for
    a number u in (0, 1], the first one whose cumulative probability is at least u. Temperature 0
    is greedy.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    total = scaled.logsumexp(-1, keepdim=True)
    preferred = scaled
    if seen is not None:
        penalty = sampling.repetition_penalty
        penalised = torch.where(scaled > 0, scaled / penalty, scaled * penalty)
        preferred = torch.where(seen, penalised, scaled)
    if sampling.temperature == 0:
        tokens = preferred.argmax(-1, keepdim=True).expand(uniform.shape)
    else:
        if sampling.explore is not None:
            preferred = preferred * (sampling.temperature / sampling.explore)
        p = (scaled - total).exp_() if preferred is scaled else preferred.softmax(-1)
        cumulative = _without_unlikely(p, sampling).cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])
    return tokens, scaled.gather(1, tokens) - total


def seen_in(
    prompts: Int[Tensor, "B P"], visible: Int[Tensor, "B P"], vocabulary: int
) -> Bool[Tensor, "B V"]:
    """Return which tokens of the vocabulary each prompt has, padding apart."""
    seen = torch.zeros(len(prompts), vocabulary, dtype=torch.bool, device=prompts.device)
    rows, places = visible.nonzero(as_tuple=True)
    seen[rows, prompts[rows, places]] = True
    return seen


def _without_unlikely(p: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Return probabilities, which need not sum to 1, with 0 for the tokens that are left out.

    The order is that of vLLM.
    """
    if sampling.min_p > 0:
        p = p.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), 0.0)
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
