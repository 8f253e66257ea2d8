"""Reward functions that a config names: one of a module or a file, or what a factory makes."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from tba.config.errors import masked, read_secrets
from tba.config.plugins import JUDGES, check_options, options_of, resolve
from tba.config.tables import Use

RewardFunction = Callable[..., Any]
"""`def` or `async def` f(prompts, completions, **columns) -> list[float | None], as in TRL."""

ADVICE = "write package.module:function or file.py:function"

NOT_USERS = (str(Path(__file__).parents[1]), importlib.__file__, contextlib.__file__, "<")
"""Beginnings of the names of files whose lines are not shown for an error of the user's code."""


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
        make: Callable[[], Any] = partial(factory, **read_secrets(options))
    else:
        make = resolve(JUDGES, key, named.use, named.options).build
    with _running(key):
        function = make()
    if not callable(function):
        raise ValueError(
            f"{key}.use = {named.use!r} returns {function!r}; it must return a reward function"
        )
    return function


def member(key: str, name: str) -> Callable[..., Any]:
    """Return the function or class called `name`."""
    where, _, function = name.rpartition(":")
    if not where:
        judge = f'; a model is a judge: {key}={{use="classifier",model="{name}"}}'
        is_model = "/" in name and not name.endswith(".py")
        raise ValueError(f"{key} = {name!r}: {ADVICE}{judge if is_model else ''}")
    path = Path(where).expanduser() if where.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ValueError(f"{key} = {name!r}: no such file: {path}; {ADVICE}")
    with _running(f"{key} = {name!r}"):
        if path is None:
            module = importlib.import_module(where)
        else:
            module = _from_file(path.resolve(), path.stat().st_mtime_ns)
    try:
        value: Callable[..., Any] = attrgetter(function)(module)  # a lazy module loads it
    except AttributeError as error:
        raise ValueError(f"{key} = {name!r}: {where} has no function {function!r}") from error
    if not callable(value):
        raise ValueError(f"{key} = {name!r}: {function} is not a function but {value!r}")
    return value


@contextlib.contextmanager
def _running(place: str) -> Iterator[None]:
    """Make any error of the user's code, `sys.exit` too, a ValueError with its file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        every = extract_tb(error.__traceback__)
        frames = [frame for frame in every if not frame.filename.startswith(NOT_USERS)]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        if isinstance(error, ModuleNotFoundError) and not frames:
            at = f"; {ADVICE}"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(masked(f"{place}: {kind}{error}{at}")) from error


@cache
def _from_file(path: Path, changed: int) -> ModuleType:
    """Run a file once for each time `changed` of its last change.

    Its module has the name of the file, by which processes that a function starts can import it:
    they get `sys.path`. If another module has this name, it is one of ours, the same everywhere.
    """
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    name = f"tba_{sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    with contextlib.suppress(ImportError, ValueError):  # no module's name, or a package has none
        named = importlib.util.find_spec(path.stem)
        if named is not None and Path(str(named.origin)).resolve() == path:
            name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
