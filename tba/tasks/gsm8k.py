"""Grade-school math word problems: openai/gsm8k from the hub, or a folder with its train.jsonl and test.jsonl."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tba.tasks._data import rows
from tba.types import Answer, Prompt

NUMBER = re.compile(r"[+-]?\d+\.\d*|[+-]?\.\d+|[+-]?\d+e[-+]?\d+|[+-]?\d+")


def last_number(text: str) -> float | None:
    """The last number in the text, thousands commas ignored; None where there is none."""
    found = NUMBER.findall(text.replace(",", ""))
    return float(found[-1]) if found else None


@dataclass(frozen=True)
class Gsm8k:
    """Reward 1 when the last number of the answer equals the one after `####` of the solution, else 0; None where the solution has no number.

    Prompt and grader are those of the paper's GSM8K experiment (arXiv 2503.18929, appendix). `chat` sends the bare
    question through the tokenizer's chat template instead, for instruction-tuned models.
    """

    data: str = "openai/gsm8k"
    chat: bool = False
    prompt: str = "[MATH_TASK] Problem:\n{question}\n\nSolution:"
    train_size: int | None = None
    held_out_size: int | None = None
    pass_reward: float = 1.0

    def __post_init__(self) -> None:
        if "{question}" not in self.prompt:
            raise ValueError("task.prompt must contain {question}, where the question goes")

    def prompts(self) -> Sequence[Prompt]:
        return self._read("train", self.train_size)

    def held_out(self) -> Sequence[Prompt]:
        return self._read("test", self.held_out_size)

    def score(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float | None]:
        gold = [last_number(p.columns["answer"].rpartition("####")[2]) for p in prompts]
        return [
            None if g is None else float(last_number(a.text) == g)
            for a, g in zip(answers, gold, strict=True)
        ]

    def _read(self, split: str, size: int | None) -> list[Prompt]:
        found = rows("task.data", self.data, split, "main", required=("question", "answer"))[:size]
        return [self._prompt(f"{split}-{i}", row) for i, row in enumerate(found)]

    def _prompt(self, name: str, row: dict[str, str]) -> Prompt:
        text = self.prompt.replace("{question}", row["question"])
        return Prompt(
            name,
            [{"role": "user", "content": row["question"]}] if self.chat else text,
            {"answer": row["answer"]},
        )
