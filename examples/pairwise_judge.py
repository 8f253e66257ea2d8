# examples/pairwise_judge.py
"""A pairwise judge: the completions of a group are compared with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

from tba.tasks.judges.guard import GuardModel

QUESTION = "{prompt}\n\n{completion}\n\nThe better answer (A or B):\n"


@dataclass(frozen=True)
class WinRate:
    """Mean probability that a completion is preferred to another one of its group.

    The judge is any causal language model. It reads each pair in both orders, because models favour
    one of the two positions: K (K - 1) comparisons for K completions.
    """

    model: str
    longest: int = 2000
    """Characters read per completion. If one is too long for the judge, its group is rejected."""

    @cached_property
    def judge(self) -> GuardModel:
        return GuardModel(self.model, positive="A", negative="B", template=QUESTION)

    def check(self) -> None:
        self.judge.check()

    def load(self, device: str) -> None:
        self.judge.load(device)

    def __call__(
        self, prompts: list[str], completions: list[str], **columns: Any
    ) -> Sequence[float | None]:
        count = len(completions)
        if count < 2:
            return [None] * count  # nothing to compare with
        pairs = list(permutations(range(count), 2))
        read = [completion[: self.longest] for completion in completions]
        shown = [f"A: {read[a]}\n\nB: {read[b]}" for a, b in pairs]
        chances = self.judge(prompts[:1] * len(pairs), shown)
        wins = [0.0] * count
        for (a, b), chance in zip(pairs, chances, strict=True):
            wins[a] += chance
            wins[b] += 1 - chance
        return [won / (2 * count - 2) for won in wins]
