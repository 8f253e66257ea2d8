"""The layers of the trainer's model: compiling them, and computing them again on the way back."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tba.models.cache import fork


def compile_layers(model: Any) -> None:
    """Compile the layers for passes with gradients. They share programs, for any lengths."""
    run = torch.compile(_run, dynamic=True, fullgraph=True)
    for index, layer in enumerate(_layers(model)):
        # a method, which a copy of the model binds to its own layer
        layer.forward = MethodType(partial(_forward, run, index), layer)


def _layers(model: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _forward(run: Callable[..., Any], index: int, layer: Any, *inputs: Any, **options: Any) -> Any:
    """Run a layer with its part of the cache: with all of it, each layer needs its own program."""
    from transformers import Cache

    def own(value: Any) -> Any:
        return value.layers[index] if isinstance(value, Cache) else value

    chosen = run if torch.is_grad_enabled() else _run
    return chosen(layer, *map(own, inputs), **{name: own(x) for name, x in options.items()})


def _run(layer: Any, *inputs: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *inputs, **options)


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass, with a cache: transformers' own way has none."""
    for layer in _layers(model):
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


def check_compiler() -> None:
    """Raise ValueError if `trainer.compile` cannot work here."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler) is None or not header.is_file():
        raise ValueError(
            f"trainer.compile = true needs a C++ compiler ({compiler}) and Python's headers"
            f" ({header}): apt install g++ python3-dev, or set trainer.compile=false"
        )
