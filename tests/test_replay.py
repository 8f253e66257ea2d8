"""The buffer: every sample accounted for, distinct responses, oldest dropped, saved and loaded exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tba.replay.buffer import ReplayBuffer
from tba.strategies.mixture import Mixture
from tba.strategies.recent import Recent
from tba.strategies.reward import Reward
from tba.strategies.uniform import Uniform
from tba.types import Group, Prompt, Shelf, Trajectory


def trajectory(*tokens: int, reward: float = 0.0, version: int = 0) -> Trajectory:
    zeros = np.zeros(len(tokens), np.float32)
    return Trajectory(np.array(tokens, np.int32), zeros, zeros, reward, version, True)


def group(name: str, *trajectories: Trajectory) -> Group:
    return Group(Prompt(name, name, {"answer": "1"}), np.array([1, 2], np.int32), trajectories)


def random_groups(
    rng: np.random.Generator, count: int, prompts: int = 7, samples: int = 6
) -> list[Group]:
    def one() -> Trajectory:
        return trajectory(
            *rng.integers(3, size=rng.integers(1, 4)).tolist(),
            reward=float(rng.normal()),
            version=int(rng.integers(9)),
        )

    return [
        group(f"p{rng.integers(prompts)}", *(one() for _ in range(samples))) for _ in range(count)
    ]


def test_every_sample_is_accounted_for() -> None:
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(per_prompt=5, capacity=20)
    for now in range(60):
        buffer.add(random_groups(rng, 2), now)
        c = buffer.counts
        assert c["added"] == (now + 1) * 12
        assert (
            c["added"]
            == len(buffer) + c["duplicates"] + c["evicted_per_prompt"] + c["evicted_capacity"]
        )
        assert len(buffer) <= 20
        assert all(len(s.stored) <= 5 for s in buffer.shelves)
        assert len(buffer) == sum(len(s.stored) for s in buffer.shelves)


def test_the_newest_copy_wins() -> None:
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1, 2, reward=0.0, version=1), trajectory(3))], now=0)
    buffer.add([group("a", trajectory(1, 2, reward=1.0, version=5))], now=4)
    (shelf,) = buffer.shelves
    held = {s.trajectory.tokens.tobytes(): s for s in shelf.stored.values()}
    assert len(held) == 2
    newest = held[np.array([1, 2], np.int32).tobytes()]
    assert (newest.trajectory.version, newest.trajectory.reward, newest.arrived) == (5, 1.0, 4)


def test_the_oldest_goes_first() -> None:
    buffer = ReplayBuffer(per_prompt=2, capacity=3)
    for now, (name, token) in enumerate([("a", 1), ("a", 2), ("b", 1), ("a", 3), ("c", 1)]):
        buffer.add([group(name, trajectory(token))], now)
    held = {
        (s.prompt.id, int(t.trajectory.tokens[0]))
        for s in buffer.shelves
        for t in s.stored.values()
    }
    assert held == {("b", 1), ("a", 3), ("c", 1)}
    assert (buffer.counts["evicted_per_prompt"], buffer.counts["evicted_capacity"]) == (1, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_never_gets_in(bad: float) -> None:
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1, reward=bad), trajectory(2))], now=0)
    assert (len(buffer), buffer.counts["not_finite"], buffer.counts["added"]) == (1, 1, 1)


def test_recent_is_on_policy_when_a_batch_arrives_each_step() -> None:
    """Exactly what just arrived, each sample once, duplicates as often as they were sampled."""
    rng = np.random.default_rng(1)
    buffer = ReplayBuffer()
    for now in range(5):
        arrived = [
            group(
                f"p{now}-{i}", *(trajectory(int(t), version=now) for t in rng.integers(4, size=6))
            )
            for i in range(3)
        ]
        buffer.add(arrived, now)
        drawn = buffer.sample(3, 6, Recent(window=1), now, rng)
        expected = {g.prompt.id: Counter(int(t.tokens[0]) for t in g.trajectories) for g in arrived}
        assert {
            g.prompt.id: Counter(int(t.tokens[0]) for t in g.trajectories) for g in drawn
        } == expected


def test_uniform_draws_follow_the_sampled_distribution() -> None:
    """A response that was three quarters of the samples is three quarters of the draws, although it is stored once."""
    buffer = ReplayBuffer()
    buffer.add(
        [group("a", *(trajectory(1) for _ in range(9)), *(trajectory(2) for _ in range(3)))], now=0
    )
    assert len(buffer) == 2
    rng = np.random.default_rng(0)
    draws = [
        int(t.tokens[0])
        for _ in range(400)
        for t in buffer.sample(1, 4, Uniform(), 0, rng)[0].trajectories
    ]
    assert abs(draws.count(1) / len(draws) - 0.75) < 0.03


def test_reward_draws_follow_the_softmax() -> None:
    rewards = np.array([0.0, 1.0, 2.0])
    buffer = ReplayBuffer()
    buffer.add([group("a", *(trajectory(i, reward=r) for i, r in enumerate(rewards)))], now=0)
    rng = np.random.default_rng(0)
    first = [
        int(buffer.sample(1, 2, Reward(temperature=0.5), 0, rng)[0].trajectories[0].tokens[0])
        for _ in range(3000)
    ]
    odds = np.exp(rewards / 0.5)
    np.testing.assert_allclose(np.bincount(first, minlength=3) / 3000, odds / odds.sum(), atol=0.03)


def test_reward_draws_survive_underflow() -> None:
    """softmax would leave one non-zero weight where three are asked for."""
    buffer = ReplayBuffer()
    buffer.add([group("a", *(trajectory(i, reward=1e4 * i) for i in range(5)))], now=0)
    drawn = buffer.sample(1, 3, Reward(temperature=0.01), 0, np.random.default_rng(0))[0]
    assert [int(t.tokens[0]) for t in drawn.trajectories] == [4, 3, 2]


def test_mixture_uses_each_arm_in_its_share() -> None:
    buffer = ReplayBuffer()
    for now in range(40):
        buffer.add([group(f"p{now}", trajectory(1, version=now), trajectory(2, version=now))], now)
    rng = np.random.default_rng(0)
    drawn = [
        g for _ in range(300) for g in buffer.sample(5, 2, Mixture(recent=0.6, window=1), 39, rng)
    ]
    from_newest = np.mean([g.prompt.id in {f"p{n}" for n in range(35, 40)} for g in drawn])
    assert abs(from_newest - (0.6 + 0.4 * 5 / 40)) < 0.08


def test_short_groups_repeat_and_are_counted() -> None:
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1), trajectory(2), trajectory(3))], now=0)
    drawn = buffer.sample(2, 8, Uniform(), 0, np.random.default_rng(0))
    assert [len(g.trajectories) for g in drawn] == [8, 8]
    assert all(
        set(Counter(int(t.tokens[0]) for t in g.trajectories).values()) <= {2, 3} for g in drawn
    )
    assert buffer.counts["short_groups"] == 2


def test_a_strategy_that_draws_something_else_is_refused() -> None:
    class Few:
        def draw(
            self,
            shelves: Sequence[Shelf],
            groups: int,
            size: int,
            now: int,
            rng: np.random.Generator,
        ) -> list[Group]:
            return [shelves[0].group([s.trajectory for s in shelves[0].stored.values()])]

    buffer = ReplayBuffer(per_prompt=4, capacity=100)
    buffer.add(random_groups(np.random.default_rng(0), 5), now=0)
    with pytest.raises(
        ValueError, match=r"strategy Few drew groups of .* trajectories; it must draw 2 groups of 3"
    ):
        buffer.sample(2, 3, Few(), 0, np.random.default_rng(0))


def test_an_empty_buffer_says_so() -> None:
    with pytest.raises(ValueError, match="empty"):
        ReplayBuffer().sample(1, 2, Uniform(), 0, np.random.default_rng(0))


def test_loads_what_it_saved(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    buffer = ReplayBuffer(per_prompt=4, capacity=15)
    for now in range(9):
        buffer.add(random_groups(rng, 2), now)
    buffer.save(tmp_path)
    loaded = ReplayBuffer(per_prompt=4, capacity=15)
    loaded.load(tmp_path)
    assert loaded.counts == buffer.counts
    for one in (buffer, loaded):
        one.add(random_groups(np.random.default_rng(3), 3), 9)  # eviction goes on in the same order
    draws = [b.sample(4, 3, Mixture(), 9, np.random.default_rng(4)) for b in (buffer, loaded)]
    for a, b in zip(*draws, strict=True):
        assert a.prompt == b.prompt
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            assert x.tokens.tobytes() == y.tokens.tobytes()
            assert (x.reward, x.version, x.finished) == (y.reward, y.version, y.finished)


def test_a_run_that_is_to_keep_fewer_responses_keeps_the_newest(tmp_path: Path) -> None:
    """Of a prompt, as soon as it comes again."""
    buffer = ReplayBuffer(per_prompt=10, capacity=100)
    buffer.add([group("a", *map(trajectory, range(1, 6)))], now=0)
    buffer.save(tmp_path)
    fewer = ReplayBuffer(per_prompt=3, capacity=100)
    fewer.load(tmp_path)
    fewer.add([group("a", trajectory(6))], now=1)
    assert [int(s.trajectory.tokens[0]) for s in fewer.shelves[0].stored.values()] == [4, 5, 6]
    assert fewer.counts["evicted_per_prompt"] == 3


def test_an_empty_buffer_can_be_saved(tmp_path: Path) -> None:
    ReplayBuffer().save(tmp_path)
    loaded = ReplayBuffer()
    loaded.load(tmp_path)
    assert len(loaded) == 0
