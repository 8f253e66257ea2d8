from dataclasses import dataclass

from tba.config.tables import NotNegative, PositiveFloat
from tba.objectives import Loss, Objective, PerToken, centred, penalised
from tba.types import Batch


@dataclass(frozen=True)
class DrGrpo(Objective):
    """Dr. GRPO: GRPO without its two normalisations.

        loss[b] = -mean_j sum_t [min(rho_t A_j, clip(rho_t) A_j) - beta KL_t]
        A_j     = r_j - mean r

    Terms as in `grpo`. Division by the length favours long wrong answers, and division by the
    standard deviation of the rewards favours prompts that are very easy or very hard.

    Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3; there without KL.
    """

    needs_behavior = True
    beta: NotNegative = 0.0
    """Coefficient of the KL to the reference."""
    clip: PositiveFloat = 0.2
    """Clip ratios to [1 - clip, 1 + clip]."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        advantage = centred(batch.reward)[..., None]
        summed, outside = penalised(logp, batch, advantage, self.beta, self.clip, self.clip)
        return -summed.mean(1), {"clip_ratio": outside}
