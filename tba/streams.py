"""The table of random streams: each use of random numbers has a separate stream.

A stream is a child of a seed: `SeedSequence(seed, spawn_key=(use, *numbers))`, as
`SeedSequence.spawn` makes it. A search gets its seed from the run, and an engine gets its seeds
from the search, so engines, selections and tasks cannot reuse the numbers of another use. Two kinds
of numbers are not in the table. Data that a task generates depend on `task.seed` alone, without a
spawn key. Timings use constant seeds, and nothing is trained on them.
"""

from enum import IntEnum

import numpy as np


class Use(IntEnum):
    """Uses of random numbers, with the seed and the numbers that determine each."""

    REPLAY = 0
    """Draws from the replay buffer: `run.seed`."""
    SELECTION = 1
    """The choice of prompts: `run.seed`; index of the source of a mixture, else 0."""
    SEARCH = 2
    """A search of a run: `run.seed`; number of the search."""
    EVALUATION = 3
    """A piece of an evaluation: a constant seed; number of the piece."""
    GENERATION = 4
    """A call of the engine: seed of the search; 0."""
    EXPLORATION = 5
    """The temperature of a search that explores: seed of the search."""
    ROLLOUT = 6
    """Value rollouts: seed of the search; index of the first state of the call."""
    TORCH = 7
    """PyTorch's global generator in the trainer: `run.seed`."""
    TURN = 9
    """A turn of a dialogue or a session: seed of the search; number of the sample; of the turn."""
    ADAPTER = 8
    """The first weights of a LoRA adapter: `run.seed`."""


def seed_sequence(seed: int, use: Use, *numbers: int) -> np.random.SeedSequence:
    """Return the root of the stream of a use."""
    return np.random.SeedSequence(seed, spawn_key=(use, *numbers))


def generator(seed: int, use: Use, *numbers: int) -> np.random.Generator:
    """Return the stream of a use, from its start."""
    return np.random.default_rng(seed_sequence(seed, use, *numbers))


def seed_of(seed: int, use: Use, *numbers: int) -> int:
    """Return a 63-bit seed for a use that creates its own generators."""
    return int(seed_sequence(seed, use, *numbers).generate_state(1, np.uint64)[0] >> 1)
