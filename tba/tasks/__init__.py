"""Tasks provide prompts and score answers. This is their interface; other files are tasks."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from tba.config.mistakes import about
from tba.prompt import Answer, Prompt
from tba.tasks._calls import awaited, call, without_surrogates

Scores = Sequence[float | None]
"""One reward for each answer, in order; None for an answer that cannot be scored."""


class ItemizedReward(float):
    """A reward with its items: the scores and logged values of reward functions, by metric.

    Items that are not finite are left out, because no later mean would be finite. `notes` are texts
    that the functions logged about the answer for people to read.
    """

    items: Mapping[str, float]
    notes: Mapping[str, str]

    def __new__(cls, reward: float, items: Mapping[str, float], notes: Mapping[str, str]) -> Self:
        self = super().__new__(cls, reward)
        self.items = {name: item for name, item in items.items() if isfinite(item)}
        self.notes = notes
        return self


class Scorer(ABC):
    """Scores answers: a task, or one of its measures."""

    @property
    def pass_reward(self) -> float | None:
        """The minimum reward of a correct answer; None if answers are neither right nor wrong."""
        return None

    @abstractmethod
    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        """Return the rewards of a group: all answers to one prompt. May be `async def`.

        A reward may depend on the other answers of the group. If a call raises, each answer is
        scored again in a separate call.
        """


@runtime_checkable
class Checkable(Protocol):
    """A reward function, or a part of a task, that needs a model or a server."""

    def check(self) -> None:
        """Raise ValueError if the model or the server is missing."""


@runtime_checkable
class Loadable(Protocol):
    """A reward function, or a part of a task, that needs a model."""

    def load(self, device: str) -> None:
        """Load models to the device, in a scoring process, before its first score."""


@dataclass(frozen=True)
class Tools:
    """The tools of an environment; each dialogue has its own instance."""

    make: Callable[[], Any]
    """Returns a new instance."""
    max_turns: int
    """Maximum number of turns of the policy in a dialogue."""
    describe: Callable[[], Mapping[str, Mapping[str, Any]]]
    """Returns the schemas. Not called in a scoring process."""
    judged: bool = True
    """Whether rewards see the instances."""

    @cached_property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """JSON schema of each tool for chat templates, from its signature and docstring."""
        return self.describe()

    def open(self, prompt: Prompt) -> tuple[Any, str]:
        """Return a new instance, and the text that `reset` returned. May raise anything."""
        instance = self.make()
        observation = awaited(call(instance.reset, prompt.row()))
        if not isinstance(observation, str | None):
            kind = type(observation).__name__
            raise TypeError(f"reset returned {kind}; it must return text, or None")
        return instance, without_surrogates(observation or "")

    def call(self, instance: Any, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool as text. May raise anything."""
        return str(awaited(getattr(instance, name)(**arguments)))


@dataclass(frozen=True)
class Program:
    """A user's program that talks to the policy over HTTP, in a separate process."""

    rollout: str
    """`file.py:function`, or `package.module:function`."""
    python: str
    """The Python interpreter that runs it."""
    deadline: float
    """Maximum duration of a session in seconds."""
    concurrency: int
    """Maximum number of concurrent sessions in a searcher."""
    max_calls: int
    """Maximum number of calls in a session."""
    history: Literal["append", "template"]
    """How the policy sees the past: as its own tokens, or as the chat template renders it."""
    environment: Mapping[str, str]
    """Environment variables, in addition to the non-secret ones of this process."""


class Task(Scorer):
    """A source of prompts and the reward of their answers: the base class of all tasks.

    A task must define `prompts`, `held_out` and `score`. The rest has defaults.
    """

    samples_again: ClassVar[bool] = False
    """Whether evaluations sample from the training prompts, because no others are held out."""
    reports_perplexity: ClassVar[bool] = False
    """Whether evaluations report perplexities of the answers under the reference."""

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on, with the same ids at every call."""

    @abstractmethod
    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts to evaluate on; equal ones in `prompts()` are not trained on."""

    def measures(self) -> Mapping[str, Scorer]:
        """Return further scores of held-out answers by metric, such as `win_rate`.

        They are never trained on.
        """
        return {}

    @property
    def dependencies(self) -> Sequence[tuple[str, Any]]:
        """The models, tasks and functions that the task consists of, with their options.

        `check` and `load` call theirs. An error begins with the option, unless that is "",
        because the error already names it.
        """
        return ()

    def check(self) -> None:
        """Raise ValueError if a model or a server that the task needs is missing.

        Called before any process starts. Takes a few seconds at most.
        """
        for option, each in self.dependencies:
            if isinstance(each, Checkable):
                with about(option) if option else nullcontext():
                    each.check()

    def load(self, device: str) -> None:
        """Load models to the device, in a scoring process, before its first score."""
        for _, each in self.dependencies:
            if isinstance(each, Loadable):
                each.load(device)

    @property
    def tools(self) -> Tools | None:
        """The tools that the policy can call in its answers, which then are dialogues; or None."""
        return None

    @property
    def program(self) -> Program | None:
        """The user's program that runs sessions with the policy, or None."""
        return None

    def source(self, prompt: Prompt) -> tuple[str, "Task"]:
        """Return the source of a mixture that a prompt belongs to, by name and as a task."""
        return "", self

    def right_answer(self, prompt: Prompt) -> str | None:
        """Return a row's column `answer` as a response would write it; None without one."""
        answer = prompt.columns.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            return None
        if isinstance(answer, float):  # 72.0 or NaN, from a column with gaps
            return str(answer).removesuffix(".0") if isfinite(answer) else None
        return str(answer)


ScorerName = tuple[str, str | None]
"""Name of a task, and name of one of its measures or None for its reward."""
REWARD: ScorerName = ("", None)
"""The reward of the run's task; other tasks belong to sources that are only evaluated."""


def scorer_of(tasks: Mapping[str, Task], name: ScorerName) -> Scorer:
    """Return the scorer of this name: a task, or one of its measures."""
    task = tasks[name[0]]
    return task if name[1] is None else task.measures()[name[1]]
