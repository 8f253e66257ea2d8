"""Reward functions that a config names: one of a module or a file, or what a factory makes."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from tba.config.messages import about
from tba.config.plugins import JUDGES, check_options, options_of, resolve
from tba.config.secrets import read_secrets
from tba.config.tables import Use

RewardFunction = Callable[..., Any]
"""`def` or `async def` f(prompts, completions, **columns) -> list[float | None], as in TRL."""

ADVICE = "write package.module:function or file.py:function"


def reward_function(key: str, named: str | Use) -> RewardFunction:
    """Return the function that `key` names; ValueError, which begins with the key, if it is wrong.

    Text names the function itself. A table names a judge of this package, another class
    (`package.module.Class`), or a factory (`package.module:factory` or `file.py:factory`), which
    gets the table's other keys as arguments.
    """
    if isinstance(named, str):
        return member(key, named)
    if ":" in named.use:
        factory = member(f"{key}.use", named.use)
        if "completions" in options_of(factory):
            raise ValueError(
                f"{key}.use = {named.use!r} is itself a reward function; write its name without"
                f" options: {key} = {named.use!r}"
            )
        options = check_options(factory, key, named.use, named.options)
        with about(key):
            function = factory(**read_secrets(options))
    else:
        judge = resolve(JUDGES, key, named.use, named.options)
        with about(key):
            function = judge.build()
    if not callable(function):
        raise ValueError(
            f"{key}.use = {named.use!r} returns {function!r}; it must return a reward function"
        )
    return function


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes: all for `**columns`, else those it names."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: values for name, values in arguments.items() if name in parameters}


def member(key: str, name: str) -> Callable[..., Any]:
    """Return the function or class called `name`."""
    where, _, own = name.rpartition(":")
    if not where:
        judge = f'; a model is a judge: {key}={{use="classifier",model="{name}"}}'
        is_model = "/" in name and not name.endswith(".py")
        raise ValueError(f"{key} = {name!r}: {ADVICE}{judge if is_model else ''}")
    try:
        module = _module(where)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ValueError(f"{key} = {name!r}: {error}; {ADVICE}") from error
    try:
        value: Callable[..., Any] = getattr(module, own)  # not vars: a lazy module loads it now
    except AttributeError as error:
        raise ValueError(f"{key} = {name!r}: {where} has no function {own!r}") from error
    if not callable(value):
        raise ValueError(f"{key} = {name!r}: {own} is not a function but {value!r}")
    return value


def _module(where: str) -> ModuleType:
    """Import a module, by its name or from a file."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    return _from_file(path.resolve(), path.stat().st_mtime_ns)


@cache
def _from_file(path: Path, changed: int) -> ModuleType:
    """Run a file once for each time `changed` of its last change.

    Its module has the same name in each process, so that its objects can be pickled.
    """
    name = f"tba_{sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
