"""GPUs and memory of a machine: this one, or one for which a run is planned."""

import re
from dataclasses import dataclass
from math import inf

import psutil
import torch


@dataclass(frozen=True)
class Machine:
    """Number of GPUs, memory of a GPU and of the host in bytes; `inf` if unknown."""

    gpus: int
    card: float
    host: float

    def room(self, card: int | None) -> float:
        return self.host if card is None else self.card


def this_machine() -> Machine:
    count = torch.cuda.device_count()
    cards = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return Machine(count, min(cards, default=0), psutil.virtual_memory().total)


def planned_machine(gpus: str) -> Machine:
    """Parse a string such as `4x80`, four GPUs of 80 GB; ValueError for any other format."""
    written = re.fullmatch(r"([1-9]\d{0,4})x(\d{1,4}(?:\.\d+)?)", gpus)
    if written is None or float(written[2]) == 0:
        raise ValueError(f"--gpus {gpus}: write number x GB of each, such as --gpus 4x80")
    return Machine(int(written[1]), float(written[2]) * 1e9, inf)
