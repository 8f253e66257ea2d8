"""Transport of weights through memory that the searchers of the same machine map."""

import fcntl
import mmap
import os
import pickle
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.weights import Sent, Weights

ALIGNED = 64
"""Bytes: torch aligns its tensors so."""


class _File:
    """Nameless file in memory. The kernel frees it when it is closed and nobody maps it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("weights")

    def __del__(self) -> None:
        os.close(self.descriptor)

    def unused(self) -> bool:
        """Return whether no process maps it; see `_mapped`."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return True

    def write(self, view: memoryview, at: int) -> int:
        """Write a buffer at this place, and return where it ends."""
        while view:
            written = os.pwrite(self.descriptor, view, at)  # at most 2 GB
            view = view[written:]
            at = at + written
        return at


@dataclass(frozen=True, eq=False)
class Mapped:
    """Weights in a nameless file in memory. Unpickling it maps the file of the sender's process.

    The kernel frees the memory when the sender has closed the file and nobody maps it any more,
    also after a kill.
    """

    process: int
    file: int
    head: bytes  # a pickle, whose buffers are in the file
    places: tuple[tuple[int, int], ...]  # first and last byte of each buffer
    memory: memoryview | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self.process, self.file, self.head, self.places)


def _mapped(process: int, file: int, head: bytes, places: tuple[tuple[int, int], ...]) -> Mapped:
    with Path(f"/proc/{process}/fd/{file}").open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the memory is no longer mapped
        memory = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    return Mapped(process, file, head, places, memory)


class SharedMemory:
    """Transport on Linux, between processes of one user on one machine.

    Not Ray's object store: when that dies, it ends every process that uses it, and the trainer
    must be able to save. What was sent stays for as long as its `Sent` exists in the trainer. One
    file that is no longer needed is kept, and written again as soon as no searcher maps it: fresh
    memory takes longer than writing to it.
    """

    def __init__(self) -> None:
        self._spare: list[_File] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedMemory, ()

    def send(self, weights: Weights) -> Sent:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(weights, protocol=5, buffer_callback=buffers.append)
        file = self._file()
        end = ALIGNED  # an empty file cannot be mapped
        places = []
        for buffer in buffers:
            first = -(-end // ALIGNED) * ALIGNED
            end = file.write(buffer.raw(), first)
            places.append((first, end))
        os.ftruncate(file.descriptor, end)  # what was there before may have been longer
        sent = Sent(weights.version, Mapped(os.getpid(), file.descriptor, head, tuple(places)))
        weakref.finalize(sent, _keep, self._spare, file)
        return sent

    def receive(self, sent: Sent) -> Weights:
        mapped: Mapped = sent.parcel
        assert mapped.memory is not None  # it came from another process
        memory = mapped.memory
        buffers = [memory[first:last] for first, last in mapped.places]
        return pickle.loads(mapped.head, buffers=buffers)

    def close(self) -> None:
        self._spare.clear()

    def _file(self) -> _File:
        try:
            spare = self._spare.pop()
        except IndexError:
            return _File()
        return spare if spare.unused() else _File()


def _keep(spare: list[_File], file: _File) -> None:
    if not spare:  # otherwise it is closed
        spare.append(file)
