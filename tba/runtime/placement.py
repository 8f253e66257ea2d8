"""Cores and device of each process. Two busy processes on the same cores can be 30 times slower."""

import ctypes
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from tba.config.tables import RuntimeTable

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # parameters of glibc's `mallopt`


@dataclass(frozen=True)
class Place:
    """A device (`cpu`, `cuda:0`) and the cores that a process may use; no cores: any of them."""

    device: str
    cores: tuple[int, ...] = ()

    def take(self) -> None:
        """Move the calling thread to the cores; torch uses one thread for each of them."""
        if not self.cores:
            return
        torch.set_num_threads(len(self.cores))
        if sys.platform == "linux":
            os.sched_setaffinity(0, self.cores)

    def divided(self, ranks: int) -> list["Place"]:
        """Return the places of a trainer's ranks: a GPU each, and equal parts of the cores."""
        each = len(self.cores) // ranks
        places = []
        for rank in range(ranks):
            device = f"cuda:{rank}" if self.device.startswith("cuda") else self.device
            own = self.cores[rank * each : (rank + 1) * each] or self.cores
            places.append(Place(device, own))
        return places

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the place inside the block, and give all cores back after it."""
        threads = torch.get_num_threads()
        cores = available_cores()
        self.take()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            if sys.platform == "linux":
                os.sched_setaffinity(0, cores)


def reuse_memory() -> None:
    """Let this process reuse freed CPU memory instead of returning it to the system.

    The system must clear each page that it hands out. By default, glibc returns large blocks at
    once, and clearing them again took a tenth of a training step, and more on virtual machines.
    With this setting, the process keeps its peak memory.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        accepted = libc.mallopt(M_MMAP_MAX, 0)
        accepted &= libc.mallopt(M_TRIM_THRESHOLD, -1)  # never return memory
        accepted &= libc.mallopt(M_ARENA_MAX, 1)  # other arenas would return memory
        assert accepted


def available_cores() -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def gpu_count() -> int:
    return torch.cuda.device_count()


def divide(
    cores: Sequence[int], gpus: int, searchers: int, ranks: int = 1
) -> tuple[Place, list[Place]]:
    """Return the trainer's place and each searcher's on one machine.

    GPUs: the first ones are those of the trainer's ranks, and searchers take turns at the rest; a
    single one is shared.
    Cores: half are the trainer's, or as many as leave one for each searcher; searchers divide the
    rest, and share where there are too few.
    """
    devices = [f"cuda:{gpu}" for gpu in range(gpus)] or ["cpu"]
    half = max(1, min(len(cores) // 2, len(cores) - searchers))
    rest = cores[half:] or cores
    each = max(1, len(rest) // searchers)
    starts = range(0, len(rest) - each + 1, each)
    slots = [tuple(rest[start : start + each]) for start in starts] or [()]
    pairs = zip(cycle(devices[ranks:] or devices), cycle(slots))
    searching = [Place(*pair) for pair in islice(pairs, searchers)]
    return Place(devices[0], tuple(cores[:half])), searching


def places_on_one_machine(settings: RuntimeTable, ranks: int = 1) -> tuple[Place, list[Place]]:
    """Return the places on this machine; ValueError if it has too few GPUs for the ranks."""
    cores = available_cores() if settings.cores == "divide" else []
    gpus = gpu_count()
    if 0 < gpus < ranks:
        raise ValueError(
            f"trainer.devices = {ranks}, but this machine has {gpus} GPUs: lower trainer.devices"
        )
    return divide(cores, gpus, settings.searchers, ranks)


def share_gpus(gpus: int, trainer: int, searchers: int) -> tuple[int, float]:
    """Return the GPUs to reserve for the trainer and those that each searcher requests of Ray.

    The cluster has `gpus`; `trainer` of them, 0 or 1, is the trainer's. Searchers get one each, or
    equal shares if there are too few. A single GPU is shared by all, and then not reserved.
    """
    if gpus == 0:
        return 0, 0.0
    reserved = min(trainer, gpus - 1)
    sharing = math.ceil(searchers / (gpus - reserved))
    return reserved, math.floor(10_000 / sharing) / 10_000  # Ray rounds to so many places


def whole_gpus(free: Sequence[int], searchers: int, each: int) -> float:
    """Return the GPUs that a searcher requests of Ray if its engine runs on `each` of them.

    ValueError unless there are so many for each searcher on one machine; they have `free`.
    """
    most = sum(gpus // each for gpus in free)
    if most < searchers:
        raise ValueError(
            f"engine.tensor_parallel_size = {each}: each searcher needs {each} GPUs of one machine,"
            f" and apart from the trainer's there are such for {most} of {searchers}; lower it, or"
            " runtime.searchers"
        )
    return float(each)


def reserved_device(gpu: str, visible: str | None) -> str:
    """Return torch's name of a GPU of Ray; torch counts by CUDA_VISIBLE_DEVICES = `visible`."""
    if visible is None:
        return f"cuda:{gpu}"
    names = [name.strip() for name in visible.split(",")]
    if gpu not in names:
        problem = f"CUDA_VISIBLE_DEVICES={visible} hides GPU {gpu}, which Ray reserved"
        raise ValueError(f"{problem}; unset CUDA_VISIBLE_DEVICES, or add {gpu} to it")
    return f"cuda:{names.index(gpu)}"
