"""Your data set and your reward function, in TRL's conventions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tba.tasks import WrongLength
from tba.tasks._data import rows
from tba.types import Answer, Prompt

RewardFunction = Callable[..., Sequence[float | None]]


@dataclass(frozen=True)
class Custom:
    """Any data set with a `prompt` column (text, or chat messages), and any function with TRL's signature,

        def f(prompts, completions, **columns) -> list[float | None]

    written `package.module:function` or `file.py:function`. Several are added up with `reward_weights`; None means that a
    function does not apply to that sample. For chat prompts, completions are message lists, as in TRL.
    `held_out_data` is evaluated on; without it, the last `held_out_size` rows are kept from training.
    """

    data: str
    reward: str | list[str]
    reward_weights: list[float] | None = None
    split: str = "train"
    """Of a folder or hub data set, as `held_out_split`."""
    subset: str | None = None
    """Of a hub data set (its `name` or configuration)."""
    held_out_data: str | None = None
    held_out_split: str = "test"
    held_out_size: int = 64
    pass_reward: float | None = None
    """An answer with at least this reward is right, for pass@1 and pass@k."""

    def __post_init__(self) -> None:
        if self.held_out_size < 0:
            raise ValueError(f"task.held_out_size = {self.held_out_size}; write 0 or more")
        if not self._names:
            raise ValueError(
                "task.reward is empty; write package.module:function or file.py:function"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self._names):
            raise ValueError(
                f"task.reward_weights has {len(self.reward_weights)} numbers for {len(self._names)} reward functions"
            )
        self.functions  # noqa: B018  a name that leads nowhere is told before anything starts

    def prompts(self) -> Sequence[Prompt]:
        return self._rows[0]

    def held_out(self) -> Sequence[Prompt]:
        return self._rows[1]

    def score(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[float | None]:
        """The weighted sum of the functions that gave a number; None where none did."""
        chat = not isinstance(prompts[0].text, str)
        completions = [
            [{"role": "assistant", "content": a.text}] if chat else a.text for a in answers
        ]
        columns = {name: [p.columns[name] for p in prompts] for name in prompts[0].columns}
        found = [_call(f, [p.text for p in prompts], completions, columns) for f in self.functions]
        weights = self.reward_weights or [1.0] * len(found)
        return [_weighted(scores, weights) for scores in zip(*found, strict=True)]

    @property
    def _names(self) -> list[str]:
        return [self.reward] if isinstance(self.reward, str) else self.reward

    @cached_property
    def functions(self) -> list[RewardFunction]:
        return [_function(name) for name in self._names]

    @cached_property
    def _rows(self) -> tuple[list[Prompt], list[Prompt]]:
        found = rows("task.data", self.data, self.split, self.subset, required=("prompt",))
        if self.held_out_data is not None:
            kept = rows(
                "task.held_out_data",
                self.held_out_data,
                self.held_out_split,
                self.subset,
                required=("prompt",),
            )[: self.held_out_size]
        else:
            cut = len(found) - self.held_out_size
            if cut < 1:
                raise ValueError(
                    f"task.data = {self.data!r} has only {len(found)} rows; lower task.held_out_size, or give task.held_out_data"
                )
            found, kept = found[:cut], found[cut:]
        for function in self.functions:
            _check_columns(function, found[0])
        return _prompts("train", found), _prompts("held-out", kept)


def _prompts(name: str, found: list[dict[str, Any]]) -> list[Prompt]:
    for i, row in enumerate(found):
        if not isinstance(row["prompt"], str | list):
            raise ValueError(
                f"prompt '{name}-{i}' is {row['prompt']!r}; a prompt is text or a list of chat messages: remove the row, or give it text"
            )
    return [
        Prompt(f"{name}-{i}", row["prompt"], {k: v for k, v in row.items() if k != "prompt"})
        for i, row in enumerate(found)
    ]


def _check_columns(function: RewardFunction, row: Mapping[str, Any]) -> None:
    """ValueError if the function needs what no column gives."""
    parameters = inspect.signature(function).parameters.values()
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing := [
        name for name in needed if name not in {*row, "prompts", "completions"} - {"prompt"}
    ]:
        columns = ", ".join(name for name in row if name != "prompt") or "none"
        raise ValueError(
            f"task.reward: {function.__name__} needs {missing[0]!r}, which is no column of task.data; beside prompt there are: {columns}"
        )


def _call(
    function: RewardFunction,
    prompts: list[Any],
    completions: list[Any],
    columns: dict[str, list[Any]],
) -> Sequence[float | None]:
    """With what it takes: everything for `**columns`, else what it names."""
    parameters = inspect.signature(function).parameters
    given = {**columns, "prompts": prompts, "completions": completions}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given = {name: values for name, values in given.items() if name in parameters}
    scores = function(**given)
    if len(scores) != len(completions):
        raise WrongLength(
            f"{function.__name__} returned {len(scores)} rewards for {len(completions)} completions"
        )
    return scores


def _weighted(scores: Sequence[float | None], weights: Sequence[float]) -> float | None:
    given = [w * s for w, s in zip(weights, scores, strict=True) if s is not None]
    return sum(given) if given else None


def _function(name: str) -> RewardFunction:
    where, _, function = name.rpartition(":")
    if not where:
        raise ValueError(
            f"task.reward = {name!r}: write package.module:function or file.py:function"
        )
    try:
        module = (
            _from_file(Path(where).expanduser())
            if where.endswith(".py")
            else importlib.import_module(where)
        )
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ValueError(
            f"task.reward = {name!r}: {error}; write package.module:function or file.py:function"
        ) from error
    if function not in vars(module):
        raise ValueError(f"task.reward = {name!r}: {where} has no function {function!r}")
    found: RewardFunction = vars(module)[function]
    if not callable(found):
        raise ValueError(f"task.reward = {name!r}: {function} is no function but {found!r}")
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"tba_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
