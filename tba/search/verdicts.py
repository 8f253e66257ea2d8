"""Verdicts on answers, and waiting for them with a deadline. This module needs no torch."""

import asyncio
import reprlib
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.config.secrets import masked
from tba.prompt import Answer
from tba.tasks import Itemized, LeftOut, WrongLength, listed, number

PACKAGE = str(Path(__file__).parents[1])
LONGEST = 10_000
"""Longest error message to keep, in characters."""
LARGEST = 1e12
"""Largest absolute value of a reward: losses square it, in float32."""


@dataclass(frozen=True)
class Rejected:
    """The reason why a sample has no reward, and the error message.

    Reasons are `raised`, `timeout`, `memory`, `died`, `not_finite`, `not_a_number`, `none`,
    `wrong_length`, and those that are `ON_PURPOSE`, which have no message.
    """

    reason: str
    detail: str


Verdict = float | Rejected

DIED = "died"
"""Reason for samples whose scoring has ended its process."""
TRUNCATED = Rejected("truncated", "")
"""Of a response that the token limit cut off, with `sampling.truncated = "reject"`."""
ON_PURPOSE = (LeftOut.reason, TRUNCATED.reason)
"""Reasons that are no fault of the reward."""


def verdict_on(score: Any) -> Verdict:
    """Return the score as a finite float, with its items, or the reason why it is none."""
    if isinstance(score, Rejected):
        return score
    if isinstance(score, LeftOut):
        return Rejected(LeftOut.reason, "")
    if score is None:
        return Rejected("none", "no reward function gave this sample a reward")
    if (value := number(score)) is None:
        return Rejected("not_a_number", f"a reward is {reprlib.repr(score)}")
    if not abs(value) <= LARGEST:  # NaN is not, either
        return Rejected("not_finite", f"a reward is {value}; it must be between ±{LARGEST:g}")
    return score if isinstance(score, Itemized) else value


def judged_before(
    answers: Sequence[Answer | Rejected], truncated: str | float
) -> list[Answer | Verdict]:
    """Return a group with the verdicts that `sampling.truncated` gives to unfinished answers."""
    if truncated == "keep":
        return list(answers)
    verdict: Verdict = TRUNCATED if truncated == "reject" else float(truncated)
    return [verdict if isinstance(a, Answer) and not a.finished else a for a in answers]


def is_none(score: Any) -> bool:
    """Return whether a score is None, or the verdict on that."""
    return score is None or (isinstance(score, Rejected) and score.reason == "none")


def rejection(error: BaseException) -> Rejected:
    """Return the reason why a call that raised this has no scores, with its own traceback."""
    if isinstance(error, WrongLength):
        return Rejected("wrong_length", str(error))
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename.startswith(PACKAGE):
        own = own.tb_next  # calls of ours, before those of the user
    own = own or error.__traceback__
    text = masked("".join(traceback.format_exception(type(error), error, own)))[-LONGEST:]
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


async def within(seconds: float, call: Awaitable[Any]) -> Any:
    """Return the call's result; after `seconds`, cancel it and return None."""
    task = asyncio.ensure_future(call)
    # not wait_for, which waits for a call that ignores its cancellation
    ended, _ = await asyncio.wait([task], timeout=max(0.0, seconds))
    if not ended:
        task.cancel()
        await asyncio.sleep(0)  # its callbacks run first: one stops the process that it hangs in
        return None
    return task.result()


def run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, whatever the functions in it raise."""
    while True:
        # asyncio lets them out, and keeps them for the task
        with suppress(SystemExit, KeyboardInterrupt):
            return loop.run_forever()
