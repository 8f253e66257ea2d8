"""Transport of weights through memory that searchers on the same machine map."""

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tba.weights import Direct, Probe, Publication, Weights, as_view, resend

ALIGNED = 64
"""Alignment in bytes, as in torch."""

KEPT = 2
"""Maximum number of files that a sender keeps open: one in use, and one to write to."""


class _File:
    """Anonymous file in memory. The kernel frees it when no process has it open or mapped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    def unused(self) -> bool:
        """Return whether no reader has opened it; see `MappedArrays`."""
        try:  # readers hold the lock shared
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return True

    def write(self, array: np.ndarray, at: int) -> int:
        """Write an array at this offset, and return the offset of its end."""
        view = array.reshape(-1).view(np.uint8).data
        while view:
            written = os.pwrite(self.descriptor, view, at)  # at most 2 GB
            view = view[written:]
            at = at + written
        return at


@dataclass(frozen=True)
class _Array:
    """Location of an array in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int


class MappedArrays(dict[str, np.ndarray]):
    """Arrays by name in an anonymous file in memory, which this process has opened and mapped.

    Pickles contain no data: unpickling opens the file again, through the process that pickled it.
    The kernel frees the memory when no process has the file open or mapped any more, even after a
    kill.
    """

    def __init__(self, process: int, descriptor: int, places: tuple[_Array, ...]):
        self.file = _File(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY))
        # held until it is neither open nor mapped
        fcntl.flock(self.file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        memory = memoryview(mmap.mmap(self.file.descriptor, 0, access=mmap.ACCESS_READ))
        super().__init__({a.name: np.ndarray(a.shape, a.dtype, memory, a.first) for a in places})
        self._places = places

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedArrays, (os.getpid(), self.file.descriptor, self._places)


class SharedMemory(Direct):
    """Transport on Linux, between processes of one user on one machine.

    It replaces Ray's object store, whose death ends every process that uses it: the trainer must
    still be able to save. A file from a rank is opened by the train loop, and searchers open it
    through the train loop. Unused files are reused, because allocating memory takes longer than
    writing to it.
    """

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._choosing = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedMemory, ()

    def send(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], probe: Probe | None
    ) -> Publication:
        with self._choosing:  # a file is written by one thread at a time
            file = next(filter(_File.unused, self._files), None)
            if file is not None:
                self._files.remove(file)
        if file is None:
            file = _File(os.memfd_create("weights"))
        end = ALIGNED  # an empty file cannot be mapped
        arrays = []
        for name, tensor in tensors:
            array = as_view(tensor)
            first = -(-end // ALIGNED) * ALIGNED
            end = file.write(array, first)
            arrays.append(_Array(name, array.dtype.str, array.shape, first))
        os.ftruncate(file.descriptor, max(end, ALIGNED))  # its old content may have been longer
        mapped = MappedArrays(os.getpid(), file.descriptor, tuple(arrays))
        with self._choosing:
            self._files = [*self._files, file][-KEPT:]
        weights = Weights(version, mapped, probe)
        return Publication(version, weights, weights.nbytes)


def receive_mapped(receive: Callable[[Publication], Weights], sent: Publication) -> Weights:
    """Receive weights so that other processes to which they are sent map them without a copy."""
    weights = receive(sent)
    if isinstance(weights.arrays, MappedArrays):
        return weights
    transport = SharedMemory()
    return transport.receive(resend(weights, transport))
