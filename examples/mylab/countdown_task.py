# examples/mylab/countdown_task.py
"""Countdown: combine given numbers by + and - to reach a target. Prompts are generated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.prompt import Answer, Prompt
from tba.tasks import Task

EXPRESSION = re.compile(r"\d{1,3}([+-]\d{1,3})*")


@dataclass(frozen=True)
class Countdown(Task):
    """Reward 1 for an expression that uses each number once and gives the target, else 0.

    An expression that uses the numbers but has another value gets 0.1.
    """

    prompt: str = (
        "Use each of {numbers} once, with + and -, to make {target}."
        " Answer with the expression alone: "
    )
    train_size: int = 4000
    held_out_size: int = 128
    seed: int = 0
    pass_reward: float = 1.0

    def __post_init__(self) -> None:
        if self.train_size + self.held_out_size > 20_000:
            raise ValueError(
                "task.train_size + task.held_out_size must be at most 20000:"
                " there are only 27,075 puzzles"
            )

    def prompts(self) -> Sequence[Prompt]:
        return self._puzzles()[: self.train_size]

    def held_out(self) -> Sequence[Prompt]:
        return self._puzzles()[self.train_size :]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        numbers = prompt.columns["numbers"]
        target = prompt.columns["target"]
        return [worth(a.text, numbers, target) for a in answers]

    def _puzzles(self) -> list[Prompt]:
        """Return the same distinct puzzles at every call; the last ones are held out."""
        rng = np.random.default_rng(self.seed)
        puzzles: dict[str, Prompt] = {}
        while len(puzzles) < self.train_size + self.held_out_size:
            numbers = rng.integers(1, 20, 3).tolist()
            target = numbers[0] + int(rng.choice([-1, 1], 2) @ numbers[1:])
            name = f"{numbers} -> {target}"
            text = self.prompt.replace("{numbers}", " ".join(map(str, numbers)))
            text = text.replace("{target}", str(target))
            puzzles[name] = Prompt(name, text, {"numbers": numbers, "target": target})
        return list(puzzles.values())


def worth(text: str, numbers: Sequence[int], target: int) -> float:
    """Return the reward of an answer."""
    written = text.replace(" ", "").strip()
    if not EXPRESSION.fullmatch(written):
        return 0.0
    terms = [int(t) for t in re.findall(r"[+-]?\d+", written)]
    if sorted(map(abs, terms)) != sorted(numbers):
        return 0.0
    return 1.0 if sum(terms) == target else 0.1
