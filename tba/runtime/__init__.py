"""Where searchers run. `Searchers` is all that the train loop knows of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from tba.evaluate import Evaluation
from tba.prompts import Cursor
from tba.searcher import Findings
from tba.types import Group
from tba.weights import Weights


@dataclass
class Account:
    """What searchers did since the run began. Seconds are summed over searchers."""

    samples: int = 0
    rollouts: int = 0
    """New endings that values were estimated from, beside the samples."""
    restarts: int = 0
    faulty: int = 0
    """Samples whose reward was made wrong, as `[faults]` says."""
    rejected: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """`generate`, `rollouts`, `reward`, `reference`, `adopt`, and `idle`: between two tasks."""
    logp_gap: float = float("nan")
    """Mean |log-prob of an engine - of the trainer| on the last publication's probe."""

    def add(self, findings: Findings) -> None:
        self.samples += findings.samples
        self.rollouts += findings.rollouts
        self.faulty += findings.faulty
        self.rejected += findings.rejected
        for name, seconds in findings.seconds.items():
            self.seconds[name] += seconds


@dataclass(frozen=True)
class SearchState:
    """What a checkpoint needs of the searchers: the prompt cursor, the next task's number, and the weights they
    search with where those decide what comes next (local); None where searchers go on with the newest (ray).

    `reference` are the weights of the reference if it has been reset.
    """

    cursor: Cursor
    tasks: int
    weights: Weights | None
    reference: Weights | None


@runtime_checkable
class Searchers(Protocol):
    """Everything that searches."""

    account: Account

    def gather(self, at_least: int) -> list[Group]:
        """Groups found since the last call; blocks only until there are `at_least` so many, and never past its deadline."""

    def publish(self, weights: Weights) -> None:
        """Hands out newer weights. Waits for nobody."""

    def reset_reference(self, weights: Weights) -> None:
        """What is searched from now on has these weights for its reference. Waits for nobody."""

    def evaluate(self) -> None:
        """Asks for an evaluation of the weights last published. Waits for nobody."""

    def evaluations(self, finish: bool = False) -> list[Evaluation]:
        """Those that have ended since the last call; with `finish`, waits for all that were asked for."""

    def state(self) -> SearchState: ...

    def close(self) -> None:
        """Ends every process, idempotently."""


def task_seed(seed: int, task: int) -> int:
    """The random seed of a search task: the same for the same run seed and task number, wherever it runs."""
    return int(np.random.SeedSequence([seed, task]).generate_state(1, np.uint64)[0] >> 1)
