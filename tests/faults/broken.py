"""Objective that brings faults to ranks of the trainer, in their own processes.

A rank is killed, stopped, sleeps or raises while a function runs that the test names. A rank builds
the objective before it loads, and so replaces these functions by wrappers.
"""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from suite import until
from torch import distributed

from tba.learn import publish, state
from tba.learn.policy import Policy
from tba.learn.trainer import SingleTrainer
from tba.objectives.tb import TrajectoryBalance
from tba.runs.generations import generations

MOMENTS: dict[str, tuple[Any, str]] = {
    "forward": (Policy, "forward"),
    "backward": (torch.autograd, "backward"),
    "optimizer": (torch.optim.AdamW, "step"),
    "publication": (publish, "answer"),
    "saving": (SingleTrainer, "save"),
    "file": (state, "save_file"),
    "loading": (SingleTrainer, "load"),
}
"""The function that runs at each moment."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ERRORS = {
    "raise": RuntimeError("this rank is broken"),
    "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


@dataclass(frozen=True)
class Broken(TrajectoryBalance):
    faults: str = ""
    """Faults that come one after another, as "forward kill 1 7": in the call 7 on rank 1."""
    marks: str = ""
    """Folder that gets a file for each fault, with the time in it."""
    checkpoints: str = ""
    """Folder in which there must be a checkpoint before a fault, if it is given."""
    share: float = 0.5
    """Share of a call's usual time after which the rank is killed or stopped in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if distributed.is_initialized() and not PLANS:
            PLANS.append(Plan(self))


PLANS: list["Plan"] = []
"""That of this process."""


class Plan:
    """Brings the next fault of this rank."""

    def __init__(self, given: Broken):
        self.marks, self.share = Path(given.marks), given.share
        self.checkpoints = given.checkpoints
        self.calls, self.usual = 0, 0.0
        for number, text in enumerate(given.faults.split(",")):
            moment, fault, rank, call = text.split()
            if int(rank) == distributed.get_rank() and not self.came(number):
                owner, name = MOMENTS[moment]
                wrapped = self.wrap(getattr(owner, name), number, fault, int(call))
                setattr(owner, name, wrapped)
                return

    def came(self, number: int) -> bool:
        return (self.marks / str(number)).exists()

    def note(self, number: int) -> None:
        (self.marks / str(number)).write_text(str(time.monotonic()))

    def wrap(self, function: Any, number: int, fault: str, call: int) -> Callable[..., Any]:
        @wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            self.calls += all(self.came(n) for n in range(number))
            if self.calls == call and not self.came(number):
                saved = Path(self.checkpoints)
                until(lambda: not self.checkpoints or bool(generations(saved)), 60)
                self.bring(number, fault)
            started = time.monotonic()
            result = function(*arguments, **named)
            self.usual = time.monotonic() - started
            return result

        return called

    def bring(self, number: int, fault: str) -> None:
        def strike() -> None:
            time.sleep(self.share * self.usual)
            self.note(number)
            os.kill(os.getpid(), SIGNALS[fault])

        if fault in SIGNALS:
            threading.Thread(target=strike).start()
            return
        self.note(number)
        if fault in ERRORS:
            raise ERRORS[fault]
        time.sleep(3600)
