"""Model weights that the trainer publishes to searchers: complete, versioned, with a probe."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Int32
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

PUBLICATIONS = 20
"""Maximum publications per second to all searchers together: each takes time in two processes."""
PUBLISHED = 4
"""Maximum number of weight versions in transit to searchers at once.

Each keeps a copy alive until the slowest searcher has received it.
"""

Versions = TypeVar("Versions", int, np.ndarray)


def lag(step: int, version: Versions) -> Versions:
    """Return the age in steps of data from weights of this version, after `step` steps."""
    return step - version


@dataclass(frozen=True)
class Probe:
    """A response, and the log-probs that an engine must compute for it with the same weights."""

    prompt_tokens: Int32[np.ndarray, " P"]
    tokens: Int32[np.ndarray, " T"]
    logp: Float32[np.ndarray, " T"]
    temperature: float

    @property
    def rounding(self) -> float:
        """Rounding error in units of that at log-probs of -1: mean |log-prob|, at least 1."""
        return max(1.0, float(np.abs(self.logp).mean()))


@dataclass(frozen=True)
class Weights:
    """Every trained parameter (with LoRA, the adapter's) by name, in fp32 or as bits of bf16."""

    version: int
    arrays: Mapping[str, np.ndarray]
    probe: Probe | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def trained(model: Any) -> dict[str, Tensor]:
    """Return the trained parameters by name: all of the model's, or only an adapter's."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole(tensor: Tensor) -> Tensor:
    """Return the detached tensor, gathered if it is sharded: all ranks must call this."""
    from torch.distributed.tensor import DTensor  # takes half a second; searchers do not need it

    detached = tensor.detach()
    if detached.dtype == torch.int16:  # which collectives do not support
        return whole(detached.view(torch.bfloat16)).view(torch.int16)
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def published(tensors: Mapping[str, Tensor], bf16: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors one at a time, in fp32 or rounded to bf16; of a sharded one, this rank's rows.

    A tensor that already has that precision is not copied.
    """
    from torch.distributed.tensor import DTensor

    for name, tensor in tensors.items():
        own = tensor.detach()
        own = own.to_local() if isinstance(own, DTensor) else own
        yield name, own.to(torch.bfloat16 if bf16 else torch.float32)


def joined_rows(parts: "Sequence[Weights]") -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors one at a time, given the rows that each rank published, in order."""
    for name in parts[0].arrays:
        yield name, torch.cat([as_tensor(part.arrays[name]) for part in parts])


def as_view(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array, bf16 as its bits; it shares memory with a tensor on the CPU."""
    tensor = tensor.cpu().contiguous()
    in_bf16 = tensor.dtype == torch.bfloat16
    return tensor.view(torch.uint16).numpy() if in_bf16 else tensor.numpy()


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor that shares memory with an array from `as_view`; do not write to it."""
    with warnings.catch_warnings():
        # Arrays from another process are read-only, and PyTorch warns that it could write to them.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


@torch.no_grad()
def load_weights(model: Any, weights: Weights) -> None:
    """Copy all weights into the model; ValueError, and no change, if a name or shape differs."""
    # first: weights are adopted whole or not at all
    check_same_model(model, weights.arrays, "the weights are of")
    parameters = model.state_dict()
    for name, array in weights.arrays.items():
        parameters[name].copy_(as_tensor(array))


def check_same_model(model: Any, given: Mapping[str, Any], source: str) -> None:
    """Raise ValueError, beginning with `source`, unless names and shapes match the model's."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    needed = trained(model).keys()  # a tied weight appears once, under its first name
    reshaped = {name for name, array in given.items() if own.get(name) != tuple(array.shape)}
    differing = sorted(reshaped | (needed - given.keys()))[:3]
    if differing:
        raise ValueError(
            f"{source} a different model from policy.model: {differing} differ in name or shape"
        )


def write_weights(weights: Weights, file: Path) -> None:
    """Write weights and their probe to a file.

    The version and the probe share one metadata entry, because safetensors writes several entries
    in varying order.
    """
    probe = weights.probe
    plain = probe and {name: np.asarray(value).tolist() for name, value in vars(probe).items()}
    about = {"weights": json.dumps({"version": weights.version, "probe": plain})}
    save_file(dict(weights.arrays), file, about)


def read_weights(file: Path) -> Weights | None:
    """Return the weights in a file; None if it does not exist."""
    if not file.is_file():
        return None
    with safe_open(file, "numpy") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        plain = json.loads(opened.metadata()["weights"])
    probe = plain["probe"] and Probe(
        prompt_tokens=np.array(plain["probe"]["prompt_tokens"], np.int32),
        tokens=np.array(plain["probe"]["tokens"], np.int32),
        logp=np.array(plain["probe"]["logp"], np.float32),
        temperature=plain["probe"]["temperature"],
    )
    return Weights(plain["version"], arrays, probe)


@dataclass(frozen=True, eq=False)
class Publication:
    """Handle to weights sent to all searchers; `Transport.receive` returns the weights."""

    version: int
    payload: Any
    nbytes: int = 0


@runtime_checkable
class Transport(Protocol):
    """Carries weights from the trainer, or its first rank, to the searchers."""

    def send(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None
    ) -> Publication:
        """Make weights available to every searcher, without waiting for one.

        Each tensor is consumed before the next one is requested. The weights are available for as
        long as the result, or a copy of it in another process, exists.
        """

    def receive(self, sent: Publication) -> Weights:
        """Return the weights that were sent; the sender keeps no other copy of them."""


class Direct:
    """Transport within one process: the payload is a copy of the weights."""

    def send(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None
    ) -> Publication:
        weights = Weights(version, {name: as_view(t).copy() for name, t in tensors}, probe)
        return Publication(version, weights, weights.nbytes)

    def receive(self, sent: Publication) -> Weights:
        weights: Weights = sent.payload
        return weights


def resend(weights: Weights, transport: Transport) -> Publication:
    """Send weights that were received or read from a file."""
    tensors = ((name, as_tensor(array)) for name, array in weights.arrays.items())
    return transport.send(weights.version, tensors, weights.probe)
