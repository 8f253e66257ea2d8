"""Caches of keys and values with gradients: shared by several passes, and kept from layers."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


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
    """Recompute the activations of each layer on the way back.

    The checkpointing of transformers does not allow a cache, which the shared prompt needs.
    """
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
