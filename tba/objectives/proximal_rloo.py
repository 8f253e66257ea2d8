from dataclasses import dataclass

from tba.config.tables import NotNegative, PositiveFloat
from tba.objectives import Loss, Objective, PerToken, clipped, leave_one_out, log_ratio, ratio
from tba.types import Batch


@dataclass(frozen=True)
class ProximalRloo(Objective):
    """Proximal RLOO: RLOO with PPO's clipping, at the level of whole responses.

        loss[b] = -mean_j min(rho_j A_j, clip(rho_j, 1 - clip, 1 + clip) A_j)

    rho_j = pi / mu of the whole response, with mu the policy that sampled it; A_j as in `rloo`.

    Asynchronous RLHF (arXiv 2410.18252), Proximal RLOO.
    """

    needs_behavior = True
    beta: NotNegative = 0.05
    """Coefficient of the KL to the reference."""
    clip: PositiveFloat = 0.2
    """Clip ratios to [1 - clip, 1 + clip]."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        return self.beta != 0

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        advantage = leave_one_out(batch, self.beta)
        rho = ratio(log_ratio(logp, batch).sum(-1))
        outside = ((rho - 1).abs() > self.clip).float().mean(1)
        loss = -clipped(rho, advantage, self.clip, self.clip).mean(1)
        return loss, {"rloo/advantage_std": advantage.std(1), "clip_ratio": outside}
