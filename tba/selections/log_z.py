from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tba.config.tables import PositiveFloat
from tba.prompt import Prompt
from tba.selections import CountedSelection

if TYPE_CHECKING:
    from tba.types import Group


@dataclass
class LogZ(CountedSelection):
    """Prompts with beta log Z, their difficulty in trajectory balance, near `target`.

    Each group estimates beta log Z by mean_j (r_j - beta (log mu - log ref)_j), where mu sampled
    it: the mean reward minus its KL cost. At the optimum of `tb`, every response gives the same
    number, so the estimate has no noise; a count of right answers (a Beta posterior) is noisy.
    A prompt is drawn with probability proportional to exp(-(beta log Z - target)^2 / (2 width^2)),
    without replacement. A prompt that was never searched counts as at the target.

    PACED-RL (arXiv 2602.12642) uses a learned log Z in this way, with the last policy as the
    reference: then beta log Z is about the mean reward.
    """

    beta: PositiveFloat = 0.05
    """Temperature of the target; set it to the objective's beta."""
    target: float = 0.5
    """beta log Z to look for, in units of reward."""
    width: PositiveFloat = 0.25
    """Distance from the target at which a prompt is drawn .61 times as often."""
    _estimates: dict[str, float] = field(default_factory=dict, init=False)
    """beta log Z by prompt id."""

    def choose(self, count: int) -> list[Prompt]:
        rng = np.random.default_rng([self.seed, self._chosen])
        self._chosen += count
        estimates = np.array([self._estimates.get(p.id, self.target) for p in self.prompts])
        log_weight = -0.5 * ((estimates - self.target) / self.width) ** 2
        order = np.argsort(log_weight.max() - log_weight - rng.gumbel(size=len(estimates)))
        return [self.prompts[i] for i in np.resize(order, count).tolist()]

    def learn(self, group: "Group") -> None:
        values = []
        for t in group.trajectories:
            values.append(t.reward - self.beta * float((t.behavior_logp - t.ref_logp).sum()))
        new = float(np.mean(values))
        if not np.isfinite(new):  # a log-prob of the reference may not be: it would remain
            return
        old = self._estimates.get(group.prompt.id, new)
        self._estimates[group.prompt.id] = (old + new) / 2  # the policy changes

    def state(self) -> dict[str, Any]:
        return super().state() | {"estimates": dict(self._estimates)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._estimates = dict(state["estimates"])
