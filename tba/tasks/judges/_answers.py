"""Answers of vLLM's server, and the scores in them. A ValueError says what is wrong with one."""

import math
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat


class Part(BaseModel):
    """A part of an answer. Text and booleans are no numbers."""

    model_config = ConfigDict(strict=True)


class Probs(Part):
    """One text's score for each label."""

    index: int
    probs: list[FiniteFloat]


class Classified(Part):
    """Answer of `/classify`."""

    data: list[Probs]

    def scores(self, label: int | None, count: int) -> list[float]:
        """Return the scores of so many texts, for the only label, or for the one of this number."""
        rows = {each.index: each.probs for each in self.data}
        if len(self.data) != count:
            raise ValueError(f"answered {len(self.data)} scores for {count} texts")
        if rows.keys() != set(range(count)):
            raise ValueError(f"did not answer for each of {count} texts: wrong or repeated indices")
        labels = len(rows[0])
        if any(len(probs) != labels for probs in rows.values()):
            raise ValueError("answered with different numbers of labels")
        number = label or 0
        if (label is None and labels != 1) or not 0 <= number < labels:
            raise ValueError(f"knows {labels} labels; set label to the number of one, from 0 on")
        return [rows[index][number] for index in range(count)]


class Token(Part):
    token: str
    logprob: FiniteFloat


class Step(Token):
    """A token that was generated, and the likeliest tokens in its place."""

    top_logprobs: list[Token]


class Steps(Part):
    content: list[Step]


class Choice(Part):
    index: Literal[0] = 0
    logprobs: Steps


class Completed(Part):
    """Answer of `/v1/chat/completions` with log-probs."""

    choices: list[Choice] = Field(min_length=1, max_length=1)

    def logp(self, positive: str, negative: str) -> float:
        """Return log P(positive) of the two words, by the first token that is not blank.

        A word is as likely as the likeliest token that begins it, or, if none is among those that
        the server tells, as the last of these, which is an upper bound.
        """
        first = next(
            (step for step in self.choices[0].logprobs.content if step.token.strip()), None
        )
        likeliest = [] if first is None else first.top_logprobs
        logp = []
        for word, other in ((positive, negative), (negative, positive)):
            of_word = [t.logprob for t in likeliest if _begins(word, t) and not _begins(other, t)]
            logp.append(max(of_word, default=-math.inf))
        if max(logp) == -math.inf:
            raise ValueError(f"began its answer with neither {positive!r} nor {negative!r}")
        least = min(each.logprob for each in likeliest)
        of_positive, of_negative = (max(least, p) for p in logp)
        return -float(np.logaddexp(0.0, of_negative - of_positive))


def _begins(word: str, token: Token) -> bool:
    text = token.token.strip()
    return text != "" and word.startswith(text)
