"""Answers of an evaluation as text, with their scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
from jaxtyping import Float

from tba.models.pretrained import Tokenizer
from tba.prompt import Prompt
from tba.search.dialogue import Responses
from tba.search.result import Rejected


@dataclass(frozen=True)
class Scored:
    """An answer to a held-out prompt; its reward or a measure is None if it has none."""

    set: str  # name of the evaluation set; "" for the held-out prompts
    mode: str  # greedy or sampled
    id: str  # of the prompt
    prompt: str
    completion: str
    tokens: int
    finished: bool
    reward: float | None
    measures: dict[str, float | None]


Keep = Callable[[Sequence[Scored]], None]
"""Receives the answers to the prompts of a piece, of one mode."""


def scored(
    text: Tokenizer,
    stop: Sequence[str],
    kind: tuple[str, str],
    prompts: Sequence[Prompt],
    responses: Responses,
    judged: Mapping[str, Float[np.ndarray, "P S"]],
) -> list[Scored]:
    """Return the answers to every prompt; `kind` is the name of their set, and their mode."""
    answers = []
    for i, (prompt, group) in enumerate(zip(prompts, responses.completions, strict=True)):
        asked = shown(text, prompt, responses, i)
        for j, c in enumerate(group):
            values = {name: float(table[i, j]) for name, table in judged.items()}
            scores = {name: None if isnan(value) else value for name, value in values.items()}
            reward, written = scores.pop("reward"), text.shown(c, stop)
            made = Scored(*kind, prompt.id, asked, written, c.length, c.finished, reward, scores)
            answers.append(made)
    return answers


def shown(text: Tokenizer, prompt: Prompt, responses: Responses, place: int) -> str:
    """Return the prompt of the responses at this place, for a person to read."""
    answer = responses.answers[place][0]
    dialogue = isinstance(answer, Rejected) or answer.messages is not None
    if isinstance(prompt.text, str) and not dialogue:
        return prompt.text
    return text.prompt(responses.prompts[place])  # with its tools
