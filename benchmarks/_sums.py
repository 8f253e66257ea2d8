"""The reference run, as both sides run it: sums of two numbers, their reward, a slow judge.

SmolLM2-135M-Instruct answers questions such as "... 53 + 96 =" in at most 8 tokens. A response
ends with its first newline; it is right if its first line is the answer, with a full stop or not.
Before training, .22 of the sampled answers and .49 of the greedy ones are right.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Recipe:
    """What both sides do in a step, and what is timed."""

    prompts: int
    samples: int
    tokens: int
    warmup: int
    """Steps of linear warm-up; the rate is constant afterwards."""
    held_out: int
    goal: float
    """Held-out sampled accuracy that is timed."""
    bf16: bool
    answers: int
    """Answers to each held-out question in an evaluation."""

    @property
    def batch(self) -> int:
        return self.prompts * self.samples


RECIPES = {
    "sums": Recipe(8, 16, 8, 5, 256, 0.5, True, 2),
    "arithmetic": Recipe(16, 16, 6, 5, 512, 0.9, False, 4),
}
"""The reference run, and the embedded task with the bundled model."""

Side = Literal["asynchronous", "synchronous", "trl"]


@dataclass(frozen=True)
class PendingReply:
    """One run of one side."""

    recipe_name: str
    side: Side
    model: str
    data: str
    """Folder of the rows, written by `write_rows`."""
    folder: str
    """Folder for the snapshots of the weights."""
    rate: float
    seed: int = 0
    lora: bool = False
    seconds: float = 120.0
    """Training stops after so many seconds."""
    steps: int = 1_000_000
    every: float = 10.0
    """Seconds between snapshots; 0: none."""
    at: tuple[int, ...] = ()
    """Steps after which snapshots are taken, in place of `every`."""
    latency: float | None = None
    """Seconds that the async judge takes; None: a plain function without waiting."""
    threads: int = 2
    options: tuple[str, ...] = ()
    """Settings of the side: `table.key=value` of ours, `field=value` of GRPOConfig."""

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.recipe_name]

    @property
    def bf16(self) -> bool:
        """Whether both sides compute in bf16: by the recipe, if this machine does."""
        from _measure import in_bf16  # not where this file is imported as a reward function

        return self.recipe.bf16 and in_bf16()

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> PendingReply:
        plain = json.loads(text)
        lists = {name: tuple(plain[name]) for name in ("options", "at")}
        return cls(**{**plain, **lists})


def write_rows(source: Path, folder: Path, latency: float | None = None) -> Path:
    """Copy the rows with a column `latency`, in seconds, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = read_rows(source / f"two_number_sums.{split}.jsonl")
        lines = [json.dumps({**row, "latency": latency or 0.0}) for row in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_right(completion: str, answer: str) -> bool:
    """Return whether the first line is the answer. A full stop after it is no mistake."""
    return completion.partition("\n")[0].strip().rstrip(".") == answer


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for each right answer, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(is_right(completion, wanted)) for completion, wanted in pairs]


async def judged(
    completions: list[str], answer: list[str], latency: list[float], **columns: Any
) -> list[float]:
    """Judge all completions of the call at once; each verdict takes `latency` seconds."""
    await asyncio.gather(*(asyncio.sleep(seconds) for seconds in latency))
    return exact(completions, answer)


def newline_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens whose text has a newline, each of which ends a response."""
    # in a pair: some decoders drop a space at the beginning
    return [i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i, i])]
