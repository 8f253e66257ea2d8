"""Verdicts on answers: rewards, and reasons why there is none. This module needs no torch."""

import reprlib
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.config.errors import masked
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
"""Reason for samples whose scoring has ended its process."""
TRUNCATED = Rejected("truncated", "")
"""Rejection of a response that the token limit cut off, with `sampling.truncated = "reject"`.

It is no fault of the reward.
"""


def parse_score(score: Any) -> Verdict:
    """Return the verdict on a score as a scoring function returned it. Raises what the score does.

    Every score is parsed once, in the process where the function ran.
    """
    if score is None:
        return Rejected("none", "no reward function gave this sample a reward")
    if (value := number(score)) is None:
        return Rejected("not_a_number", f"a reward is {reprlib.repr(score)}")
    if not abs(value) <= LARGEST:  # NaN is not, either
        return Rejected("not_finite", f"a reward is {value}; it must be between ±{LARGEST:g}")
    return score if isinstance(score, Itemized) else value


def added(verdict: Verdict, reward: Verdict) -> Verdict:
    """Return the sum of two rewards, with the items of both; a rejection if one is.

    The second one stands alone if no reward function gives the sample a reward.
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
    """Return the reason why a call that raised this has no scores, with the user's traceback."""
    if isinstance(error, WrongLength):
        return Rejected("wrong_length", str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        trace = trace.tb_next  # calls of ours, before those of the user
    trace = trace or error.__traceback__
    text = masked("".join(traceback.format_exception(type(error), error, trace)))[-LONGEST:]
    # torch raises RuntimeError and the system OSError, both with these words
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
