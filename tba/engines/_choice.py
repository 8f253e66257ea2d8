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
        reshaped = sampling.explore is not None or sampling.top_k > 0 or sampling.top_p < 1
        p = _reshaped(scaled, sampling).softmax(-1) if reshaped else (scaled - total).exp_()
        cumulative = p.cumsum(-1)
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])
    return tokens, scaled.gather(1, tokens) - total


def _reshaped(scaled: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Return logits at the temperature `explore`, without tokens that top-k and top-p leave out.

    vLLM has the same order.
    """
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    if sampling.explore is not None:
        scaled = scaled * (sampling.temperature / sampling.explore)
    ids = torch.zeros(len(scaled), 0, dtype=torch.long)  # of the tokens before, which are not used
    if sampling.top_k > 0:
        scaled = TopKLogitsWarper(sampling.top_k)(ids, scaled)
    if sampling.top_p < 1:
        scaled = TopPLogitsWarper(sampling.top_p)(ids, scaled)
    return scaled


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
