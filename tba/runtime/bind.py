"""Preparations for Ray that come before `import ray`, which reads the environment."""

import os
import sys
from collections.abc import Callable
from typing import Any

from tba.tasks._memory import name_of

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's documented switch: 1 listens on the machine's address, to join a cluster; 0 on loopback."""


def bind_ray(address: str | None) -> None:
    """Prepare the environment for a private Ray on loopback, or for the cluster at `address`."""
    wanted = "0" if address is None else "1"
    if "ray" in sys.modules and os.environ.get(VARIABLE) != wanted:
        raise ValueError(
            "ray was imported before the run began and would listen on the wrong address;"
            f" set {VARIABLE}={wanted} in the environment before `import ray`"
        )
    os.environ[VARIABLE] = wanted
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def pickled(functions: tuple[Callable[..., Any], ...], address: str | None) -> bytes:
    """Return reward functions as bytes; ValueError if one cannot be sent to a searcher process."""
    bind_ray(address)
    from ray import cloudpickle

    for function in functions:
        name = name_of(function)
        module = name.split(".")[0]
        known = module in ("__main__", "builtins")
        if not known and not any(finder.find_spec(module, None) for finder in sys.meta_path):
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
