"""Tasks of tiny runs, for processes that import neither torch nor a library of models."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tba.prompt import Answer, Prompt
from tba.tasks import Task

TEXTS = ("1+", "2=3", "71=")


def lengths(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


@dataclass(frozen=True)
class Toy(Task):
    """Three prompts under many names; the reward is a smooth function of the answer's digits."""

    pass_reward: float | None = None

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(f"{text} {i}", text) for i in range(200) for text in TEXTS]

    def held_out(self) -> Sequence[Prompt]:
        return [Prompt("held-out", "4+")]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        plain = [(a.text.replace("<pad>", ""), a.finished) for a in answers]
        return [0.3 * t.count("1") - 0.2 * len(t) + 0.5 * finished for t, finished in plain]


@dataclass(frozen=True)
class Ones(Task):
    """Sums of which an answer is right if it has a 1 in it, as those of a random model often do."""

    size: int = 300
    held_out_size: int = 20
    pass_reward: float = 1.0

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt(f"{i}+1", f"{i}+1=", {"index": i}) for i in range(self.size)]

    def held_out(self) -> Sequence[Prompt]:
        return [Prompt(f"{i}+2", f"{i}+2=", {"index": i}) for i in range(self.held_out_size)]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        return [float("1" in a.text) for a in answers]


class AsyncOnes(Ones):
    """The same task with an async scoring function."""

    async def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        await asyncio.sleep(0)
        return super().score(prompt, answers)
