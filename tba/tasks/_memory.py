"""Rows and reward functions that are passed from Python, and how a config refers to them."""

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import cloudpickle

from tba.config.errors import about
from tba.config.plugins import Plugin, resolve
from tba.config.schema import Config
from tba.config.secrets import read_secrets
from tba.config.tables import Use
from tba.tasks import Task
from tba.tasks._data import Rows, check_names, checked, from_arrow

MARK = "<in memory: "
"""Start of the text that stands in a config for an object passed from Python."""

Functions = tuple[Callable[..., Any], ...]

KEYS = ("data", "held_out_data", "reward")
"""Options of `custom` that can be passed from Python."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""Names of parts of a mixture and of evaluation sets, which become parts of metrics' names."""


@dataclass(frozen=True, repr=False)
class InMemory:
    """Rows and reward functions that were passed from Python; None for each that was not."""

    data: Rows | None = None
    held_out_data: Rows | None = None
    reward: Functions | None = None

    def options(self) -> dict[str, Any]:
        """Return the text that stands for each object in a config, by the name of the option."""
        texts: dict[str, Any] = {}
        for key, table in (("data", self.data), ("held_out_data", self.held_out_data)):
            if table is not None:
                plain = json.dumps(table, sort_keys=True, default=str)  # errors are text
                digest = sha256(plain.encode()).hexdigest()
                texts[key] = f"{MARK}{len(table):,} rows, sha256:{digest[:16]}>"
        if self.reward is not None:
            names = [f"{MARK}{name_of(function)}>" for function in self.reward]
            texts["reward"] = names[0] if len(names) == 1 else names
        return texts


def in_memory(data: Any, held_out_data: Any, reward: Any) -> InMemory | None:
    """Check the objects that were passed from Python; None if there are none."""
    rows = None if data is None else to_rows("data", data)
    held_out = None if held_out_data is None else to_rows("held_out_data", held_out_data)
    functions = None
    if reward is not None:
        functions = tuple(reward) if isinstance(reward, list | tuple) else (reward,)
        for function in functions:
            if not callable(function):
                raise ValueError(
                    f"reward= has {function!r}, which is not a function; for"
                    " package.module:function or file.py:function, set task.reward in the config"
                )
    memory = InMemory(rows, held_out, functions)
    return None if memory == InMemory() else memory


def with_memory(config: Config, memory: InMemory | None) -> Config:
    """Return the config with a text in `[task]` for each object; ValueError if they do not fit."""
    texts = {} if memory is None else memory.options()
    named = "use" in config.task.model_fields_set
    options = config.task.options
    if texts and named and config.task.use != "custom":
        raise ValueError(
            f"task.use = {config.task.use!r} has data and rewards of its own; set task.use=custom"
            " to train on data= and reward=, or drop these arguments"
        )
    for key in KEYS:
        value = options.get(key)
        if _is_text(value) and key not in texts:
            raise ValueError(f"task.{key} = {value!r} was passed from Python; pass {key}= again")
        if value is not None and not _is_text(value) and key in texts:
            raise ValueError(f"both task.{key} = {value!r} and {key}= are given; drop one of them")
        if texts and key != "held_out_data" and key not in options | texts:
            raise ValueError(f"{key}= is missing: pass it too, or set task.{key} in the config")
    if not texts:
        return config
    return config.model_copy(update={"task": Use(use="custom", **(options | texts))})


def refuse(task: Use, run: str) -> None:
    """ValueError, with the Python call, if the run was started with objects passed from Python."""
    passed = [key for key in KEYS if _is_text(task.options.get(key))]
    if passed:
        arguments = ", ".join(f"{key}=..." for key in passed)
        raise ValueError(
            f"{run} was started from Python with {' and '.join(passed)} in memory; resume it there"
            f" (a run that is complete is evaluated again):"
            f' tba.train(tba.load("{run}/config.json"), resume="{run}", {arguments})'
        )


def check_same(task: Use, before: Use) -> None:
    """ValueError if a resumed run would have other rows than it was started with."""
    for key in ("data", "held_out_data"):
        now, then = task.options.get(key), before.options.get(key)
        if _is_text(then) and now != then:
            raise ValueError(
                f"{key}= is not what the run was started with: {now} instead of {then};"
                " pass the same rows, or start a new run"
            )


def build_task(plugin: Plugin, memory: InMemory | None, device: str | None = None) -> Task:
    """Build a task, with the objects passed from Python for which its options have a text.

    With a device, also load its models there: it then scores in this process.
    """
    passed = [key for key in KEYS if _is_text(plugin.options.get(key))]
    if memory is None or not passed:
        task = plugin.build()
    else:
        named = {key: None for key in KEYS if key not in passed}
        options = read_secrets(plugin.options)
        task = plugin.cls(memory=replace(memory, **named), **options)
    if not isinstance(task, Task):
        name = plugin.cls.__name__
        raise ValueError(f"{name} must inherit from tba.tasks.Task; write: class {name}(Task)")
    if device is not None:
        task.load(device)
    return task


def named_task(
    key: str, use: str, options: Mapping[str, Any], memory: InMemory | None = None
) -> Task:
    """Build the task of the table at `key`, whose last part is its name.

    ValueError, which says where, if the name, the task or an option is wrong.
    """
    name = key.split(".", 2)[2]
    if not NAME.fullmatch(name):
        raise ValueError(f"[{key}]: {name!r} must be letters, digits, `_`, `-` and `.`; rename it")
    plugin = resolve("tasks", key, use, options)
    with about(f"[{key}]"):  # errors speak of `task.`
        return build_task(plugin, memory)


def name_of(function: Callable[..., Any]) -> str:
    """Return `module.function`; for a callable object, its class."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    named = function if inspect.isroutine(function) else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def to_send(functions: Functions | None, config: Config) -> Functions | bytes | None:
    """Return reward functions as they are, or as bytes if they are called in another process.

    ValueError if one cannot be sent there.
    """
    here = ("local", "thread")
    if functions is None or (config.runtime.use, config.reward.isolate) == here:
        return functions
    for function in functions:
        name = name_of(function)
        module, local = name.split(".")[0], "runtime.use=local and reward.isolate=thread"
        known = module in ("__main__", "builtins")
        if not known and not any(finder.find_spec(module, None) for finder in sys.meta_path):
            raise ValueError(
                f"reward= {name} cannot be sent to another process, which cannot import"
                f" {module!r}; put its folder on sys.path, or set {local}"
            )
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # the function's own objects decide what is raised
            why = str(error).partition("\n")[0]
            raise ValueError(
                f"reward= {name} cannot be sent to another process: {why}; create open files, locks"
                f" and connections inside the function, or set {local}"
            ) from error
    return cloudpickle.dumps(functions)


def to_rows(argument: str, data: Any) -> Rows:
    """Return a list of dicts, a `datasets.Dataset` or a pandas DataFrame as plain rows."""
    from datasets import Dataset
    from pandas import DataFrame

    if isinstance(data, DataFrame):
        with about(f"{argument}="):
            check_names(list(map(str, data.columns)))
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    elif isinstance(data, Dataset):
        data = from_arrow(data.with_format("arrow")[:])
    if not isinstance(data, list | tuple):
        raise ValueError(
            f"{argument}= is of type {type(data).__name__}; pass a list of dicts, a DataFrame or"
            f" one split of a datasets.Dataset. For a file or a hub name, set task.{argument}"
        )
    if not all(isinstance(row, dict) for row in data):
        raise ValueError(f"{argument}=: every row must be a dict, {{column: value, ...}}")
    return checked(f"{argument}=", list(data))


def _is_text(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(v, str) and v.startswith(MARK) for v in values)
