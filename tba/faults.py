"""Rewards made wrong on purpose, to study what a run does with a grader that errs, is noisy, or can be fooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field, model_validator

from tba.table import Count, Table

Rejected = TypeVar("Rejected")


class FaultsTable(Table):
    kind: Literal["none", "flip", "noise", "plant"] = Field("none", description="flip: low + high - reward; noise: reward + scale * normal; plant: high")
    share: float = Field(0.0, ge=0, le=1, description="of the training trajectories whose reward is wrong, at random; evaluations are never touched")
    low: float = Field(0.0, description="of flip: the least reward")
    high: float = Field(1.0, description="of flip: the greatest reward; of plant: the reward that is put in")
    scale: float = Field(1.0, ge=0, description="of noise: its standard deviation")
    seed: Count = Field(0, description="of which rewards are wrong; at a larger share, the same ones are and others too")

    @model_validator(mode="after")
    def meant(self) -> FaultsTable:
        if self.kind == "none" and self.share > 0:
            raise ValueError(f"faults.share = {self.share} with faults.kind = 'none' would change nothing; set faults.kind=flip, noise or plant")
        if self.kind == "flip" and not self.low < self.high:
            raise ValueError(f"faults.low = {self.low} is not below faults.high = {self.high}; give the least and the greatest reward of the task")
        return self


def falsify(verdicts: Sequence[float | Rejected], faults: FaultsTable, task: int) -> tuple[list[float | Rejected], int]:
    """The verdicts with the wrong rewards in place, and how many are wrong. `task` is the search task's seed: the same
    task has the same faults wherever it runs. What has no reward keeps none, and changes nothing for its neighbours."""
    rng = np.random.default_rng([faults.seed, task])
    wrong = rng.random(len(verdicts)) < faults.share
    normal = rng.normal(size=len(verdicts))
    found = [_faulty(v, faults, float(z)) if hit and isinstance(v, float) else v for v, hit, z in zip(verdicts, wrong, normal, strict=True)]
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
