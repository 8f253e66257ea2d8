"""Tasks provide prompts and score answers. This is their interface; other files are tasks."""

import asyncio
import inspect
import reprlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import frexp, isfinite
from threading import Thread
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from tba.config.mistakes import about
from tba.prompt import Answer, Prompt

Scores = Sequence[float | None]
"""One reward for each answer, in order; None for an answer that cannot be scored."""

MAX_CONCURRENT_CALLS = 64
"""Maximum number of tool calls that run at once."""


class Itemized(float):
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
class Checks(Protocol):
    """A reward function, or a part of a task, that needs a model or a server."""

    def check(self) -> None:
        """Raise ValueError if the model or the server is missing."""


@runtime_checkable
class Loads(Protocol):
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
        observation = _awaited(call(instance.reset, prompt.row()))
        if not isinstance(observation, str | None):
            kind = type(observation).__name__
            raise TypeError(f"reset returned {kind}; it must return text, or None")
        return instance, without_surrogates(observation or "")

    def call(self, instance: Any, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool as text. May raise anything."""
        return str(_awaited(getattr(instance, name)(**arguments)))


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
            if isinstance(each, Checks):
                with about(option) if option else nullcontext():
                    each.check()

    def load(self, device: str) -> None:
        """Load models to the device, in a scoring process, before its first score."""
        for _, each in self.dependencies:
            if isinstance(each, Loads):
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


BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Significant bits of number formats below float64."""


class WrongLength(ValueError):
    """A reward function did not return a list with one reward for each completion."""


def listed(scores: Any) -> list[Any]:
    """Return the rewards of a group as a list, with one item for each index of the first axis.

    Raises WrongLength for values without an order and for text.
    """
    plain = _plain(scores)
    if isinstance(plain, int | float) and plain is not scores:
        return [plain]  # an array without axes, for one completion
    wrong = isinstance(plain, Mapping | Set | str | bytes | bytearray)
    if wrong or not isinstance(plain, Iterable):
        raise WrongLength(
            f"the scoring function returned a {type(scores).__name__}, {reprlib.repr(scores)};"
            " return a list with one number for each completion"
        )
    scores = []
    for score in plain:
        score = _plain(score)
        while isinstance(score, list | tuple) and len(score) == 1:  # a row of shape [1]
            score = _plain(score[0])
        scores.append(score)
    return scores


def number(score: Any) -> float | None:
    """Return a score as a float; None if it is not a number."""
    if isinstance(score, str | bytes | bytearray):  # float() would parse some
        return None
    try:
        return float(score)
    except Exception:  # untrusted: two numbers raise RuntimeError, 10**400 OverflowError
        return None


def _shortest(value: Any, bits: int) -> Any:
    """Return the shortest decimals for numbers with `bits`: 0.9, not 0.8999999761581421."""
    if isinstance(value, list):
        return [_shortest(each, bits) for each in value]
    if not isfinite(value):
        return value
    mantissa, exponent = frexp(value)
    # half the distance to the next number, which is smaller below a power of 2
    half = 2.0 ** (exponent - bits - 1 - (abs(mantissa) == 0.5))
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 18))
    return next(each for each in decimals if abs(each - value) < half)


def _plain(value: Any) -> Any:
    """Convert an array or a scalar of any library to a list or a number; return others unchanged.

    numpy, PyTorch, JAX and pandas have `tolist`, other libraries `__array__` or `__dlpack__`.
    """
    if callable(tolist := getattr(value, "tolist", None)):
        plain = tolist()
        bits = BITS.get(str(getattr(value, "dtype", "")).rpartition(".")[2])
        return plain if bits is None else _shortest(plain, bits)
    has_array = hasattr(value, "__array__")
    if not has_array and not hasattr(value, "__dlpack__"):
        return value
    import numpy as np  # here, because most scoring processes do not need it

    return (np.asarray(value) if has_array else np.from_dlpack(value)).tolist()


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with the arguments that it names, or with all if it has `**columns`.

    A column `self` is not passed to methods.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        if not inspect.isfunction(function):
            arguments = {n: x for n, x in arguments.items() if n not in ("self", "cls")}
        return function(**arguments)
    names = {p.name for p in parameters}
    return function(**{name: value for name, value in arguments.items() if name in names})


def without_surrogates(text: str) -> str:
    """Return the text with `?` for each lone surrogate, which tokenizers do not accept."""
    return text.encode("utf-8", "replace").decode("utf-8")


def within(seconds: float, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the result or exception of each call, or None if it does not return in time.

    Calls run in parallel in daemon threads, which are abandoned if they hang.
    """
    outcomes: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            outcomes[place] = calls[place]()
        except BaseException as error:  # untrusted: even SystemExit must become a result
            outcomes[place] = error

    for start in range(0, len(calls), MAX_CONCURRENT_CALLS):
        places = range(start, min(start + MAX_CONCURRENT_CALLS, len(calls)))
        until = time.monotonic() + seconds
        threads = [Thread(target=run, args=[p], daemon=True, name="tool") for p in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    return list(outcomes)  # a copy: late results do not count


def _awaited(value: Any) -> Any:
    """Return a value, or the result of a coroutine, which runs in a new event loop."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value
