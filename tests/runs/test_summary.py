"""Statistics of the samples of a step, from totals of the whole run."""

import json
from statistics import stdev

import numpy as np
import pytest
from build import group, trajectory

from tba.replay.buffer import ReplayBuffer
from tba.runs.summary import Tracker
from tba.search.result import SearchStats
from tba.tasks import ItemizedReward


@pytest.mark.parametrize("common", [0.0, 1e7, -1e12])
def test_the_spread_of_a_reward_does_not_depend_on_its_mean(common):
    """Nor on the rewards of earlier steps, nor on a checkpoint between two steps."""
    rng = np.random.default_rng(0)
    tracker = Tracker()
    stats = SearchStats()
    for step, mean in enumerate((0.0, common, common, 1.0)):
        rewards = mean + rng.normal(size=40)
        stats.itemize(
            [ItemizedReward(reward, {"rewards/f": reward}, {}) for reward in rewards.tolist()]
        )
        found = tracker.scored(stats)
        assert found["rewards/f/mean"] == pytest.approx(rewards.mean(), rel=1e-12)
        assert found["rewards/f/std"] == pytest.approx(stdev(rewards.tolist()), rel=1e-9)
        tracker.step(step, [group("a", trajectory(1))], ReplayBuffer(), stats)
        stats = SearchStats.from_json(json.loads(json.dumps(stats.to_json())))
        counts, tracker = tracker.counts(), Tracker()
        tracker.resume(counts, stats)


def test_a_reward_that_is_too_large_to_square_has_a_spread():
    stats = SearchStats()
    stats.itemize([ItemizedReward(0.0, {"rewards/f": reward}, {}) for reward in (1e300, -1e300)])
    assert Tracker().scored(stats)["rewards/f/std"] >= 1e149
