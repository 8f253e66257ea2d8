"""Weights on their way from the trainer to a searcher: whole, versioned, and with a probe that shows whether they arrived."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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


@dataclass(frozen=True)
class Sent:
    """Weights that a transport has sent; `parcel` is what it needs to receive them."""

    version: int
    parcel: Any


@runtime_checkable
class Transport(Protocol):
    """Carries weights from the trainer's process to those of the searchers."""

    def send(self, weights: Weights) -> Sent:
        """Make the weights available to every searcher, without waiting for one."""

    def receive(self, sent: Sent) -> Weights:
        """Return weights that were sent. Called in a searcher's process."""


class SharedLock:
    """Lock that many threads hold together or one holds alone.

    A thread that waits to be alone goes before those that ask to share after it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0
        self._waiting = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with others that share it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock while no other thread does."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._sharing == 0)
                yield
            finally:
                self._waiting -= 1
                self._changed.notify_all()
