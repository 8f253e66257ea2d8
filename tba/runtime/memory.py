"""Transport of weights through memory that the searchers of the same machine map."""

import mmap
import os
import pickle
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.weights import Sent, Weights


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
        empty = not any(last for _, last in places)
        memory = b"" if empty else mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return Mapped(process, file, head, places, memoryview(memory))


class SharedMemory:
    """Transport on Linux, between processes of one user on one machine.

    Not Ray's object store: when that dies, it ends every process that uses it, and the trainer
    must be able to save. What was sent stays for as long as its `Sent` exists in the trainer.
    """

    def send(self, weights: Weights) -> Sent:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(weights, protocol=5, buffer_callback=buffers.append)
        file, end = os.memfd_create("weights"), 0
        places = []
        for buffer in buffers:
            first = -(-end // 64) * 64  # aligned as torch aligns its tensors
            end = _write(file, buffer.raw(), first)
            places.append((first, end))
        sent = Sent(weights.version, Mapped(os.getpid(), file, head, tuple(places)))
        weakref.finalize(sent, os.close, file)
        return sent

    def receive(self, sent: Sent) -> Weights:
        mapped: Mapped = sent.parcel
        assert mapped.memory is not None  # it came from another process
        memory = mapped.memory
        buffers = [memory[first:last] for first, last in mapped.places]
        return pickle.loads(mapped.head, buffers=buffers)


def _write(file: int, view: memoryview, at: int) -> int:
    """Write a buffer to a file at this place, and return where it ends."""
    while view:
        written = os.pwrite(file, view, at)  # at most 2 GB
        view, at = view[written:], at + written
    return at
