from dataclasses import dataclass

from tba.config.tables import PositiveFloat
from tba.objectives import Loss, Objective, PerToken, clipped, log_ratio, ratio, standardised
from tba.types import Batch


@dataclass(frozen=True)
class Gspo(Objective):
    """GSPO: GRPO's clipping at the level of responses, with length-normalised ratios.

        loss[b] = -mean_j min(s_j A_j, clip(s_j, 1 - clip, 1 + clip_high) A_j)
        s_j     = (pi(y_j) / mu(y_j))^(1 / T_j)
        A_j     = (r_j - mean r) / (std r + 1e-4)

    mu is the policy that sampled y_j, and T_j the number of its tokens. There is no KL. s is much
    closer to 1 than the ratio of a whole response, so `clip` is small.

    Group Sequence Policy Optimization (arXiv 2507.18071), equations 5 to 7; clip ranges: section
    5.1.
    """

    needs_behavior = True
    clip: PositiveFloat = 3e-4
    """Clip s to at least 1 - clip."""
    clip_high: PositiveFloat = 4e-4
    """Clip s to at most 1 + clip_high."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        rho = ratio(log_ratio(logp, batch).sum(-1) / batch.mask.sum(-1))
        advantage = standardised(batch.reward)
        is_outside = (rho < 1 - self.clip) | (rho > 1 + self.clip_high)
        loss = -clipped(rho, advantage, self.clip, self.clip_high).mean(1)
        return loss, {"clip_ratio": is_outside.float().mean(1)}
