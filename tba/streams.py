"""The table of random streams: every use of random numbers has a stream of its own.

A stream is a child of a seed: `SeedSequence(seed, spawn_key=(use, *numbers))`, which is what
`SeedSequence.spawn` makes. A search gets a seed from the run, an engine gets seeds from its search:
what an engine, a selection or a task does with its seed cannot meet another use. Two kinds of
numbers are not in the table. Data that a task makes depend on `task.seed` alone, without a spawn
key. Timings use constant seeds, and nothing learns from them.
"""

from enum import IntEnum

import numpy as np


class Use(IntEnum):
    """Uses of random numbers, and which seed and numbers decide them."""

    REPLAY = 0
    """Draws from the replay buffer: `run.seed`."""
    SELECTION = 1
    """The choice of prompts: `run.seed`; place of the part of a mixture, else 0."""
    SEARCH = 2
    """A search of a run: `run.seed`; number of the search."""
    EVALUATION = 3
    """A piece of an evaluation: a constant seed; number of the piece."""
    GENERATION = 4
    """A call of the engine: seed of the search; 0."""
    EXPLORATION = 5
    """The temperature of a search that explores: seed of the search."""
    ROLLOUT = 6
    """Value rollouts: seed of the search; place of the first state of the call."""
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
    """Return the stream of a use, from its beginning."""
    return np.random.default_rng(seed_sequence(seed, use, *numbers))


def seed_of(seed: int, use: Use, *numbers: int) -> int:
    """Return a seed of 63 bits for a use that makes its own generators."""
    return int(seed_sequence(seed, use, *numbers).generate_state(1, np.uint64)[0] >> 1)
