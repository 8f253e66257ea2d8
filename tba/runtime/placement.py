"""Cores and device of each process. Two busy processes on shared cores can be 30 times slower."""

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
    """A device (`cpu`, `cuda:0`) and the cores that a process may use; empty: any core."""

    device: str
    cores: tuple[int, ...] = ()

    def take(self) -> None:
        """Pin the calling thread to the cores; torch uses one thread per core."""
        if not self.cores:
            return
        torch.set_num_threads(len(self.cores))
        if sys.platform == "linux":
            os.sched_setaffinity(0, self.cores)

    def divided(self, ranks: int) -> list["Place"]:
        """Return places for a trainer's ranks, with equal parts of the cores."""
        each = len(self.cores) // ranks
        parts = [self.cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
        return [Place(self.device, part or self.cores) for part in parts]

    def begin(self) -> None:
        """Prepare a new process for this place."""
        self.take()
        if self.device == "cpu":
            reuse_memory()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the place inside the block, and restore the previous cores after it."""
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

    The system must zero each page that it hands out. By default, glibc returns large blocks
    immediately, and zeroing them again took a tenth of a training step, or more on virtual
    machines. With this setting, the process keeps its peak memory.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        accepted = libc.mallopt(M_MMAP_MAX, 0)
        accepted &= libc.mallopt(M_TRIM_THRESHOLD, -1)  # never return memory
        accepted &= libc.mallopt(M_ARENA_MAX, 1)  # other arenas would still return memory
        assert accepted


def available_cores() -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def emptiest_gpu() -> str:
    """Return the GPU of this machine with the most free memory.

    This process then keeps a CUDA context on each of them.
    """
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    return f"cuda:{free.index(max(free))}"


def take_gpu(device: str, expands: bool = True) -> None:
    """Make a GPU the current device of this process, to which quantised models are loaded.

    With expandable memory segments, batches of varying lengths do not fragment its memory.
    """
    torch.cuda.set_device(device)
    if expands and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def device_here() -> str:
    """Return this process's device: the first visible GPU, because Ray hides the others."""
    return "cuda:0" if torch.cuda.device_count() else "cpu"


def divide(cores: Sequence[int], searchers: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the cores of the trainer and of each searcher on one machine.

    The trainer gets half, or fewer to leave one for each searcher; searchers divide the rest,
    and share cores if there are too few.
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
    own, others = divide(cores, settings.most_searchers)
    return Place(device_here(), own), [Place(device_here(), part) for part in others]


def share(kind: str, total: int, trainer: int, searchers: int) -> tuple[int, float]:
    """Return the GPUs or CPUs to reserve for the trainer, and the GPUs that each searcher requests.

    Ray has `total` of this kind, and the trainer needs `trainer`. Searchers get one GPU each, or
    equal shares if there are too few. A single GPU is shared by all, and is not reserved.
    ValueError if there are too few for several ranks.
    """
    left = int(kind == "GPU")
    if trainer > 1 and total - left < trainer:
        others = ", of which searchers need one" if left else ""
        raise ValueError(
            f"trainer.devices = {trainer}, but Ray has {total} {kind}s{others}: lower"
            f" trainer.devices, or add {kind}s"
        )
    if kind == "CPU":
        return trainer, 0.0
    reserved = min(trainer, total - 1)
    sharing = math.ceil(searchers / (total - reserved))
    return reserved, math.floor(10_000 / sharing) / 10_000  # Ray rounds to 4 decimals


def needs(
    settings: RuntimeTable, kind: str, share: float, each: int
) -> tuple[int, dict[str, float]]:
    """Return the minimum number of searchers, and the GPUs or CPUs that each of them needs.

    Elastic searchers (a range) get whole devices: a CPU each if there are no GPUs. Otherwise, each
    gets a share of a GPU, if there are any, and no CPU. An engine runs on `each` GPUs.
    """
    whole = float(each if kind == "GPU" else 1)
    if not isinstance(settings.searchers, int):
        return settings.searchers[0], {kind: whole}
    return settings.searchers, {kind: whole if share and each > 1 else share}


def check_here(kind: str, total: int, ranks: int) -> None:
    """Raise ValueError if this process would train on its CPU although Ray has GPUs elsewhere."""
    if kind == "GPU" and ranks == 1 and torch.cuda.device_count() == 0:
        raise ValueError(
            f"Ray has {total} GPUs, and this machine, on which the trainer would run, has none that"
            " PyTorch can use: start the run on a machine of the cluster with a GPU, or set"
            " trainer.devices=2, so that Ray finds GPUs for the trainer as well"
        )


def check_room(free: Sequence[int], searchers: int, each: float, kind: str) -> None:
    """Raise ValueError unless each searcher finds `each` GPUs or CPUs on a single machine.

    `free` is the number on each machine, without the trainer's.
    """
    most = sum(int(number // each) for number in free) if each >= 1 else searchers
    if most < searchers:
        of_engine = " (engine.tensor_parallel_size)" if each > 1 else ""
        raise ValueError(
            f"runtime.searchers needs {searchers} searchers, but the machines have {kind}s for only"
            f" {most} besides the trainer's: each needs {each:g} on one machine{of_engine}; lower"
            " runtime.searchers, or add machines"
        )


def reserved_device(gpu: str, visible: str | None) -> str:
    """Return torch's name for a GPU of Ray; torch counts by CUDA_VISIBLE_DEVICES, `visible`."""
    if visible is None:
        return f"cuda:{gpu}"
    names = [name.strip() for name in visible.split(",")]
    if gpu not in names:
        problem = f"CUDA_VISIBLE_DEVICES={visible} hides GPU {gpu}, which Ray reserved"
        raise ValueError(f"{problem}; unset CUDA_VISIBLE_DEVICES, or add {gpu} to it")
    return f"cuda:{names.index(gpu)}"
