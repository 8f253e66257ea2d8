"""Sizes, positions and masks of a forward pass, and caches that several responses share."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

EVERYONE, NOBODY = -1, -2  # owner of a prompt's tokens, which all responses see, and of padding
LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
"""Logits in a chunk of the LM head, by device: few on a CPU, where clearing memory is slow."""


def states_at_once(model: Any) -> int:
    """Return the number of hidden states over which the LM head may run at one time."""
    vocabulary = model.config.get_text_config().vocab_size
    return max(1, LOGITS_AT_ONCE[model.device.type] // vocabulary)


def positions(mask: Tensor) -> Tensor:
    """Return the position of each token, counted from the first real one; padding gets 0."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def attention_mask(model: Any, owner: Int[Tensor, "B Q"], columns: Int[Tensor, "B C"]) -> Tensor:
    """Return an attention mask: tokens of an owner see that owner's columns, and EVERYONE's.

    The mask is [B 1 Q C], boolean for SDPA and additive for eager attention. The Q tokens are the
    last of the C columns, and attention is causal. Padding sees itself, so that no row is empty.
    """
    columns, owner = columns[:, None, None], owner[:, None, :, None]
    sees: Bool[Tensor, "B 1 Q C"] = (columns == EVERYONE) | (columns == owner)
    sees = sees.tril(sees.shape[-1] - sees.shape[-2])
    if _attention(model) == "sdpa":
        return sees
    hidden = torch.finfo(model.dtype).min
    return torch.zeros_like(sees, dtype=model.dtype).masked_fill(~sees, hidden)


def takes_masks(model: Any) -> bool:
    """Return whether all layers of the model follow such a mask, and none has a sliding window."""
    settings = model.config.get_text_config().to_dict()
    if settings.get("layer_types"):
        in_windows = set(settings["layer_types"]) != {"full_attention"}
    else:
        in_windows = settings.get("sliding_window") is not None
    by_mask = model._supports_attention_backend and _attention(model) in ("eager", "sdpa")
    return by_mask and not in_windows


def _attention(model: Any) -> Any:
    return model.config.get_text_config()._attn_implementation


def select(cache: Any, rows: Int[Tensor, " N"]) -> Any:
    """Return a cache with these rows of another one, which stays as it is."""
    selected = fork(cache)
    for layer in selected.layers:
        layer.keys, layer.values = (x.index_select(0, rows) for x in (layer.keys, layer.values))
    return selected


def fork(cache: Any) -> Any:
    """Return a cache with the same tensors; what is added to one is not in the other."""
    forked = copy(cache)
    forked.layers = [copy(layer) for layer in cache.layers]
    return forked


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass, with a cache: transformers' own way has none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run a layer with a checkpoint; the second time, the cache is as it was before the first."""
    from transformers import Cache

    def forked(value: Any) -> Any:
        return fork(value) if isinstance(value, Cache) else value

    before = [forked(x) for x in inputs], {name: forked(x) for name, x in options.items()}
    first = iter([(inputs, options)])

    def run() -> Any:
        own, named = next(first, before)
        return forward(*own, **named)

    if not torch.is_grad_enabled():
        return run()
    return checkpoint(run, use_reentrant=False)
