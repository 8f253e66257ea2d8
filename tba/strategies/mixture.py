from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from tba.config.tables import Positive, PositiveFloat, Share
from tba.strategies import Columns, Strategy
from tba.strategies.recent import Recent
from tba.strategies.reward import Reward
from tba.strategies.uniform import Uniform


@dataclass(frozen=True)
class Mixture:
    """Draws each group from the newest data or from data of any age, by reward or uniformly.

    Trajectory Balance with Asynchrony (arXiv 2503.18929), section 3.
    """

    recent: Share = 0.5
    """Probability that a group is drawn from recent data: the paper's most-on-policy m."""
    reward: Share = 0.5
    """Share of the other groups that are drawn by softmax(reward / temperature); rest: uniform."""
    temperature: PositiveFloat = 1.0
    """Temperature of the draw by reward."""
    window: Positive = 1
    """Number of latest steps that count as recent; the paper's is runtime.publish_every."""
    filter_equal: bool = False
    """Draw recent groups whose rewards are all equal only if there are too few others."""

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> Int[np.ndarray, "{groups} {size}"]:
        replayed = 1 - self.recent
        shares = (self.recent, replayed * self.reward, replayed * (1 - self.reward))
        arms: tuple[Strategy, ...] = (
            Recent(self.window, self.filter_equal),
            Reward(self.temperature),
            Uniform(),
        )
        drawn = []
        for arm, count in zip(arms, rng.multinomial(groups, shares).tolist(), strict=True):
            if count:
                drawn.append(arm.draw(columns, count, size, now, rng))
        return np.concatenate(drawn)
