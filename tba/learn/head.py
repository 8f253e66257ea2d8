"""The LM head and the softmax after it, a chunk of tokens at a time, with few numbers kept."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tba.models.cache import has_plain_logits, logits_of, states_at_once

SLOPES_AT_ONCE = 2**26
"""Numbers in a block of gradients of the logits. A block costs one product for the weight."""

ROWS_AT_ONCE = 2**13
"""Rows of the weight's gradient that are computed at one time."""


def token_logp(
    model: Any, hidden: Float[Tensor, "M D"], tokens: Int[Tensor, " M"], temperature: float
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Return the log-probability of each token after these states, and the entropy there.

    The head runs a chunk at a time, and again on the way back if there are several chunks.
    """
    size = states_at_once(model)
    head = model.get_output_embeddings()
    hooks = [*head._forward_hooks, *head._forward_pre_hooks]
    one_product = type(head) is nn.Linear and head.bias is None and not hooks  # and no adapter
    if one_product and has_plain_logits(model):
        return TokenLogp.apply(hidden, head.weight, tokens, temperature, size)
    if len(hidden) <= size:
        return _run(model, hidden, tokens, temperature)
    chunks = []
    for states, targets in zip(hidden.split(size), tokens.split(size), strict=True):
        chunks.append(checkpoint(_run, model, states, targets, temperature, use_reentrant=False))
    logps, entropies = zip(*chunks, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _run(model: Any, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the same as `token_logp` for one chunk and any head."""
    every = torch.log_softmax(logits_of(model, hidden).float() / temperature, -1)
    entropy = torch.special.entr(every.detach().exp()).sum(-1)
    return every.gather(1, tokens[:, None]).squeeze(1), entropy


class TokenLogp(torch.autograd.Function):
    """Log-probability of each token under softmax(h W' / temperature), and the entropy.

    The logits of a chunk are dropped and computed again on the way back. Unlike with a checkpoint,
    only one product and one softmax are repeated, the weight's gradient is one product for several
    chunks, and its dtype is converted once. The entropy has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "M D"],
        weight: Float[Tensor, "V D"],
        tokens: Int[Tensor, " M"],
        temperature: float,
        size: int,
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Run over `size` tokens at a time, with products in the dtype of autocast."""
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else weight.dtype
        states = (hidden / temperature).to(dtype)
        matrix = weight.to(dtype)
        logps = []
        entropies = []
        for h, own in zip(states.split(size), tokens.split(size), strict=True):
            every = torch.log_softmax(h @ matrix.T, -1, torch.float32)
            logps.append(every.gather(1, own[:, None]))
            entropies.append(-every.exp().mul_(every).sum(-1))
        logp = torch.cat(logps)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(states, matrix, tokens, logp)
        ctx.temperature = temperature
        ctx.size = size
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.mark_non_differentiable(entropy)
        return logp.squeeze(1), entropy

    @staticmethod
    def backward(ctx: Any, slope: Float[Tensor, " M"], _: Any) -> tuple[Tensor | None, ...]:
        """Return gradients from those of the logits, which are onehot - p for each token's logp."""
        states, matrix, tokens, logp = ctx.saved_tensors
        d_hidden = torch.empty_like(states)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(matrix, dtype=ctx.dtypes[1])
        weighted = (states * -slope[:, None]).to(states.dtype)
        size = ctx.size
        block = size * max(1, SLOPES_AT_ONCE // (len(matrix) * size))
        memory = matrix.new_empty(min(block, len(states)), len(matrix))
        for start in range(0, len(states), block):
            here = slice(start, start + block)
            slopes = memory[: len(states[here])]
            parts = slopes, states[here], d_hidden[here], tokens[here, None], logp[here].expm1()
            chunks = [part.split(size) for part in parts]
            for p, own, d_own, token, at_token in zip(*chunks, strict=True):
                torch.softmax(own @ matrix.T, -1, out=p)
                # p - 1 at the token itself, where a rounded p may be 1
                p.scatter_(1, token, at_token.to(p.dtype))
                torch.mm(p, matrix, out=d_own)
            if d_weight is not None:
                rows = d_weight.split(ROWS_AT_ONCE), slopes.split(ROWS_AT_ONCE, 1)
                for row, column in zip(*rows, strict=True):
                    row += column.T @ weighted[here]
        d_hidden = d_hidden * (-slope / ctx.temperature)[:, None]
        return d_hidden.to(ctx.dtypes[0]), d_weight, None, None, None
