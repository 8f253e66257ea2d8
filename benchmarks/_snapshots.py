"""Snapshots of the weights during a run, for an evaluation after it; the clock leaves them out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


class Snapshots:
    """A clock of the training time, and copies of the weights that it has taken.

    Copies are kept in memory, in bf16 where engines sample from bf16 weights, and written when
    the run has ended. Copying stops the clock.
    """

    def __init__(self, folder: Path, every: float, bf16: bool):
        self.folder, self.every, self.bf16 = folder, every, bf16
        self.rows: list[dict[str, float | str]] = []
        self._copies: list[dict[str, Tensor]] = []
        self._started, self._paused = time.perf_counter(), 0.0
        self._next = 0.0

    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return time.perf_counter() - self._started - self._paused

    def take(self, weights: Callable[[], Mapping[str, Tensor]], step: int) -> None:
        """Copy the weights if the next snapshot is due."""
        seconds = self.seconds()
        if not self.every or seconds < self._next:
            return
        before = time.perf_counter()
        copies = {}
        for name, tensor in weights().items():
            dtype = torch.bfloat16 if self.bf16 and "lora" not in name else torch.float32
            copies[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        self._copies.append(copies)
        path = self.folder / f"step-{step:05}.safetensors"
        self.rows.append({"step": step, "seconds": seconds, "path": str(path)})
        self._next = seconds + self.every
        self._paused += time.perf_counter() - before

    def write(self) -> None:
        """Write every copy to its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for row, copies in zip(self.rows, self._copies, strict=True):
            save_file(copies, str(row["path"]))
        self._copies.clear()
