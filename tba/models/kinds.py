"""Kinds of models that cannot be trained, told by config.json before any weight is loaded."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from tba.config.errors import size

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
LAYER_OBJECTS = 2**15
"""Bytes of the Python objects of a layer, at least."""
RECURRENT = {"linear_attention", "hybrid", "hybrid_sliding"}
"""Types of layers that keep a state in place of keys and values."""
PARTS = {"text_config", "text_encoder"}
"""Configs within that of a model for images or sound."""


def check_content(config: Mapping[str, Any], named: str) -> None:
    """Raise ValueError for quantised weights, or for more than this machine's memory can hold.

    It reads the plain content of config.json: transformers' classes list each layer.
    """
    tables = list(_tables(config))
    for table in tables:
        quantised = table.get("quantization_config") or table.get("compression_config")
        if quantised:
            method = dict(quantised).get("quant_method", "bitsandbytes")
            raise ValueError(
                f"{named} is quantised ({method}), and such weights can be neither trained nor"
                " compared; give the model in bf16 or fp32"
            )
    needed, memory = max(map(_least_bytes, tables)), psutil.virtual_memory().total
    if needed > memory:
        raise ValueError(
            f"{named}: by its config.json it needs at least {size(needed)} of memory in fp32, but"
            f" this machine has {size(memory)}; give a smaller model"
        )


def check_causal(config: Any, named: str) -> None:
    """Raise ValueError unless a config is that of a causal LM with attention, and of nothing else.

    Models with code of their own are not known here.
    """
    from transformers.models.auto import modeling_auto as known

    kind, plain = type(config), config.to_dict()
    if "AutoModelForCausalLM" in plain.get("auto_map", {}):
        return
    encoder = kind in known.MODEL_FOR_MASKED_LM_MAPPING and not plain.get("is_decoder")
    problems = {
        "an encoder with a decoder": config.is_encoder_decoder,
        "a text model inside a larger one": PARTS & config.sub_configs.keys(),
        "no causal language model": kind not in known.MODEL_FOR_CAUSAL_LM_MAPPING,
        "an encoder, whose tokens see those after them": encoder,
        "a model with a recurrent state": RECURRENT & set(plain.get("layer_types") or ()),
    }
    for problem in [what for what, holds in problems.items() if holds]:
        raise ValueError(
            f"{named} is {problem}, by its config.json (model_type {config.model_type!r}); give a"
            " causal language model with attention"
        )


def check_rotary(config: Any, shortest: int, longest: int) -> None:
    """Raise ValueError if rotary embeddings change between a run's shortest and longest sequence.

    Beyond that length they are others for all tokens of a sequence, also for those before it, so
    that no token that was sampled earlier would have the log-prob that it had.
    """
    plain = config.get_text_config().to_dict()
    for table in _tables(plain.get("rope_parameters")):
        limit = table.get("original_max_position_embeddings", math.inf)
        if table.get("rope_type") == "longrope" and shortest <= limit < longest:
            raise ValueError(
                f"policy.model has other rotary embeddings (longrope) in sequences of more than"
                f" {limit} tokens, and those of this run have {shortest} to {longest}; lower"
                f" sampling.max_tokens or leave out prompts, so that none has more than {limit}"
            )


def _tables(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a table and those within it."""
    if isinstance(config, Mapping):
        yield config
        for inner in config.values():
            yield from _tables(inner)


def _least_bytes(table: Mapping[str, Any]) -> int:
    """Return what a model takes in fp32 at least: two square matrices a layer, and embeddings."""
    layers, width = (max([_count(table, n) for n in names]) for names in (LAYERS, WIDTHS))
    weights = width * (2 * width * layers + _count(table, "vocab_size"))
    return 4 * weights + LAYER_OBJECTS * layers


def _count(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    return int(min(value, 2**63)) if isinstance(value, int | float) and value > 0 else 0
