"""Verdicts on answers: rewards or rejections. This module does not import torch."""

import reprlib
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.config.mistakes import masked
from tba.prompt import Answer
from tba.tasks import Itemized, WrongLength, listed, number

PACKAGE = str(Path(__file__).parents[1])
LONGEST = 10_000
"""Longest error message to keep, in characters."""
LARGEST = 1e12
"""Largest absolute value of a reward: losses square it, in float32."""


@dataclass(frozen=True)
class Rejected:
    """The reason why a sample has no reward, and the error message.

    Reasons are `raised`, `timeout`, `memory`, `died`, `not_finite`, `not_a_number`, `none`,
    `no_call`, `wrong_length`, and `truncated`, which has no message.
    """

    reason: str
    detail: str


Verdict = float | Rejected
"""A finite reward, perhaps with its items (`Itemized`), or a rejection."""

DIED = "died"
"""Reason for samples whose scoring ended the scoring process."""
TRUNCATED = Rejected("truncated", "")
"""Rejection of a response that the token limit truncated, with `sampling.truncated = "reject"`.

It is not an error of the reward.
"""


def parse_score(score: Any) -> Verdict:
    """Return the verdict on a scoring function's score. An exception of the score propagates.

    Every score is parsed once, in the process where the function ran.
    """
    if score is None:
        return Rejected("none", "no reward function gave this sample a reward")
    if (value := number(score)) is None:
        return Rejected("not_a_number", f"a reward is {reprlib.repr(score)}")
    if not abs(value) <= LARGEST:  # also rejects NaN
        return Rejected("not_finite", f"a reward is {value}; it must be between ±{LARGEST:g}")
    return score if isinstance(score, Itemized) else value


def added(verdict: Verdict, reward: Verdict) -> Verdict:
    """Return the sum of two rewards, with the items of both; a rejection if either is rejected.

    If no reward function gives the sample a reward, return the second one alone.
    """
    if isinstance(reward, Rejected):
        return reward
    if isinstance(verdict, Rejected):
        return reward if verdict.reason == "none" else verdict
    items: dict[str, float] = {"rewards/rollout": float(reward)}
    notes: dict[str, str] = {}
    for each in (reward, verdict):
        if isinstance(each, Itemized):
            items |= each.items
            notes |= each.notes
    return Itemized(float(verdict) + float(reward), items, notes)


def settle_truncated(
    answers: Sequence[Answer | Verdict], rule: str | float
) -> list[Answer | Verdict]:
    """Return a group with the verdicts that `sampling.truncated` gives to unfinished answers."""
    if rule == "keep":
        return list(answers)
    verdict: Verdict = TRUNCATED if rule == "reject" else float(rule)
    return [verdict if isinstance(a, Answer) and not a.finished else a for a in answers]


def rejection(error: BaseException) -> Rejected:
    """Return the rejection of a call that raised this error, with the user's traceback."""
    if isinstance(error, WrongLength):
        return Rejected("wrong_length", str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        trace = trace.tb_next  # skip the package's calls before the user's
    trace = trace or error.__traceback__
    text = masked("".join(traceback.format_exception(type(error), error, trace)))[-LONGEST:]
    # the message of both torch's RuntimeError and the system's OSError
    no_memory = isinstance(error, MemoryError) or "allocate memory" in text
    if no_memory:
        return Rejected("memory", f"{text}if it needs so much, raise reward.max_memory")
    return Rejected("raised", text)


async def finished(scores: Awaitable[Any]) -> list[Any] | Rejected:
    """Await the scores of an async function."""
    try:
        return listed(await scores)
    except BaseException as error:  # untrusted: even SystemExit must not end the event loop
        return rejection(error)
