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

PUBLICATIONS = 20
"""Most publications a second to all searchers together: each takes time of two processes."""

PUBLISHED = 4
"""Most versions of the weights that are on their way to searchers at once.

Each keeps a copy for as long as a slow searcher needs to take it.
"""

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
        """Return the places of a trainer's ranks, which have equal parts of the cores."""
        each = len(self.cores) // ranks
        parts = [self.cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
        return [Place(self.device, part or self.cores) for part in parts]

    def begin(self) -> None:
        """Prepare a new process, and take the place."""
        self.take()
        if self.device == "cpu":
            reuse_memory()

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


def take_gpu(device: str, expands: bool = True) -> None:
    """Make a GPU the current one of this process, to which quantised models are loaded.

    If the blocks of its memory may expand, batches of any lengths do not leave gaps in it.
    """
    torch.cuda.set_device(device)
    if expands and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def last_gpu() -> str:
    """Return the last GPU: no rank of a trainer has it, because searchers need one as well."""
    return f"cuda:{gpu_count() - 1}"


def device_here() -> str:
    """Return the device of this process: the first GPU that it sees, as Ray hides the others."""
    return "cuda:0" if gpu_count() else "cpu"


def divide(cores: Sequence[int], searchers: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the trainer's cores and those of each searcher on one machine.

    Half are the trainer's, or as many as leave one for each searcher; searchers divide the rest,
    and share where there are too few.
    """
    half = max(1, min(len(cores) // 2, len(cores) - searchers))
    rest = cores[half:] or cores
    each = max(1, len(rest) // searchers)
    starts = range(0, len(rest) - each + 1, each)
    parts = [tuple(rest[start : start + each]) for start in starts] or [()]
    return tuple(cores[:half]), [*islice(cycle(parts), searchers)]


def places_on_one_machine(settings: RuntimeTable) -> tuple[Place, list[Place]]:
    """Return the trainer's place and each searcher's on this machine."""
    cores = available_cores() if settings.cores == "divide" else []
    (own, others) = divide(cores, settings.most_searchers)
    return Place(device_here(), own), [Place(device_here(), part) for part in others]


def share(kind: str, total: int, trainer: int, searchers: int) -> tuple[int, float]:
    """Return the GPUs or CPUs to reserve for the trainer, and the GPUs that each searcher requests.

    Ray has a `total` of this kind, and the trainer needs some of them. Searchers get one GPU each,
    or equal shares if there are too few. A single GPU is shared by all, and then not reserved.
    ValueError if there are too few for several ranks.
    """
    left = int(kind == "GPU")
    if trainer > 1 and total - left < trainer:
        others = ", of which searchers need one" if left else ""
        raise ValueError(
            f"trainer.devices = {trainer}, but Ray has {total} {kind}s{others}: lower"
            " trainer.devices, or add some"
        )
    if kind == "CPU":
        return trainer, 0.0
    reserved = min(trainer, total - 1)
    sharing = math.ceil(searchers / (total - reserved))
    return reserved, math.floor(10_000 / sharing) / 10_000  # Ray rounds to so many places


def needs(
    settings: RuntimeTable, kind: str, share: float, each: int
) -> tuple[int, dict[str, float]]:
    """Return the least number of searchers, and the GPUs or CPUs that each of them needs.

    A range of searchers has whole ones: a CPU each where there are no GPUs. Otherwise, they have a
    share of a GPU, if there are some, and take no CPU. An engine runs on `each` GPUs.
    """
    whole = float(each if kind == "GPU" else 1)
    if not isinstance(settings.searchers, int):
        return settings.searchers.min, {kind: whole}
    return settings.searchers, {kind: whole if share and each > 1 else share}


def check_here(kind: str, total: int, ranks: int) -> None:
    """Raise ValueError if this process is to train on its CPU while Ray has GPUs elsewhere."""
    if kind == "GPU" and ranks == 1 and gpu_count() == 0:
        raise ValueError(
            f"Ray has {total} GPUs, and this machine, on which the trainer would run, has none that"
            " PyTorch can use: start the run on a machine of the cluster with a GPU, or set"
            " trainer.devices=2, so that Ray finds GPUs for the trainer as well"
        )


def check_room(free: Sequence[int], searchers: int, each: float, kind: str) -> None:
    """Raise ValueError unless so many searchers find `each` GPUs or CPUs on one machine.

    Apart from the trainer's, each machine has as many as `free` says.
    """
    most = sum(int(number // each) for number in free) if each >= 1 else searchers
    if most < searchers:
        of_engine = " (engine.tensor_parallel_size)" if each > 1 else ""
        raise ValueError(
            f"runtime.searchers needs {searchers} searchers, and apart from the trainer's there are"
            f" {kind}s for {most}: each needs {each:g} of one machine{of_engine}; lower it, or add"
            " machines"
        )


def reserved_device(gpu: str, visible: str | None) -> str:
    """Return torch's name of a GPU of Ray; torch counts by CUDA_VISIBLE_DEVICES = `visible`."""
    if visible is None:
        return f"cuda:{gpu}"
    names = [name.strip() for name in visible.split(",")]
    if gpu not in names:
        problem = f"CUDA_VISIBLE_DEVICES={visible} hides GPU {gpu}, which Ray reserved"
        raise ValueError(f"{problem}; unset CUDA_VISIBLE_DEVICES, or add {gpu} to it")
    return f"cuda:{names.index(gpu)}"
