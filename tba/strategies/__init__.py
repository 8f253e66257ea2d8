"""Strategies choose what to replay. This module is their contract; each other file is one strategy."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from tba.types import Group, Shelf


@runtime_checkable
class Strategy(Protocol):
    """Chooses the groups of a batch from the replay buffer."""

    def draw(
        self, shelves: list[Shelf], groups: int, size: int, now: int, rng: np.random.Generator
    ) -> list[Group]:
        """Return `groups` groups of exactly `size` trajectories.

        `shelves` is not empty and ordered by latest arrival, the stalest first.
        """
