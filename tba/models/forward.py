"""Forward passes of a model: positions, masks, caches shared by responses, logits, and layers."""

import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tba.models import EVERYONE, FLEX, Packing

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}
"""Logits per chunk of the LM head, by device: few on a CPU, where clearing memory is slow."""
ALIGNED = 16
"""The allocated length of an attention mask's rows is a multiple of this, for SDPA's kernels."""
LOGIT_SETTINGS = ("logits_scaling", "logit_scale", "final_logit_softcapping")
"""Keys in config.json for a divisor (Granite), a factor (Cohere) and a cap (Gemma 2) of logits."""


def states_at_once(model: Any) -> int:
    """Return the maximum number of hidden states to pass to the LM head at once."""
    vocabulary = model.config.get_text_config().vocab_size
    return max(1, LOGITS_AT_ONCE[model.device.type] // vocabulary)


def has_plain_logits(model: Any) -> bool:
    """Return whether the logits are the output of the LM head, which some models scale or cap."""
    settings = vars(model.config.get_text_config())
    return not any(settings.get(name) for name in LOGIT_SETTINGS)


def logits_of(model: Any, states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
    """Return the logits of hidden states, scaled and capped as in the model."""
    logits = model.get_output_embeddings()(states)
    settings = vars(model.config.get_text_config())
    divisor, factor, cap = (settings.get(name) for name in LOGIT_SETTINGS)
    if divisor:
        logits = logits / divisor
    if factor:
        logits = logits * factor
    if cap:
        logits = (logits / cap).tanh() * cap
    return logits


@torch.no_grad()
def check_logits(model: Any) -> None:
    """Raise ValueError if the model changes its logits in a way that `logits_of` does not handle.

    The head's outputs are scaled up, because small ones would hardly reach a cap.
    """
    # Token 0 is left out: it may be a pad token with an embedding of zeros.
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(1, min(5, vocabulary), device=model.device)[None]
    try:
        output = model.base_model(input_ids=ids, use_cache=True)
        select(output.past_key_values, torch.zeros_like(ids[0]))
        hidden = output.last_hidden_state
    except Exception as error:  # sizes in a config.json may contradict each other
        raise ValueError(
            f"policy.model: {type(model).__name__} cannot run with this config, or has no cache of"
            f" keys and values: {error}; use another model"
        ) from error
    head = model.get_output_embeddings()
    enlarged = head.register_forward_hook(lambda head, inputs, output: output * 100)
    plain = logits_of(model, hidden).float()
    sampled = model(input_ids=ids, use_cache=True).logits.float()  # the same kernels
    enlarged.remove()
    if not plain.isfinite().all():
        raise ValueError(
            "policy.model: its logits are not finite, so its weights hold NaN or inf; use"
            " another copy of the model"
        )
    if not torch.allclose(plain, sampled, atol=1e-4, rtol=1e-3):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the head in a way that is"
            " not supported; use another model"
        )


def check_rotary(config: Any, shortest: int, longest: int) -> None:
    """Raise ValueError if rotary embeddings change between a run's shortest and longest sequence.

    A token sampled in a shorter sequence would have a different log-prob in a longer one.
    """
    rope = config.get_text_config().to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") != "longrope":
        return
    limit = rope["original_max_position_embeddings"]
    if shortest <= limit < longest:
        raise ValueError(
            f"policy.model has different rotary embeddings (longrope) in sequences of more than"
            f" {limit} tokens, and sequences of this run have {shortest} to {longest}; lower"
            f" sampling.max_tokens or leave out prompts, so that none has more than {limit}; for"
            " sessions of a program, lower vllm's engine.max_model_len, or use another model"
        )


def attention_mask(model: Any, owner: Int[Tensor, "B Q"], columns: Int[Tensor, "B C"]) -> Any:
    """Return an attention mask: tokens see the columns of their owner, and of EVERYONE.

    The mask is [B 1 Q C]: additive in the dtype of the queries, or a BlockMask for FlexAttention.
    The Q tokens are the last of the C columns, and attention is causal. Padding sees itself, so
    that no row is empty. From a boolean mask or from unaligned rows, SDPA would make another mask
    in each layer, and keep it for the backward pass.
    """
    if _attention(model) == FLEX:
        from tba.models.flex import owned_blocks

        return owned_blocks(owner, columns)
    columns = columns[:, None, None]
    owner = owner[:, None, :, None]
    sees: Bool[Tensor, "B 1 Q C"] = (columns == EVERYONE) | (columns == owner)
    sees = sees.tril(sees.shape[-1] - sees.shape[-2])
    kind = model.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else model.dtype
    length = sees.shape[-1]
    aligned = -(-length // ALIGNED) * ALIGNED
    mask = sees.new_full((*sees.shape[:-1], aligned), -math.inf, dtype=dtype)[..., :length]
    return mask.masked_fill_(sees, 0)


def takes_masks(model: Any) -> bool:
    """Return whether all layers of the model accept such a mask, and none has a sliding window."""
    settings = model.config.get_text_config().to_dict()
    if settings.get("layer_types"):
        in_windows = set(settings["layer_types"]) != {"full_attention"}
    else:
        in_windows = settings.get("sliding_window") is not None
    by_mask = model._supports_attention_backend and _attention(model) in ("eager", "sdpa", FLEX)
    return by_mask and not in_windows


def packing(model: Any) -> Packing:
    """Return which rows of a prompt with several responses the model can run."""
    if not takes_masks(model):
        return "none"
    return "any" if _attention(model) == FLEX else "short"


def _attention(model: Any) -> Any:
    return model.config.get_text_config()._attn_implementation


def select(cache: Any, rows: Int[Tensor, " N"]) -> Any:
    """Return a new cache with these rows; the given cache does not change."""
    selected = fork(cache)
    selected.batch_select_indices(rows)
    return selected


def fork(cache: Any) -> Any:
    """Return a cache with the same tensors; tokens added to one cache are not in the other."""
    forked = copy(cache)
    forked.layers = [copy(layer) for layer in cache.layers]
    return forked


def compile_layers(model: Any) -> None:
    """Compile the layers for passes with gradients. They share programs, for any lengths."""
    run = torch.compile(_run, dynamic=True, fullgraph=True)
    for index, layer in enumerate(layers_of(model)):
        # a method, so that a copy of the model binds it to its own layer
        layer.forward = MethodType(partial(_forward, run, index), layer)


def layers_of(model: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _forward(run: Callable[..., Any], index: int, layer: Any, *inputs: Any, **options: Any) -> Any:
    """Run a layer with its part of the cache: with all of it, each layer needs its own program."""
    inputs, options = _with_caches(lambda cache: cache.layers[index], inputs, options)
    chosen = run if torch.is_grad_enabled() else _run
    return chosen(layer, *inputs, **options)


def _run(layer: Any, *inputs: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *inputs, **options)


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass; keep the cache (transformers turns it off)."""
    for layer in layers_of(model):
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run a layer with checkpointing; the second run gets the cache as it was before the first."""
    before = _with_caches(fork, inputs, options)
    first = iter([(inputs, options)])

    def run() -> Any:
        own, named = next(first, before)
        return forward(*own, **named)

    if not torch.is_grad_enabled():
        return run()
    return checkpoint(run, use_reentrant=False)


def _with_caches(
    change: Callable[[Any], Any], inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer, with `change` applied to every cache."""
    from transformers import Cache

    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, Cache) else value

    return tuple(map(changed, inputs)), {name: changed(x) for name, x in options.items()}


def check_compiler(
    user: str, kind: Literal["C", "C++"], variable: str, names: Sequence[str], instead: str
) -> None:
    """Raise ValueError if `user` lacks a compiler (`variable` may name it) or Python's header."""
    named = os.environ.get(variable)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not any(map(shutil.which, [named] if named else names)) or not header.is_file():
        package = {"C": "gcc", "C++": "g++"}[kind]
        raise ValueError(
            f"{user} needs a {kind} compiler ({named or ' or '.join(names)}) and Python's headers"
            f" ({header}): apt install {package} python3-dev, or {instead}"
        )
