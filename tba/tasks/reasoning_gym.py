"""Questions generated and scored by Reasoning Gym: pip install reasoning-gym."""

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
from tba.tasks import ItemizedReward, Task
from tba.tasks._rendering import Rendering


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Rendering, Task):
    """Questions of one of Reasoning Gym's generators, and its scorer.

    Generates `size` questions. The first `held_out_size` are held out; the others are trained on,
    unless they are also held out (`task.allow_loss`). Repeated questions are kept.
    https://github.com/open-thought/reasoning-gym
    """

    generator: str
    """Name of the generator, such as `chain_sum`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Table with options of the generator, such as `max_digits`."""
    size: Positive = 5000
    """Number of questions to generate, including held-out ones."""
    held_out_size: Count = 256
    """Number of held-out questions: the first ones."""
    seed: int = 0
    """Seed of the generator."""
    scoring: Literal["own", "exact"] = "own"
    """own: the generator's scorer, from 0 to 1; exact: 1 if the first line (or as many lines as the
    right answer has) is exactly the right answer, else 0. A full stop at the end is ignored."""
    answer_tag: str | None = None
    """Score only the text within the last such tag: `answer` for <answer>42</answer>."""
    prompt: str = "{question}"
    pass_reward: float = 1.0
    """Minimum reward of a correct answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self._dataset is not None  # raises before anything starts

    def prompts(self) -> Sequence[Prompt]:
        return self._divided[0]

    def held_out(self) -> Sequence[Prompt]:
        return self._divided[1]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        entry = literal_eval(prompt.columns["entry"])
        right = str(entry["answer"]).strip()
        scores: list[float | None] = []
        for answer in answers:
            given: str | None = answer.text
            if self.answer_tag is not None:
                tag = re.escape(self.answer_tag)
                tagged = re.findall(f"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", answer.text, re.DOTALL)
                given = tagged[-1].strip() if tagged else None
            if self.scoring == "exact":
                lines = (given or "").split("\n")[: right.count("\n") + 1]
                scores.append(float("\n".join(lines).strip().rstrip(".") == right.rstrip(".")))
                continue
            given = given and given.strip()  # as Reasoning Gym's authors do
            unreadable = 0.0
            try:
                score = float(self._dataset.score_answer(given, entry))
            except Exception:  # untrusted: it cannot read the answer
                score = unreadable = 1.0
            scores.append(ItemizedReward(score - unreadable, {"scorer/unreadable": unreadable}, {}))
        return scores

    def right_answer(self, prompt: Prompt) -> str | None:
        """Return the generator's answer in the form of a response; None if it is not text."""
        answer = literal_eval(prompt.columns["entry"])["answer"]
        if not isinstance(answer, str):
            return None
        tag = self.answer_tag
        return answer if tag is None else f"<{tag}>{answer}</{tag}>"

    @cached_property
    def _divided(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training prompts and held-out prompts."""
        # one data set for both, because the next seed generates nearly the same questions
        entries = [self._dataset[i] for i in range(self.size)]
        if self.scoring == "exact" and not all(isinstance(e["answer"], str) for e in entries):
            raise ValueError(
                f"task.scoring = 'exact', but {self.generator} has questions without a single"
                " right answer; set task.scoring=own"
            )
        # not JSON, which has no tuples; not generated again for scoring either, because some
        # generators depend on more than their seed
        with np.printoptions(legacy="1.25"):  # 3, not np.int64(3)
            table = [{**entry, "entry": repr(entry)} for entry in entries]
        held_out = table[: self.held_out_size]
        train = table[self.held_out_size :]
        prompts = self.rendered("train", train, train, ["entry"])
        return prompts, self.rendered("held-out", held_out, train, ["entry"])

    @cached_property
    def _dataset(self) -> Any:
        """The generator; ValueError if its name is unknown or an option is invalid."""
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
