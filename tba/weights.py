"""Weights on their way from the trainer to a searcher: whole, versioned, and with a probe that shows whether they arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int32


@dataclass(frozen=True)
class Probe:
    """A response and its log-probs under the trainer's weights; an engine that adopted them must find the same."""

    prompt_tokens: Int32[np.ndarray, " P"]
    tokens: Int32[np.ndarray, " T"]
    logp: Float32[np.ndarray, " T"]
    temperature: float


@dataclass(frozen=True)
class Weights:
    """Every parameter by name. NumPy arrays travel between processes without a copy; bf16 goes as its bits (uint16)."""

    version: int
    arrays: Mapping[str, np.ndarray]
    probe: Probe | None = None


def pack(model: Any, version: int, bf16: bool, probe: Probe | None = None) -> Weights:
    """A copy of the model's parameters (a tied one once), in fp32 or rounded to bf16."""
    return Weights(
        version,
        {name: as_array(parameter.detach(), bf16) for name, parameter in model.named_parameters()},
        probe,
    )


def as_array(tensor: torch.Tensor, bf16: bool) -> np.ndarray:
    """A copy of its own, in fp32 or as the bits of bf16."""
    value = tensor.cpu()
    return value.bfloat16().view(torch.uint16).numpy() if bf16 else value.float().numpy().copy()


@torch.no_grad()
def load_weights(model: Any, weights: Weights) -> None:
    """Copies all weights into the model, or none: ValueError when a name or a shape differs, before anything is written."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.arrays.keys():
        raise ValueError(
            f"weights of another model: {sorted(parameters.keys() ^ weights.arrays.keys())[:3]} are on one side only"
        )
    for name, array in weights.arrays.items():
        if parameters[name].shape != array.shape:
            raise ValueError(
                f"weights of another model: {name} is {array.shape}, not {tuple(parameters[name].shape)}"
            )
    for name, array in weights.arrays.items():
        # the arrays are read-only views of shared memory: copy_ reads them, nothing writes to them
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        parameters[name].copy_(tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor)
