"""Tensors in safetensors files, which are read on demand, whole or a rank's part of each."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tba.config.schema import read_json

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


@dataclass(frozen=True)
class TensorFile:
    """Tensor in a file or in memory that is read on demand, whole or in part."""

    shape: tuple[int, ...]
    part: Any
    """Object to index by rows: a slice of the file, or a tensor in memory."""

    def read(self) -> Tensor:
        tensor: Tensor = self.part[...]
        return tensor

    @torch.no_grad()
    def fill(self, target: Tensor) -> None:
        """Copy it into a tensor of the same shape; a rank reads only its own rows."""
        from torch.distributed.tensor import DTensor

        if not isinstance(target, DTensor):
            target.copy_(self.read())
            return
        mesh = target.device_mesh
        start = mesh.get_local_rank() * -(-len(target) // mesh.size())
        own = target.to_local()
        own.copy_(self.part[start : start + len(own)])


def stored_in(files: Iterable[Path]) -> dict[str, TensorFile]:
    """Return the tensors in safetensors files by name; only headers are read."""
    tensors: dict[str, TensorFile] = {}
    for path in files:
        file: Any = safe_open(path, "pt")
        for key in file.keys():  # noqa: SIM118
            part = file.get_slice(key)
            tensors[key] = TensorFile(tuple(part.get_shape()), part)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights in a folder that `save_pretrained` wrote."""
    index = folder / INDEX
    names = read_json(index)["weight_map"].values() if index.is_file() else [WEIGHTS]
    return [folder / Path(name).name for name in sorted(set(names))]
