"""Rows and reward functions passed from Python, and functions that build tasks with them."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import cloudpickle

from tba.config.mistakes import about
from tba.config.plugins import resolve
from tba.config.schema import Config
from tba.config.secrets import read_secrets
from tba.config.tables import PluginTable, TaskTable
from tba.models.template import check_names
from tba.tasks import Task
from tba.tasks._data import Rows, checked, from_arrow

Functions = tuple[Callable[..., Any], ...]

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""Names of sources, which appear in the names of metrics."""


@dataclass(frozen=True, repr=False)
class InMemoryData:
    """Rows and reward functions that were passed from Python."""

    rows: Mapping[str, Rows]
    """Rows by option of `[task]`: `data` or `held_out_data`."""
    functions: Functions | None = None

    def named_in(self, config: Config, run: Path) -> Config:
        """Return the config with the files of the rows in the run folder.

        Raises ValueError if the config names another task, or other data or rewards.
        """
        task = config.task
        if "use" in task.model_fields_set and task.use != "custom":
            raise ValueError(
                f"task.use = {task.use!r} has its own data and rewards; set task.use=custom"
                " to train on data= and reward=, or drop these arguments"
            )
        folder = run.resolve()
        files: dict[str, Any] = {name: str(folder / f"{name}.jsonl") for name in self.rows}
        taken = files if self.functions is None else {**files, "reward": None}
        for option, file in taken.items():
            value = task.options.get(option)
            if value is not None and str(Path(str(value)).resolve()) != file:
                raise ValueError(
                    f"both task.{option} = {value!r} and {option}= are given; drop one"
                )
        table = TaskTable(**task.model_dump() | {"use": "custom"} | files)
        return config.model_copy(update={"task": table})

    def write(self, run: Path, is_new: bool) -> None:
        """Write the rows to their files; ValueError if a resumed run started with other rows."""
        for option, rows in self.rows.items():
            file = run / f"{option}.jsonl"
            text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
            if not is_new and file.exists() and file.read_text("utf-8") != text:
                raise ValueError(
                    f"{option}= is not what the run was started with; pass the same rows, leave"
                    " them out, or start a new run"
                )
            file.write_text(text, encoding="utf-8")


def passed_from_python(data: Any, held_out_data: Any, reward: Any) -> InMemoryData | None:
    """Check the objects that were passed from Python; return None if there are none."""
    given = {"data": data, "held_out_data": held_out_data}
    rows = {option: to_rows(option, each) for option, each in given.items() if each is not None}
    if reward is None:
        return InMemoryData(rows) if rows else None
    functions = tuple(reward) if isinstance(reward, list | tuple) else (reward,)
    for function in functions:
        if inspect.isclass(function) or not callable(function):
            raise ValueError(
                f"reward= has {function!r}, which is not a function; for"
                " package.module:function or file.py:function, set task.reward in the config; of a"
                " class, pass an instance"
            )
    return InMemoryData(rows, functions)


def build_task(table: PluginTable, functions: Functions | None, device: str | None = None) -> Task:
    """Build the task of a table, with the functions passed from Python if it names no reward.

    With a device, also load its models there, so that it can score in this process.
    """
    plugin = resolve("tasks", "task", table.use, table.options)
    filled_in: dict[str, Any] = {}
    takes_functions = "passed" in {field.name for field in fields(plugin.cls)}
    if functions is not None and takes_functions and plugin.options.get("reward") is None:
        filled_in["passed"] = functions
    if isinstance(table, TaskTable) and table.weights:
        filled_in["tasks"] = {name: build_source(table, name, functions) for name in table.weights}
        filled_in["weights"] = table.weights
    task = plugin.cls(**filled_in, **read_secrets(plugin.options))
    if not isinstance(task, Task):
        name = plugin.cls.__name__
        raise ValueError(f"{name} must inherit from tba.tasks.Task; write: class {name}(Task)")
    if device is not None:
        task.load(device)
    return task


def build_source(table: TaskTable, name: str, functions: Functions | None) -> Task:
    """Build the task of a source; ValueError, with its table, if its name or its task is wrong."""
    key = f"task.sources.{name}"
    if not NAME.fullmatch(name):
        raise ValueError(f"[{key}]: {name!r} must be letters, digits, `_`, `-` and `.`; rename it")
    with about(f"[{key}]"):  # error messages name keys of `task.`
        return build_task(table.source(name), functions)


def to_send(functions: Functions | None, config: Config) -> Functions | bytes | None:
    """Return reward functions unchanged, or pickled if they are called in another process.

    Raises ValueError if a function cannot be pickled or imported there.
    """
    if functions is None:
        return None
    if config.runtime.use == "local" and config.reward.isolate == "none":
        return functions
    for function in functions:
        named = function if inspect.isroutine(function) else type(function)
        module = named.__module__.split(".")[0]
        known = module in ("__main__", "builtins")
        if not known and not any(finder.find_spec(module, None) for finder in sys.meta_path):
            raise ValueError(
                f"reward= cannot be sent to another process, which cannot import {module!r}; put"
                " its folder on sys.path, or set runtime.use=local and reward.isolate=none"
            )
    try:
        return cloudpickle.dumps(functions)
    except Exception as error:  # objects in the functions may raise anything
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"reward= cannot be sent to another process: {why}; create open files, locks and"
            " connections inside the function, or set runtime.use=local and reward.isolate=none"
        ) from error


def to_rows(argument: str, data: Any) -> Rows:
    """Return a list of dicts, a `datasets.Dataset` or a pandas DataFrame as plain rows."""
    from datasets import Dataset
    from pandas import DataFrame, Series
    from pyarrow import Table

    if isinstance(data, DataFrame):
        with about(f"{argument}="):
            check_names(list(map(str, data.columns)))
        plain = data.astype(object).where(data.notna(), None)
        for name in data.select_dtypes(["float32", "float16", "Float32", "float[pyarrow]"]):
            exact = from_arrow(Table.from_pandas(data[[name]], preserve_index=False))
            plain[name] = Series([row[str(name)] for row in exact], data.index, object)
        data = plain.to_dict("records")
    elif isinstance(data, Dataset) and data.format["type"] == "custom":
        data = list(data)  # an Arrow table would skip the user's transform
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
