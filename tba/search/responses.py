"""Responses of a search: dialogues, sessions and plain ones, before they are scored."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.models.pretrained import Tokenizer
from tba.prompt import Answer, Prompt
from tba.search.verdicts import Verdict, added
from tba.types import Completion


@dataclass(frozen=True)
class Responses:
    """Responses to prompts, as tokens and as what a task scores."""

    prompts: Sequence[np.ndarray]
    completions: Sequence[Sequence[Completion]]
    answers: Sequence[Sequence[Answer | Verdict]]
    """What scores them, or a verdict, such as that an environment could not be reset."""
    results: Sequence["Result"] = ()
    """Results of the tools' calls."""
    rewards: Sequence[Sequence[Verdict]] | None = None
    """Rewards that a program returned, to which the task's functions add theirs."""

    def rewarded(self, verdicts: list[list[Verdict]]) -> list[list[Verdict]]:
        """Return verdicts of the task's functions with the program's rewards added."""
        if self.rewards is None:
            return verdicts
        pairs = zip(verdicts, self.rewards, strict=True)
        return [list(map(added, group, own)) for group, own in pairs]

    def prompt_text(self, text: Tokenizer, prompt: Prompt, place: int) -> str:
        """Return the prompt of the responses at this place, for a person to read."""
        answer = self.answers[place][0]
        dialogue = not isinstance(answer, Answer) or answer.messages is not None
        if isinstance(prompt.text, str) and not dialogue:
            return prompt.text
        return text.prompt(self.prompts[place])  # with its tools


@dataclass(frozen=True)
class Result:
    """Result of a call as the policy reads it, which may be an error, and may have been cut."""

    content: str
    failed: bool = False
    cut: bool = False
