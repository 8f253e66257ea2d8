from dataclasses import dataclass

from tba.config.tables import NotNegative, PositiveFloat
from tba.objectives import Importance, Loss, Objective, PerToken, importance, leave_one_out, total
from tba.types import Batch


@dataclass(frozen=True)
class Rloo(Objective):
    """RLOO: policy gradient with a leave-one-out baseline, and the KL in the reward.

        loss[b] = -mean_j A_j log pi(y_j)
        A_j     = R_j - mean of the others' R,  R = r - beta (log mu - log ref)

    mu is the policy that sampled y_j. The gradient is unbiased only on-policy, unless `importance`
    weights tokens or responses by min(pi / mu, `importance_cap`). On-policy it is K / (K - 1)
    times that of `tb`.

    Back to Basics (arXiv 2402.14740), equation 7.
    """

    beta: NotNegative = 0.05
    """Coefficient of the KL to the reference."""
    importance: Importance = "none"
    """Importance weights per token, per response, or none."""
    importance_cap: PositiveFloat = 2.0
    """Upper bound of the importance weights."""

    @property
    def needs_behavior(self) -> bool:
        return self.beta != 0 or self.importance != "none"

    @property
    def learns_from_equal_rewards(self) -> bool:
        return self.beta != 0

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        advantage = leave_one_out(batch, self.beta)
        weight = importance(self.importance, logp, batch, self.importance_cap)
        loss = -(advantage * total(weight * logp, batch)).mean(1)
        return loss, {"rloo/advantage_std": advantage.std(1)}
