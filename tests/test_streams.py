"""Random numbers: no two uses share a stream."""

from collections import Counter

import numpy as np
import torch

from tba.engines.transformers import random_numbers
from tba.streams import Use, generator, seed_of

SHAPE = (2, 3)


def test_no_two_uses_of_equal_seeds_and_numbers_share_a_stream():
    """Also not with what an engine, a selection or a task makes of its seed."""
    streams: list[np.random.Generator] = []
    for use in Use:
        streams += [generator(0, use)]
        streams += [generator(0, use, number) for number in range(5)]
    streams += [np.random.default_rng([0, held_out]) for held_out in (0, 1)]  # data of a task
    selections = [seed_of(0, Use.SELECTION, part) for part in range(3)]
    searches = [seed_of(0, Use.SEARCH, number) for number in range(3)]
    pieces = [seed_of(0, Use.EVALUATION, number) for number in range(3)]
    engines = [seed_of(s, Use.GENERATION, call) for s in searches + pieces for call in range(3)]
    engines += [seed_of(s, Use.ROLLOUT, start) for s in searches for start in range(3)]
    for seed in selections + engines:
        streams += [np.random.default_rng(seed)]
        streams += [np.random.default_rng([seed, place]) for place in range(5)]
    streams += [generator(s, Use.EXPLORATION) for s in searches]
    begun = Counter(stream.bytes(16) for stream in streams)
    assert begun.most_common(1)[0][1] == 2  # `[seed]` and `[seed, 0]` are one stream to numpy
    twice = {np.random.default_rng([seed, 0]).bytes(16) for seed in selections + engines}
    assert {start for start, times in begun.items() if times > 1} == twice


def test_the_temperature_of_a_search_does_not_depend_on_the_numbers_of_its_samples():
    searches = [seed_of(0, Use.SEARCH, number) for number in range(1000)]
    explored = [generator(seed, Use.EXPLORATION).random() for seed in searches]
    for place in range(3):
        engine = [seed_of(seed, Use.GENERATION, 0) for seed in searches]
        sampled = np.stack([random_numbers([seed, place], *SHAPE).ravel() for seed in engine])
        correlation = np.corrcoef(explored, sampled.T)[0, 1:]
        assert np.abs(correlation).max() < 0.15  # 4.7 standard errors


def test_pytorchs_generators_have_seeds_of_their_own():
    seeds = [0, seed_of(0, Use.TORCH), seed_of(0, Use.ADAPTER)]
    drawn = [torch.rand(4, generator=torch.Generator().manual_seed(s)).tolist() for s in seeds]
    assert len({tuple(numbers) for numbers in drawn}) == 3
