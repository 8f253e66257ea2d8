from dataclasses import dataclass

from tba.objectives import Loss, Objective, PerToken, centred, total
from tba.types import Batch


@dataclass(frozen=True)
class AsymRe(Objective):
    """AsymRE: REINFORCE with a baseline that is a little below the mean reward.

        loss[b] = -mean_j (r_j - (mean r + shift)) log pi(y_j)

    There is neither an importance ratio nor a KL. Off policy, a baseline below the mean reward
    raises good responses more than it lowers bad ones, and the policy converges; at the mean or
    above, its support shrinks to few responses.

    Asymmetric REINFORCE for Off-Policy RL (arXiv 2506.20520); `shift` as in Trinity-RFT.
    """

    shift: float = -0.1
    """Offset of the baseline from the mean reward, in units of reward; below 0 off policy."""

    learns_from_equal_rewards = True

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        advantage = centred(batch.reward) - self.shift
        return -(advantage * total(logp, batch)).mean(1), {}
