"""A task with many right answers: two numbers of two digits with a given sum.

    task.use = "studies.coverage.pairs.Pairs"

    57=  ->  30+27, or one of 38 others

A sum from 40 to 178 has 21 to 90 right answers. A quarter of the sums is held out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tba.prompt import Answer, Prompt
from tba.tasks import Task

SUMS = range(40, 179)


def is_held_out(n: int) -> bool:
    """Return whether a sum is never trained on, by Knuth's hash."""
    return n * 2_654_435_761 % 2**32 < 2**32 // 4


HELD_OUT = [n for n in SUMS if is_held_out(n)]


@dataclass(frozen=True)
class Pairs(Task):
    """Sums whose reward is 1 for two numbers of two digits that add up to it, else 0."""

    pass_reward: float = 1.0

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(f"{n}", f"{n}=", {"sum": n}) for n in SUMS if not is_held_out(n)]

    def held_out(self) -> Sequence[Prompt]:
        return [Prompt(f"{n}", f"{n}=", {"sum": n}) for n in HELD_OUT]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        return [float(a.finished and total(a.text) == prompt.columns["sum"]) for a in answers]


def total(text: str) -> int | None:
    """Return the sum of an answer; None if it is not two numbers of two digits."""
    pair = re.fullmatch(r"([1-9]\d)\+([1-9]\d)", text)
    return int(pair[1]) + int(pair[2]) if pair else None
