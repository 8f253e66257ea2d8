"""Rewards made wrong on purpose, to study what a run does with a grader that errs, is noisy, or can be fooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tba.config.tables import FaultsTable

Rejected = TypeVar("Rejected")


def falsify(
    verdicts: Sequence[float | Rejected], faults: FaultsTable, task: int
) -> tuple[list[float | Rejected], int]:
    """The verdicts with the wrong rewards in place, and how many are wrong. `task` is the search task's seed: the same
    task has the same faults wherever it runs. What has no reward keeps none, and changes nothing for its neighbours."""
    rng = np.random.default_rng([faults.seed, task])
    wrong = rng.random(len(verdicts)) < faults.share
    normal = rng.normal(size=len(verdicts))
    found = [
        _faulty(v, faults, float(z)) if hit and isinstance(v, float) else v
        for v, hit, z in zip(verdicts, wrong, normal, strict=True)
    ]
    return found, sum(isinstance(v, float) for v, hit in zip(verdicts, wrong, strict=True) if hit)


def _faulty(reward: float, faults: FaultsTable, normal: float) -> float:
    match faults.kind:
        case "none":
            return reward
        case "flip":
            return faults.low + faults.high - reward
        case "noise":
            return reward + faults.scale * normal
        case "plant":
            return faults.high
