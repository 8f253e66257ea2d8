"""Copies of a trainer's tensors in the memory of the host."""

import torch
from torch import Tensor


class HostCopy:
    """Copy of a trainer's tensors in host memory, which the next copy of them reuses.

    For tensors on a GPU, the memory is pinned: they are copied at the speed of the bus, and the
    host waits once for all of them.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._added = 0
        self._stream: torch.cuda.Stream | None = None

    def add(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of the next tensor; `wait` completes it."""
        on_gpu = tensor.device.type == "cuda"
        if on_gpu:
            self._stream = torch.cuda.current_stream(tensor.device)
        own = self._memory[self._added : self._added + 1]
        if not own or (own[0].shape, own[0].dtype) != (tensor.shape, tensor.dtype):
            own = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)]
            self._memory[self._added : self._added + 1] = own
        self._added += 1
        return own[0].copy_(tensor, non_blocking=on_gpu)

    def wait(self) -> None:
        """Wait until all tensors are copied. The next tensor begins a new copy."""
        if self._stream is not None:
            self._stream.synchronize()
        self._added = 0
