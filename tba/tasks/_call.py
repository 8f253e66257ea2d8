"""Arguments of reward functions, as in TRL, and what they log."""

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NoReturn

from tba.prompt import Answer, Prompt

LONGEST_NOTE = 1000
"""Longest text about a completion that is kept, in characters."""

PASSED = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
)
"""Arguments of every reward function, beside the columns."""


@dataclass(frozen=True)
class TrainerState:
    """State of the trainer that a searcher knows, by the names of transformers' TrainerState.

    `global_step` is the number of optimizer steps of the newest weights that began one of the
    completions, and `max_steps` is `run.steps`.
    """

    global_step: int
    max_steps: int

    def __getattr__(self, name: str) -> NoReturn:  # for all other names
        raise AttributeError(
            f"trainer_state.{name} is not known where rewards are computed, which is apart from the"
            " trainer; use trainer_state.global_step and trainer_state.max_steps"
        )


@dataclass
class RewardLog:
    """Log of reward functions while they score a group of `count` completions."""

    count: int
    _metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _notes: dict[str, list[str]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number about the group. It is left out if it is not finite."""
        if math.isfinite(number := float(value)):  # or no later mean would be finite
            self._metrics[str(name)].append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log something about each completion, for a person to read."""
        if len(values) != self.count:
            raise ValueError(
                f"log_extra({column!r}, ...) got {len(values)} values for {self.count} completions;"
                " give one for each"
            )
        self._notes[str(column)] = [str(value)[:LONGEST_NOTE] for value in values]

    def metrics(self) -> dict[str, float]:
        """Return the mean of what was logged, by name."""
        return {name: fmean(values) for name, values in self._metrics.items()}

    def notes(self, place: int) -> dict[str, str]:
        """Return what was logged about one of the completions, by column."""
        return {column: texts[place] for column, texts in self._notes.items()}


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with the arguments that it names; with all of them if it has `**columns`."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**arguments)
    names = {p.name for p in parameters}
    return function(**{name: value for name, value in arguments.items() if name in names})


def arguments_of(prompt: Prompt, answers: Sequence[Answer], log: RewardLog) -> dict[str, Any]:
    """Return everything that a reward function may take, by name."""
    state = max(a.version for a in answers), max(a.steps for a in answers)
    completions: list[Any] = [a.text for a in answers]
    if answers[0].messages is not None:
        completions = [list(a.messages or ()) for a in answers]
    elif not isinstance(prompt.text, str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    columns = prompt.columns.items()
    arguments: dict[str, Any] = {name: [value] * len(answers) for name, value in columns}
    if answers[0].environment is not None:
        arguments["environments"] = [a.environment for a in answers]
    return arguments | {
        "prompts": [prompt.text] * len(answers),
        "completions": completions,
        "completion_ids": [list(a.tokens) for a in answers],
        "trainer_state": TrainerState(*state),
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
    }


def metric_names(functions: Sequence[Any]) -> list[str]:
    """Return the name of each reward function, as in TRL's metrics; the same name gets a number."""
    names: list[str] = []
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        try:
            names.append(str(function.__name__))
        except AttributeError:  # an instance of a class
            names.append(type(function).__name__)
    earlier = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{n}_{e + 1}" if e else n for n, e in zip(names, earlier, strict=True)]
