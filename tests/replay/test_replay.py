"""The buffer: every sample accounted for, distinct responses, oldest dropped, draws exact."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from build import conserved, first_tokens, group, random_groups, trajectory

from tba.replay.buffer import ReplayBuffer
from tba.strategies import LARGE, Columns, by_count, by_weight
from tba.strategies.mixture import Mixture
from tba.strategies.recent import Recent
from tba.strategies.reward import Reward
from tba.strategies.uniform import Uniform
from tba.types import Group


def test_samples_of_a_response_that_arrives_again_add_up():
    """Uniform replay draws from all samples; a recent draw from those of the latest arrival."""
    buffer = ReplayBuffer()
    buffer.add([group("a", *[trajectory(1)] * 9, trajectory(2))], now=0)
    buffer.add([group("a", trajectory(1), *[trajectory(2)] * 3)], now=1)
    rng = np.random.default_rng(0)
    (uniform,) = buffer.sample(1, 14, Uniform(), 1, rng)
    assert Counter(first_tokens(uniform)) == {1: 10, 2: 4}
    (recent,) = buffer.sample(1, 4, Recent(), 1, rng)
    assert Counter(first_tokens(recent)) == {1: 1, 2: 3}
    assert buffer.counts["short_groups"] == 0


def test_a_prompt_never_mixes_references():
    """A newer reference replaces what was stored; a group with an older one comes too late."""
    buffer = ReplayBuffer()
    old = group("a", *map(trajectory, range(4)), reference=3)
    buffer.add([old, group("b", trajectory(1), reference=3)], now=0)
    buffer.add([group("a", trajectory(2), trajectory(9), reference=5)], now=1)
    assert buffer.counts["evicted_reference"] == 4
    buffer.add([old], now=2)
    assert buffer.counts["evicted_reference"] == 8
    held = {g.prompt.id: (g.reference, first_tokens(g)) for g in buffer.groups()}
    assert held == {"b": (3, [1]), "a": (5, [2, 9])}
    drawn = buffer.sample(2, 2, Uniform(), 2, np.random.default_rng(0))
    assert {g.prompt.id: g.reference for g in drawn} == {"a": 5, "b": 3}
    columns = buffer.columns()
    assert columns.count[columns.rows(columns.prompts[-1])].tolist() == [1, 1]
    assert conserved(buffer)


def samples(groups: list[Group]) -> Counter[tuple[str, int]]:
    return Counter((g.prompt.id, token) for g in groups for token in first_tokens(g))


def test_recent_is_on_policy_when_a_batch_arrives_each_step():
    """Exactly what just arrived, each sample once, duplicates as often as they were sampled.

    Also if a prompt arrives several times, or has samples for several groups.
    """
    rng = np.random.default_rng(1)
    buffer = ReplayBuffer()
    names = ("a b c", "a b a", "d d d", "a b c", "a a b", "b")
    for now, some in enumerate(names):
        arrived = [
            group(name, *[trajectory(int(t), version=now) for t in rng.integers(4, size=6)])
            for name in some.split()
        ]
        buffer.add(arrived, now)
        size = 2 if some == "b" else 6
        drawn = buffer.sample(3, size, Recent(window=1), now, rng)
        assert samples(drawn) == samples(arrived)


def test_recent_draws_all_prompts_of_its_window():
    """Also those further back than the number of groups; or the newest, if those are too few."""
    buffer = ReplayBuffer()
    for now in range(30):
        buffer.add([group(f"p{now}-{i}", trajectory(1)) for i in range(3)], now)
    rng = np.random.default_rng(0)
    for window, groups, steps in ((5, 20, 7), (5, 4, 5), (1, 4, 2)):
        seen = Counter()
        for _ in range(60):
            drawn = buffer.sample(groups, 1, Recent(window), 29, rng)
            seen.update(g.prompt.id for g in drawn)
        newest = [f"p{now}-{i}" for now in range(30 - steps, 30) for i in range(3)]
        assert set(seen) == set(newest[-max(3 * window, groups) :])


def test_recent_draws_all_samples_of_its_window_from_a_single_prompt():
    """Those of the last steps, however many searches they come from; then the latest arrival."""
    buffer, rng = ReplayBuffer(), np.random.default_rng(0)
    for now in range(10):
        buffer.add([group("a", trajectory(2 * now), trajectory(2 * now + 1))], now)
    for window, now, oldest in ((1, 9, 18), (3, 9, 14), (3, 10, 16), (3, 30, 18)):
        size = 20 - oldest
        (drawn,) = buffer.sample(1, size, Recent(window), now, rng)
        assert set(first_tokens(drawn)) == set(range(oldest, 20))


@pytest.mark.parametrize("unequal", [7, 3, 0])
def test_groups_of_equal_rewards_are_drawn_where_others_are_too_few(unequal):
    """Four groups a step, of ten that arrived: enough unequal ones, or the newest equal ones."""
    buffer = ReplayBuffer()
    differ = {f"p{i}" for i in (range(unequal) if unequal < 7 else range(3, 10))}
    for i in range(10):
        rewards = (0.0, 1.0) if f"p{i}" in differ else (1.0, 1.0)
        some = [trajectory(k, reward=r) for k, r in enumerate(rewards)]
        buffer.add([group(f"p{i}", *some)], now=0)
    rng = np.random.default_rng(0)
    seen: set[str] = set()
    for _ in range(60):
        drawn = buffer.sample(4, 2, Recent(filter_equal=True), 0, rng)
        assert len({g.prompt.id for g in drawn}) == 4
        seen |= {g.prompt.id for g in drawn}
    equal = [f"p{i}" for i in range(9, -1, -1) if f"p{i}" not in differ]
    assert seen == differ | set(equal[: max(0, 4 - unequal)])
    drawn = buffer.sample(4, 2, Mixture(recent=1.0, filter_equal=True), 0, rng)
    assert {g.prompt.id for g in drawn} <= seen


def test_older_groups_take_the_place_of_those_with_equal_rewards():
    """Their samples of the latest arrival decide, and those alone are drawn."""
    buffer = ReplayBuffer()
    for now in range(6):
        rewards = (0.0, 1.0) if now < 4 else (1.0, 1.0)
        some = [trajectory(k, now, reward=r) for k, r in enumerate(rewards)]
        buffer.add([group("again" if now in (3, 5) else f"p{now}", *some)], now)
    rng = np.random.default_rng(0)
    drawn = buffer.sample(2, 2, Recent(window=1, filter_equal=True), 5, rng)
    assert {g.prompt.id for g in drawn} == {"p1", "p2"}


def test_uniform_draws_follow_the_sampled_distribution():
    """A response that was three quarters of the samples is three quarters of the draws."""
    buffer = ReplayBuffer()
    buffer.add([group("a", *[trajectory(1)] * 9, *[trajectory(2)] * 3)], now=0)
    assert len(buffer) == 2
    rng = np.random.default_rng(0)
    draws = []
    for g in buffer.sample(400, 4, Uniform(), 0, rng):
        draws += first_tokens(g)
    assert abs(draws.count(1) / len(draws) - 0.75) < 0.03


def test_reward_draws_follow_the_softmax():
    rewards = np.array([0.0, 1.0, 2.0])
    buffer = ReplayBuffer()
    buffer.add([group("a", *(trajectory(i, reward=r) for i, r in enumerate(rewards)))], now=0)
    rng = np.random.default_rng(0)
    drawn = buffer.sample(3000, 2, Reward(temperature=0.5), 0, rng)
    first = [first_tokens(g)[0] for g in drawn]
    odds = np.exp(rewards / 0.5)
    np.testing.assert_allclose(np.bincount(first, minlength=3) / 3000, odds / odds.sum(), atol=0.03)


@pytest.mark.parametrize("others", [0, LARGE])
def test_draws_by_weight_are_successive_among_few_and_many(others):
    """The chances of ordered pairs, w_i / W * w_j / (W - w_i), where others have weight 0."""
    weights = np.array([1.0, 2.0, 5.0])
    log_weight = np.concatenate([np.full(others, -1e9), np.log(weights)])
    drawn = by_weight(log_weight, 4000, 2, np.random.default_rng(0)) - others
    for i, j in np.ndindex(3, 3):
        chance = weights[i] / 8 * weights[j] / (8 - weights[i]) if i != j else 0
        frequency = (drawn == (i, j)).all(1).mean()
        assert abs(frequency - chance) < 4 * np.sqrt(chance * (1 - chance) / 4000) + 1e-9


@pytest.mark.parametrize("others", [0, LARGE])
def test_draws_by_count_are_without_replacement_among_few_and_many(others):
    count = np.concatenate([[2, 3], np.ones(others, np.int64)])
    drawn = by_count(count, 300, 5, np.random.default_rng(0))
    assert (drawn >= 0).all()
    assert (drawn == 0).sum(1).max() <= 2
    assert (drawn == 1).sum(1).max() <= 3
    if not others:
        assert (np.sort(drawn, 1) == [0, 0, 1, 1, 1]).all()
        short = by_count(count, 1, 7, np.random.default_rng(0))
        assert (short[:, 5:] == -1).all()


def test_mixture_uses_each_arm_in_its_share():
    buffer = ReplayBuffer()
    for now in range(40):
        buffer.add([group(f"p{now}", trajectory(1, version=now), trajectory(2, version=now))], now)
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(100):
        drawn += buffer.sample(5, 2, Mixture(recent=0.6, window=1), 39, rng)
    from_newest = np.mean([g.prompt.id in {f"p{n}" for n in range(35, 40)} for g in drawn])
    assert abs(from_newest - (0.6 + 0.4 * 5 / 40)) < 0.08


def test_short_groups_repeat_and_are_counted():
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1), trajectory(2), trajectory(3))], now=0)
    drawn = buffer.sample(2, 8, Uniform(), 0, np.random.default_rng(0))
    assert [len(g.trajectories) for g in drawn] == [8, 8]
    assert all(set(Counter(first_tokens(g)).values()) <= {2, 3} for g in drawn)
    assert all(len(set(map(id, g.trajectories))) == 3 for g in drawn)
    assert buffer.counts["short_groups"] == 2


@pytest.mark.parametrize(("strategy", "short"), [(Uniform(), 0), (Recent(), 1), (Reward(), 1)])
def test_short_groups_are_short_of_what_they_were_drawn_from(strategy, short):
    """All 8 samples are enough for K = 4; the 2 that just arrived are not, nor 3 distinct ones."""
    buffer = ReplayBuffer()
    buffer.add([group("a", *[trajectory(1)] * 6)], now=0)
    buffer.add([group("a", trajectory(2), trajectory(3))], now=1)
    buffer.sample(1, 4, strategy, 1, np.random.default_rng(0))
    assert buffer.counts["short_groups"] == short


@pytest.mark.parametrize("reward", [0.1, -5000.1, 1e12])
def test_equal_rewards_are_drawn_alike_and_are_left_out_alike(reward):
    """Rounding has made some of them differ; it is no reason to draw one more often."""
    buffer = ReplayBuffer()
    rewards = [reward, np.nextafter(reward, 2e12), reward, np.nextafter(reward, -2e12)]
    equal = group("equal", *[trajectory(i, reward=r) for i, r in enumerate(rewards)])
    buffer.add([equal], now=0)
    rng = np.random.default_rng(0)
    drawn = [buffer.sample(1, 1, Reward(1e-6), 0, rng)[0] for _ in range(400)]
    counts = Counter(first_tokens(one)[0] for one in drawn)
    assert min(counts[i] for i in range(4)) > 60
    buffer.add([group("other", trajectory(1, reward=1.0), trajectory(2)), equal], now=1)
    (recent,) = buffer.sample(1, 2, Recent(filter_equal=True), 1, rng)
    assert recent.prompt.id == "other"


class Fixed:
    """Draws what a test wants."""

    def __init__(self, drawn: np.ndarray) -> None:
        self.drawn = drawn

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> np.ndarray:
        return self.drawn


@pytest.mark.parametrize(
    "drawn",
    [
        [[0, 1]],  # too few
        [[0.0, 1.0], [0.0, 1.0]],  # no integers
        [[0, 1], [2, 1]],  # of several prompts
        [[0, 1], [3, 2]],
        [[0, 1], [-1, -1]],  # without a response
        [[0, 1], [2, 4]],  # empty rows
        [[0, 1], [2, 1_000_000]],
    ],
)
def test_a_strategy_that_breaks_the_contract_is_refused(drawn):
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1), trajectory(2)), group("b", trajectory(1))], now=0)
    buffer.add([group("c", trajectory(5))], now=0)
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"strategy Fixed drew .* must draw integers \(2, 2\)"):
        buffer.sample(2, 2, Fixed(np.array(drawn)), 0, rng)
    drawn_well = buffer.sample(2, 2, Fixed(np.array([[1, 0], [2, -1]])), 0, rng)
    assert [first_tokens(g) for g in drawn_well] == [[2, 1], [1, 1]]


def test_strategies_cannot_write_to_the_columns():
    buffer = ReplayBuffer()
    buffer.add([group("a", trajectory(1))], now=0)
    columns = buffer.columns()
    for array in (columns.reward, columns.prompts, columns.rows(columns.prompts[0])):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_an_empty_buffer_says_so():
    with pytest.raises(ValueError, match="empty"):
        ReplayBuffer().sample(1, 2, Uniform(), 0, np.random.default_rng(0))


def test_groups_are_scored_again_as_they_arrived():
    """Each once, with all samples that arrived in it, and the latest one decides."""
    buffer = ReplayBuffer()
    a, b, c = (trajectory(token) for token in (3, 4, 5))
    buffer.add([group("p", a, a, b), group("q", c)], 1)
    buffer.add([group("p", b, c)], 2)
    buffer.add([group("q", c)], 3)  # so that nothing is left of the first group of q
    seen: list[list[int]] = []

    def score(groups: Sequence[Group]) -> list[list[float]]:
        seen.extend(first_tokens(g) for g in groups)
        return [[10.0 * len(seen) + len(g.trajectories)] * len(g.trajectories) for g in groups]

    buffer.rescore(score)
    assert seen == [[3, 3, 4], [4, 5], [5]]
    held = [(g.prompt.id, t) for g in buffer.groups() for t in g.trajectories]
    rewards = {(name, int(t.tokens[0])): t.reward for name, t in held}
    assert rewards == {("p", 3): 33.0, ("p", 4): 32.0, ("p", 5): 32.0, ("q", 5): 31.0}
    assert conserved(buffer)


def test_a_buffer_goes_on_without_what_was_rejected():
    rng = np.random.default_rng(7)
    buffer = ReplayBuffer(per_prompt=9, capacity=60)
    for now in range(20):
        buffer.add(random_groups(rng, 2), now)
    latest = {g.prompt.id: g for g in buffer.groups()}
    before = len(buffer)

    def score(groups: Sequence[Group]) -> list[list[float]]:
        return [[np.nan if rng.random() < 0.5 else 1.0 for _ in g.trajectories] for g in groups]

    buffer.rescore(score)
    assert 0 < len(buffer) < before and conserved(buffer)
    assert {t.reward for g in buffer.groups() for t in g.trajectories} == {1.0}
    assert latest.keys() >= {g.prompt.id for g in buffer.groups()}
    for strategy in (Recent(), Recent(window=5), Uniform(), Reward(), Mixture()):
        for now in range(20, 24):
            assert len(buffer.sample(3, 4, strategy, now, rng)) == 3
    buffer.add(random_groups(rng, 2), 20)
    buffer.clear()
    assert len(buffer) == buffer.prompts == 0 and conserved(buffer)
