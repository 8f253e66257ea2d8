"""Engines with faults, and a trainer that only publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tba.engines import EngineError
from tba.engines.scripted import Scripted
from tba.types import Completion, Sampling
from tba.weights import Direct, Sent, Transport, Weights, resend


@dataclass
class Given:
    """Trainer whose weights are these arrays; it may wait before it gives them, or fail."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    ready: threading.Event | None = None
    error: str = ""
    transport: Transport = field(default_factory=Direct)

    def copy(self, version: int) -> Callable[[], Sent]:
        def send() -> Sent:
            assert self.ready is None or self.ready.wait(60)
            if self.error:
                raise OSError(self.error)
            return resend(Weights(version, self.arrays), self.transport)

        return send


MEETING = threading.Barrier(2)


@dataclass
class Meeting(Scripted):
    """Engine that starts when there is a file `path`, and generates for two callers at a time."""

    path: str = ""

    def __post_init__(self) -> None:
        deadline = time.monotonic() + 120
        while not Path(self.path).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        MEETING.wait(60)
        return super().generate(prompts, sampling, seed)


@dataclass
class Wrong(Scripted):
    """Engine with a gap after every weight update but some; it counts them."""

    folder: str = ""
    right: tuple[int, ...] = ()
    gap: float = 1.0

    def load_weights(self, weights: Weights) -> float | None:
        super().load_weights(weights)
        number = count(Path(self.folder))
        if weights.probe is None:
            return None
        return 0.001 if number in self.right else self.gap


@dataclass
class Faulty(Scripted):
    """Engine whose calls of these numbers fail; it counts them, and how often it is closed."""

    folder: str = ""
    failing: tuple[int, ...] = ()
    mistake: bool = False
    """Whether the error is one of the user's code."""

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        if count(Path(self.folder)) in self.failing:
            raise (RuntimeError if self.mistake else EngineError)("out of memory")
        return super().generate(prompts, sampling, seed)

    def close(self) -> None:
        count(Path(f"{self.folder}-closed"))


def count(folder: Path) -> int:
    """Return how often this has been called with the folder before, by any process."""
    folder.mkdir(exist_ok=True)
    number = len(list(folder.iterdir()))
    (folder / str(number)).touch()
    return number


@dataclass
class Switched(Scripted):
    """Engine whose first response to each prompt comes from two versions of the weights."""

    in_flight: bool = True

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        groups = super().generate(prompts, sampling, seed)
        return [[replace(group[0], switches=((1, 5),)), *group[1:]] for group in groups]
