"""Which cores and which device each process gets. Two busy processes on the same cores can be 30 times slower than one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from tba.config.tables import RuntimeTable


@dataclass(frozen=True)
class Place:
    """A device (`cpu`, `cuda:0`) and the cores a process may use; no cores: wherever the system puts it."""

    device: str
    cores: tuple[int, ...] = ()

    def take(self) -> None:
        """Moves this process there: its threads are as many as its cores, and stay on them where the system can do that."""
        if self.cores:
            torch.set_num_threads(len(self.cores))
            if psutil.LINUX or psutil.WINDOWS:
                psutil.Process().cpu_affinity(list(self.cores))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """There for a while, and back: a program that runs twice finds all its cores the second time."""
        threads, cores = torch.get_num_threads(), available_cores()
        self.take()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            if psutil.LINUX:
                psutil.Process().cpu_affinity(cores)


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if psutil.LINUX else list(range(os.cpu_count() or 1))


def divide(cores: Sequence[int], gpus: int, searchers: int) -> tuple[Place, list[Place]]:
    """The trainer's place and each searcher's.

    GPUs: the first for the trainer and the rest for searchers in turn; one GPU, or none, is shared. Cores: half for the
    trainer, or as many as leave one for each searcher, and the rest for searchers; where there are too few, searchers share theirs.
    """
    if not cores:
        return Place("cuda:0" if gpus else "cpu"), [Place(d) for d in _devices(gpus, searchers)]
    half = max(1, min(len(cores) // 2, len(cores) - searchers))
    rest = list(cores[half:]) or list(cores)
    each = max(1, len(rest) // searchers)
    slots = [tuple(rest[i : i + each]) for i in range(0, each * (len(rest) // each), each)]
    places = [
        Place(device, slots[i % len(slots)]) for i, device in enumerate(_devices(gpus, searchers))
    ]
    return Place("cuda:0" if gpus else "cpu", tuple(cores[:half])), places


def _devices(gpus: int, searchers: int) -> list[str]:
    names = (
        ["cpu"] if gpus == 0 else ["cuda:0"] if gpus == 1 else [f"cuda:{i}" for i in range(1, gpus)]
    )
    return [names[i % len(names)] for i in range(searchers)]


def gpu_count() -> int:
    return torch.cuda.device_count()


def places_for(settings: RuntimeTable) -> tuple[Place, list[Place]]:
    """Return where trainer and searchers run.

    On a cluster Ray gives each searcher a GPU of its own, which is then its first.
    """
    if settings.address is not None:
        device = "cuda:0" if gpu_count() else "cpu"
        return Place(device), [Place(device)] * settings.searchers
    cores = available_cores() if settings.cores == "divide" else []
    return divide(cores, gpu_count(), settings.searchers)
