from dataclasses import dataclass

from tba.config.tables import NotNegative, PositiveFloat
from tba.objectives import Loss, Objective, PerToken, penalised, standardised
from tba.types import Batch


@dataclass(frozen=True)
class Grpo(Objective):
    """GRPO: clipped policy gradient with rewards normalised by group, and the KL as a loss term.

        loss[b] = -mean_j (1 / T_j) sum_t [min(rho_t A_j, clip(rho_t) A_j) - beta KL_t]
        A_j     = (r_j - mean r) / (std r + 1e-4)

    rho_t = pi / mu of a token, with mu the policy that sampled it; KL_t is the k3 estimate of the
    KL to the reference. `clip_high` above `clip` is the clip-higher of DAPO (arXiv 2503.14476).

    DeepSeekMath (arXiv 2402.03300), equation 3.
    """

    needs_behavior = True
    beta: NotNegative = 0.04
    """Coefficient of the KL to the reference."""
    clip: PositiveFloat = 0.2
    """Clip ratios to [1 - clip, 1 + clip]."""
    clip_high: PositiveFloat | None = None
    """Clip ratios to [1 - clip, 1 + clip_high]; default: `clip`."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        advantage = standardised(batch.reward)[..., None]
        high = self.clip if self.clip_high is None else self.clip_high
        summed, outside = penalised(logp, batch, advantage, self.beta, self.clip, high)
        mean = summed / batch.mask.sum(-1)
        return -mean.mean(1), {"clip_ratio": outside}
