"""Keeps a private Ray on loopback. To be called before `ray` is imported: it reads this at import."""

from __future__ import annotations

import os
import sys

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's documented switch between listening on the machine's address (1, needed to join a cluster) and on loopback (0)."""


def bind_ray(address: str | None) -> None:
    wanted = "0" if address is None else "1"
    if "ray" in sys.modules and os.environ.get(VARIABLE) != wanted:
        raise ValueError(
            f"ray was imported before the run began, and would not listen as it should; set {VARIABLE}={wanted} before `import ray`"
        )
    os.environ[VARIABLE] = wanted
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
