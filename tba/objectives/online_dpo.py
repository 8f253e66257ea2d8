from dataclasses import dataclass

import torch

from tba.config.tables import PositiveFloat
from tba.objectives import Loss, Objective, PerToken, centred, total
from tba.types import Batch


@dataclass(frozen=True)
class OnlineDpo(Objective):
    """Online DPO: prefers the better of two of the policy's responses to the worse one.

        loss[b] = -log sigmoid(beta (d_w - d_l)),  d = log pi - log ref

    w is the best and l the worst response of the group. A pair of equal reward has loss 0.

    Direct Language Model Alignment from Online AI Feedback (arXiv 2402.04792); best against worst:
    arXiv 2410.18252.
    """

    beta: PositiveFloat = 0.1
    """Inverse temperature of the preference; larger values stay closer to the reference."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        reward = centred(batch.reward).float()
        better = reward.argmax(1, keepdim=True)
        worse = reward.argmin(1, keepdim=True)
        difference = total(logp - batch.ref_logp, batch)
        gap = difference.gather(1, better) - difference.gather(1, worse)
        margin = self.beta * gap.squeeze(1)
        preferred = reward.any(1).float()
        loss = -torch.nn.functional.logsigmoid(margin) * preferred
        return loss, {"rewards/margins": margin.detach(), "dpo/pairs": preferred}
