"""Responses of a search, and the verdicts on them: rewards or rejections.

Scoring processes import this module, so it imports neither torch nor numpy.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tba.config.mistakes import masked
from tba.prompt import Answer
from tba.scoring.worker import raised
from tba.tasks import ItemizedReward
from tba.tasks._calls import WrongLength, number

if TYPE_CHECKING:
    import numpy as np

    from tba.types import Completion

MAX_MESSAGE = 10_000
"""Longest error message to keep, in characters."""
MAX_REWARD = 1e12
"""Largest absolute value of a reward: losses square it, in float32."""


class Reason(StrEnum):
    """Why a sample has no reward. The values are in the names of metrics, and in files."""

    RAISED = "raised"
    """A reward function, an environment or a program raised an exception."""
    TIMEOUT = "timeout"
    """A call or a session passed its deadline, or was not tried after others had."""
    MEMORY = "memory"
    """A call needed more memory than `reward.max_memory`."""
    DIED = "died"
    """The process that scored the sample, held its environment, or ran its session, ended."""
    NONE = "none"
    """Neither a reward function nor the program gave the sample a reward: all returned None."""
    NOT_A_NUMBER = "not_a_number"
    """The reward is an object that is not a number."""
    NOT_FINITE = "not_finite"
    """The reward is NaN, infinite, or larger than `MAX_REWARD`."""
    WRONG_LENGTH = "wrong_length"
    """A call did not return one reward for each completion."""
    NO_CALL = "no_call"
    """The program returned without calling the policy, so there is nothing to train on."""
    TRUNCATED = "truncated"
    """Truncated by the token limit, with `sampling.truncated = "reject"`: not an error."""


@dataclass(frozen=True)
class Rejection:
    """The reason why a sample has no reward, and the error message."""

    reason: Reason
    detail: str


Verdict = float | Rejection
"""A finite reward, perhaps with its items (`ItemizedReward`), or a rejection."""


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool call as the policy reads it; it may be an error, and may be truncated."""

    content: str
    failed: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Responses:
    """Responses to prompts, as tokens and as answers that a task scores."""

    prompts: "Sequence[np.ndarray]"
    completions: "Sequence[Sequence[Completion]]"
    answers: Sequence[Sequence[Answer | Verdict]]
    """Answers to score, or verdicts, for example if an environment could not be reset."""
    results: Sequence[ToolResult] = ()
    """Results of the tool calls."""
    rewards: Sequence[Sequence[Verdict]] | None = None
    """Rewards that a program returned, to which the task's functions add theirs."""

    def rewarded(
        self, verdicts: list[list[Verdict]], scored: Sequence[Sequence[Answer | Verdict]]
    ) -> list[list[Verdict]]:
        """Return the verdicts of the task's functions with the program's rewards added.

        `scored` are the answers that the functions scored, or verdicts, to which nothing is added.
        """
        if self.rewards is None:
            return verdicts
        rewarded = []
        for group in zip(verdicts, self.rewards, scored, strict=True):
            triples = zip(*group, strict=True)
            rewarded.append([added(v, r) if isinstance(a, Answer) else v for v, r, a in triples])
        return rewarded


def parse_score(score: Any) -> Verdict:
    """Return the verdict on a scoring function's score. Exceptions that the score raises propagate.

    Every score is parsed once, in the process where the function ran.
    """
    if score is None:
        return Rejection(Reason.NONE, "no reward function gave this sample a reward")
    if (value := number(score)) is None:
        return Rejection(Reason.NOT_A_NUMBER, f"a reward is {reprlib.repr(score)}")
    if not abs(value) <= MAX_REWARD:  # also rejects NaN
        return Rejection(
            Reason.NOT_FINITE, f"a reward is {value}; it must be between ±{MAX_REWARD:g}"
        )
    return score if isinstance(score, ItemizedReward) else value


def added(verdict: Verdict, reward: Verdict) -> Verdict:
    """Return the sum of two rewards, with the items of both; a rejection if either is rejected.

    If no reward function gives the sample a reward, return the second one alone.
    """
    if isinstance(reward, Rejection):
        return reward
    if isinstance(verdict, Rejection):
        return reward if verdict.reason == Reason.NONE else verdict
    items: dict[str, float] = {"rewards/rollout": float(reward)}
    notes: dict[str, str] = {}
    for each in (reward, verdict):
        if isinstance(each, ItemizedReward):
            items |= each.items
            notes |= each.notes
    return ItemizedReward(float(verdict) + float(reward), items, notes)


def settle_truncated(
    answers: Sequence[Answer | Verdict], rule: str | float
) -> list[Answer | Verdict]:
    """Return a group with the verdicts that `sampling.truncated` gives to unfinished answers."""
    if rule == "keep":
        return list(answers)
    verdict = Rejection(Reason.TRUNCATED, "") if rule == "reject" else float(rule)
    return [verdict if isinstance(a, Answer) and not a.finished else a for a in answers]


def rejection(error: BaseException) -> Rejection:
    """Return the rejection of a call that raised this error, with the user's traceback."""
    if isinstance(error, WrongLength):
        return Rejection(Reason.WRONG_LENGTH, str(error))
    text = masked(raised(error))[-MAX_MESSAGE:]
    # the message of both torch's RuntimeError and the system's OSError
    no_memory = isinstance(error, MemoryError) or "allocate memory" in text
    if no_memory:
        return Rejection(Reason.MEMORY, f"{text}if a call needs that much, raise reward.max_memory")
    return Rejection(Reason.RAISED, text)


def to_json(result: Verdict | ToolResult) -> Any:
    """Return a result as JSON: a number, a reason and a message, or an object with the fields."""
    if isinstance(result, Rejection):
        return [result.reason, result.detail]
    if isinstance(result, ItemizedReward):
        return {"reward": float(result), **vars(result)}
    return vars(result) if isinstance(result, ToolResult) else result


def from_json(plain: Sequence[Any]) -> list[Any]:
    """Parse results of `to_json`, and texts. Raises one of `process.UNREADABLE` for others."""
    results: list[Verdict | ToolResult | str] = []
    for each in plain:
        match each:
            case [reason, detail]:
                results.append(Rejection(Reason(reason), str(detail)))
            case {"reward": reward, "items": items, "notes": notes}:
                numbers = {name: float(value) for name, value in items.items()}
                results.append(ItemizedReward(float(reward), numbers, dict(notes)))
            case {"content": str(content), "failed": failed, "cut": cut}:
                results.append(ToolResult(content, bool(failed), bool(cut)))
            case _:
                results.append(each if isinstance(each, str) else float(each))
    return results
