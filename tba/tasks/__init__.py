"""Tasks provide prompts and score answers. This is their contract; each other file is one task."""

import reprlib
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from tba.config.errors import about
from tba.prompt import Answer, Prompt
from tba.tasks._tools import Tools

Scores = Sequence[float | None]
"""One reward for each answer, in order; None for an answer that cannot be scored."""


class LeftOut(float):
    """NaN in place of a reward: the task leaves an answer out on purpose, which is no fault."""

    reason = "near_duplicate"


NEAR_DUPLICATE = LeftOut("nan")


class Itemized(float):
    """A reward with its items: what each reward function gave and logged, by metric.

    `notes` are what the functions logged about the answer for a person to read.
    """

    items: Mapping[str, float]
    notes: Mapping[str, str]

    def __new__(cls, reward: float, items: Mapping[str, float], notes: Mapping[str, str]) -> Self:
        self = super().__new__(cls, reward)
        self.items, self.notes = items, notes
        return self


class Scorer(Protocol):
    """Scores answers: a task, or one of its measures."""

    @property
    def pass_reward(self) -> float | None:
        """The least reward of a correct answer; None if answers are neither right nor wrong."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        """Return the rewards of a group: all answers to one prompt. May be `async def`.

        A reward may depend on the other answers of the group. If a call raises, each answer is
        scored again in a call of its own.
        """


@runtime_checkable
class Task(Scorer, Protocol):
    """A source of prompts, and the reward of their answers."""

    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on."""

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts to evaluate on; none of them is among `prompts()`."""


@runtime_checkable
class Measured(Protocol):
    """A task whose held-out answers are scored in further ways, which are never trained on."""

    def measures(self) -> Mapping[str, Scorer]:
        """Return each way by the name of its metric, such as `win_rate`."""


@runtime_checkable
class Prepares(Protocol):
    """A task or a reward function that needs a model or a server. A task passes both calls on."""

    def check(self) -> None:
        """ValueError if it cannot work. Called before any process starts; takes seconds at most."""

    def load(self, device: str) -> None:
        """Load models to the device, in a process that scores, before its first score."""


class PassesOn:
    """A task that passes `check` and `load` on to what it consists of."""

    @property
    def inner(self) -> Iterable[tuple[str, Any]]:
        """Its models, tasks and functions, some of which may need a model or a server.

        Each stands with its option, with which errors begin; "" if they name it themselves.
        """
        raise NotImplementedError

    def check(self) -> None:
        for option, each in self.inner:
            if isinstance(each, Prepares):
                with about(option) if option else nullcontext():
                    each.check()

    def load(self, device: str) -> None:
        for _, each in self.inner:
            if isinstance(each, Prepares):
                each.load(device)


ScorerName = tuple[str, str | None]
"""Name of a task and of one of its measures, None for its reward."""
REWARD: ScorerName = ("", None)
"""The reward of the run's own task; the other tasks are those of evaluation sets."""


def scorer_of(tasks: Mapping[str, Task], name: ScorerName) -> Scorer:
    """Return what scores answers: a task, or one of its measures."""
    task, measure = tasks[name[0]], name[1]
    if measure is None:
        return task
    assert isinstance(task, Measured)
    return task.measures()[measure]


@runtime_checkable
class HasParts(Protocol):
    """A task that consists of several tasks, each with metrics of its own."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each part, by name: prompts are chosen in proportion to it."""

    def part(self, prompt: Prompt) -> tuple[str, Task]:
        """Return the part that a prompt belongs to, by name and as a task."""


def part_of(task: Task, prompt: Prompt) -> tuple[str, Task]:
    """Return the part that a prompt belongs to; a task without parts is one part called ""."""
    return task.part(prompt) if isinstance(task, HasParts) else ("", task)


@runtime_checkable
class SamplesAgain(Protocol):
    """A task without held-out prompts: evaluations sample from its training prompts."""

    samples_again: bool


@runtime_checkable
class LeavesOut(Protocol):
    """A task that may leave answers out, so that those that are trained on are no fair sample."""

    @property
    def leaves_out(self) -> str | None:
        """Return the option that makes it do so; None if it keeps all answers."""


@dataclass(frozen=True, kw_only=True)
class Answered(Prompt):
    """Answers from elsewhere to the prompt `of`, which search scores in place of sampled ones."""

    of: Prompt
    answers: Sequence[str]
    rewards: Sequence[float] | None = None
    """Rewards that are known; `score` returns them."""


@runtime_checkable
class Seeded(Protocol):
    """A task with answers that enter the replay buffer before any that are sampled."""

    def given(self) -> Sequence[Answered]:
        """Return the answers, a group at a time."""


@runtime_checkable
class HasTools(Protocol):
    """A task whose answers may be dialogues, in which the policy calls tools."""

    @property
    def tools(self) -> Tools | None: ...


def tools_of(task: Task) -> Tools | None:
    """Return the tools that the policy can call in the answers to a task, if any."""
    return task.tools if isinstance(task, HasTools) else None


class WrongLength(ValueError):
    """A reward function did not return a list with one reward for each completion."""


def listed(scores: Any) -> list[Any]:
    """Return the rewards of a group as a list, one item for each of its first axis.

    WrongLength for what has no order or is text.
    """
    plain = _plain(scores)
    if plain is not scores and not isinstance(plain, list):  # an array without an axis
        return [plain]
    wrong = isinstance(plain, Mapping | Set | str | bytes | bytearray)
    if wrong or not isinstance(plain, Iterable):
        raise WrongLength(
            f"the scoring function returned a {type(scores).__name__}, {reprlib.repr(scores)};"
            " return a list with one number for each completion"
        )
    return [_alone(score) for score in plain]


def number(score: Any) -> float | None:
    """Return a score as a float; None if it is no number."""
    if isinstance(score, str | bytes | bytearray):  # float() would read some
        return None
    try:
        return float(score)
    except Exception:  # untrusted: two numbers raise RuntimeError, 10**400 OverflowError
        return None


def _alone(score: Any) -> Any:
    """Return the only item of nested lists and arrays of one item, such as a row of shape [1]."""
    score = _plain(score)
    while isinstance(score, list | tuple) and len(score) == 1:
        score = _plain(score[0])
    return score


def _plain(value: Any) -> Any:
    """Return an array or a scalar of any library as a list or a number; other things as they are.

    numpy, PyTorch, JAX and pandas have `tolist`, pyarrow and polars the next three.
    """
    for name in ("tolist", "to_pylist", "to_list", "as_py"):
        if callable(method := getattr(value, name, None)):
            return method()
    known = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    if not known and not hasattr(value, "__dlpack__"):
        return value
    import numpy as np  # not above: most scoring processes do without

    return (np.asarray(value) if known else np.from_dlpack(value)).tolist()
