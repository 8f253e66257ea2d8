"""Your data set and your reward functions, in TRL's conventions."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tba.tasks import Scores, WrongLength
from tba.tasks._data import rows
from tba.types import Answer, Prompt

RewardFunction = Callable[..., Any]
"""`def` or `async def` f(prompts, completions, **columns) -> list[float | None]."""

NAME = "write package.module:function or file.py:function"


@dataclass(frozen=True)
class Custom:
    """Any data set with a `prompt` column (text, or chat messages), and any reward function

        def f(prompts, completions, **columns) -> list[float | None]

    with TRL's signature, or `async def`, named by `package.module:function` or `file.py:function`.
    A call has all completions of one prompt; `prompts` and the columns repeat its values. Several
    functions are added up with `reward_weights`; None means that a function does not apply to
    that sample. For chat prompts, completions are message lists, as in TRL. `held_out_data` is
    evaluated on; without it, the last `held_out_size` rows are kept from training.
    """

    data: str
    reward: str | list[str]
    reward_weights: list[float] | None = None
    split: str = "train"
    """Split of a folder or hub data set, as `held_out_split`."""
    subset: str | None = None
    """Subset of a hub data set (its `name` or configuration)."""
    held_out_data: str | None = None
    held_out_split: str = "test"
    held_out_size: int = 64
    pass_reward: float | None = None
    """Least reward of a correct answer, for pass@1 and pass@k."""

    def __post_init__(self) -> None:
        if self.held_out_size < 0:
            raise ValueError(f"task.held_out_size = {self.held_out_size}; write 0 or more")
        if not self._names:
            raise ValueError(f"task.reward is empty; {NAME}")
        if self.reward_weights is not None and len(self.reward_weights) != len(self._names):
            raise ValueError(
                f"task.reward_weights has {len(self.reward_weights)} numbers for"
                f" {len(self._names)} reward functions; give one for each"
            )
        self.functions  # noqa: B018  a wrong name raises before anything starts

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts[0]

    def held_out(self) -> Sequence[Prompt]:
        return self._prompts[1]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Scores | Awaitable[Scores]:
        """Return the weighted sum of the functions that gave a number; None if none did."""
        arguments = _arguments(prompt, answers)
        scores: dict[int, Scores] = {}
        for i, function in enumerate(self.functions):
            if not _is_async(function):
                scores[i] = _call(function, arguments)
        if len(scores) < len(self.functions):
            return self._await_others(scores, arguments)
        return self._weighted(scores)

    async def _await_others(
        self, scores: dict[int, Scores], arguments: dict[str, list[Any]]
    ) -> Scores:
        """Call the async functions all at once; `scores` has those of the others."""
        others = {i: f for i, f in enumerate(self.functions) if i not in scores}
        awaited = await asyncio.gather(*(_call_async(f, arguments) for f in others.values()))
        return self._weighted({**scores, **dict(zip(others, awaited, strict=True))})

    def _weighted(self, scores: Mapping[int, Scores]) -> list[float | None]:
        weights = self.reward_weights or [1.0] * len(scores)
        in_order = [scores[i] for i in range(len(scores))]
        return [_weighted_sum(of_answer, weights) for of_answer in zip(*in_order, strict=True)]

    @property
    def _names(self) -> list[str]:
        return [self.reward] if isinstance(self.reward, str) else self.reward

    @cached_property
    def functions(self) -> list[RewardFunction]:
        """The reward functions, in the order of `reward`."""
        return [_function(name) for name in self._names]

    @cached_property
    def _prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        train = rows("task.data", self.data, self.split, self.subset, required=("prompt",))
        if self.held_out_data is None:
            cut = len(train) - self.held_out_size
            if cut < 1:
                raise ValueError(
                    f"task.data = {self.data!r} has only {len(train)} rows;"
                    " lower task.held_out_size, or give task.held_out_data"
                )
            train, held_out = train[:cut], train[cut:]
        else:
            key, source, split = "task.held_out_data", self.held_out_data, self.held_out_split
            held_out = rows(key, source, split, self.subset, required=("prompt",))
            held_out = held_out[: self.held_out_size]
        for function in self.functions:
            _check_columns(function, train[0])
        return _prompts("train", train), _prompts("held-out", held_out)


def _prompts(name: str, table: list[dict[str, Any]]) -> list[Prompt]:
    prompts = []
    for i, row in enumerate(table):
        if not isinstance(row["prompt"], str | list):
            raise ValueError(
                f"prompt '{name}-{i}' is {row['prompt']!r}; a prompt is text or a list of chat"
                " messages: remove the row, or give it text"
            )
        columns = {key: value for key, value in row.items() if key != "prompt"}
        prompts.append(Prompt(f"{name}-{i}", row["prompt"], columns))
    return prompts


def _check_columns(function: RewardFunction, row: Mapping[str, Any]) -> None:
    """ValueError if the function has a required parameter that no column gives."""
    given = {*row, "prompts", "completions"} - {"prompt"}
    for p in inspect.signature(function).parameters.values():
        named = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if named and p.default is p.empty and p.name not in given:
            columns = ", ".join(name for name in row if name != "prompt") or "none"
            raise ValueError(
                f"task.reward: {function.__name__} needs {p.name!r}, which is no column of"
                f" task.data; beside prompt there are: {columns}. Rename one to {p.name!r}"
            )


def _arguments(prompt: Prompt, answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """Return what a reward function is called with: one list for each parameter, by name."""
    arguments = {name: [value] * len(answers) for name, value in prompt.columns.items()}
    completions: list[Any] = [a.text for a in answers]
    if not isinstance(prompt.text, str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    return {**arguments, "prompts": [prompt.text] * len(answers), "completions": completions}


def _is_async(function: RewardFunction) -> bool:
    call = type(function).__call__  # of an object with `async def __call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _call(function: RewardFunction, arguments: dict[str, list[Any]]) -> Scores:
    scores = function(**_accepted(function, arguments))
    return _of_length(function, scores, len(arguments["completions"]))


async def _call_async(function: RewardFunction, arguments: dict[str, list[Any]]) -> Scores:
    scores = await function(**_accepted(function, arguments))
    return _of_length(function, scores, len(arguments["completions"]))


def _accepted(function: RewardFunction, arguments: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the arguments that the function takes: all for `**columns`, else those it names."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: values for name, values in arguments.items() if name in parameters}


def _of_length(function: RewardFunction, scores: Scores, count: int) -> Scores:
    if len(scores) != count:
        raise WrongLength(
            f"{function.__name__} returned {len(scores)} rewards for {count} completions"
        )
    return scores


def _weighted_sum(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    terms = [w * s for w, s in zip(weights, scores, strict=True) if s is not None]
    return sum(terms) if terms else None


def _function(name: str) -> RewardFunction:
    """Import the function that `task.reward` names."""
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(f"task.reward = {name!r}: {NAME}")
    try:
        module = _module(place)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ValueError(f"task.reward = {name!r}: {error}; {NAME}") from error
    if attribute not in vars(module):
        raise ValueError(f"task.reward = {name!r}: {place} has no function {attribute!r}; {NAME}")
    function: RewardFunction = vars(module)[attribute]
    if not callable(function):
        raise ValueError(
            f"task.reward = {name!r}: {attribute} is no function but {function!r}; {NAME}"
        )
    return function


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"tba_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
