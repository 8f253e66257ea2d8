"""Questions that Reasoning Gym generates, with its scorers: pip install reasoning-gym."""

import re
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from tba.config.tables import Count, Positive
from tba.prompt import Answer, Prompt
from tba.tasks import Itemized, Task
from tba.tasks._rendering import Rendering


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Rendering, Task):
    """Questions of one of Reasoning Gym's generators, and its scorer.

    `size` questions are generated. The first `held_out_size` are held out. The others are trained
    on, but for those that are also held out. A question comes as often as the generator makes it.
    https://github.com/open-thought/reasoning-gym
    """

    generator: str
    """Name of the generator, such as `chain_sum`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the generator, such as `max_digits`, in a table."""
    size: Positive = 5000
    """Questions to generate, the held-out ones included."""
    held_out_size: Count = 256
    """Questions to evaluate on: the first ones."""
    seed: int = 0
    """Seed of the generator."""
    scoring: Literal["own", "exact"] = "own"
    """own: the generator's scorer, from 0 to 1; exact: 1 if the first line is exactly the right
    answer, or the first lines if it has several, else 0. A full stop after it is no mistake."""
    answer_tag: str | None = None
    """Score only the text within the last such tag: `answer` for <answer>42</answer>."""
    prompt: str = "{question}"
    pass_reward: float = 1.0
    """Least reward of a correct answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self._dataset is not None  # raises before anything starts

    def prompts(self) -> Sequence[Prompt]:
        return self._divided[0]

    def held_out(self) -> Sequence[Prompt]:
        return self._divided[1]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        entry = literal_eval(prompt.columns["entry"])
        return [self._score(answer.text, entry) for answer in answers]

    def right_answer(self, prompt: Prompt) -> str | None:
        """Return the generator's own answer as a response would give it; None if it has none."""
        answer = literal_eval(prompt.columns["entry"])["answer"]
        if not isinstance(answer, str):
            return None
        tag = self.answer_tag
        return answer if tag is None else f"<{tag}>{answer}</{tag}>"

    def _score(self, text: str, entry: dict[str, Any]) -> float:
        given: str | None = text
        if self.answer_tag is not None:
            tag = re.escape(self.answer_tag)
            tagged = re.findall(f"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
            given = tagged[-1].strip() if tagged else None
        if self.scoring == "own":
            given = given and given.strip()  # as its authors call it
            unreadable = 0.0
            try:
                score = float(self._dataset.score_answer(given, entry))
            except Exception:  # untrusted: it cannot read the answer
                score = unreadable = 1.0
            return Itemized(score - unreadable, {"scorer/unreadable": unreadable}, {})
        right = entry["answer"].strip()
        lines = (given or "").split("\n")[: right.count("\n") + 1]
        return float("\n".join(lines).strip().rstrip(".") == right.rstrip("."))

    @cached_property
    def _divided(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts to train on, and prompts to evaluate on."""
        # one data set for both, because the next seed makes nearly the same questions
        entries = [self._dataset[i] for i in range(self.size)]
        if self.scoring == "exact" and not all(isinstance(e["answer"], str) for e in entries):
            raise ValueError(
                f"task.scoring = 'exact', but {self.generator} has questions without a single"
                " right answer; set task.scoring=own"
            )
        # not as JSON, which has no tuples; nor generated again where answers are scored, because
        # some generators depend on more than their seed
        with np.printoptions(legacy="1.25"):  # 3, not np.int64(3)
            table = [{**entry, "entry": repr(entry)} for entry in entries]
        held_out = table[: self.held_out_size]
        seen = {row["question"] for row in held_out}
        train = [row for row in table if row["question"] not in seen]
        if not train:
            raise ValueError(
                f"task.held_out_size = {self.held_out_size}: {self.generator} has no other"
                " questions to train on; lower it, raise task.size, or widen task.options"
            )
        prompts = self.rendered("train", train, train, ["entry"])
        return prompts, self.rendered("held-out", held_out, train, ["entry"])

    @cached_property
    def _dataset(self) -> Any:
        """The generator; ValueError if there is none of this name, or an option is wrong."""
        if find_spec("reasoning_gym") is None:
            raise ValueError(
                "task.use = 'reasoning_gym' needs Reasoning Gym: pip install reasoning-gym"
            )
        import reasoning_gym

        name = self.generator
        try:
            return reasoning_gym.create_dataset(
                name, **self.options, size=self.size, seed=self.seed
            )
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(
                f"task.generator = {name!r} with task.options = {self.options}: {error!r};"
                " reasoning_gym.factory.DATASETS has all generators"
            ) from error
