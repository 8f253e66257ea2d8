"""Reward functions that were passed from Python, pickled for searcher processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tba.runtime.bind import bind_ray
from tba.tasks._memory import name_of


def pickled(functions: tuple[Callable[..., Any], ...], address: str | None) -> bytes:
    """Return the functions as bytes; ValueError if one of them cannot be sent to a process.

    `address` is that of the Ray cluster, which has to be known before Ray is imported.
    """
    bind_ray(address)
    from ray import cloudpickle

    for function in functions:
        name = name_of(function)
        module = name.split(".")[0]
        if module not in ("__main__", "builtins") and not _importable(module):
            raise ValueError(
                f"reward= {name} cannot be sent to a searcher process, which cannot import"
                f" {module!r}; put its folder on sys.path, or set runtime.use=local"
            )
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # the function's own objects decide what is raised
            why = str(error).partition("\n")[0]
            raise ValueError(
                f"reward= {name} cannot be sent to a searcher process: {why}; create open files,"
                " locks and connections inside the function, or set runtime.use=local"
            ) from error
    return cloudpickle.dumps(functions)


def _importable(module: str) -> bool:
    """Return whether a process with the same `sys.path` can import a module."""
    return any(finder.find_spec(module, None) is not None for finder in sys.meta_path)
