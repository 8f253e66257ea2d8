from dataclasses import dataclass
from typing import Literal

import torch

from tba.objectives import Loss, PerToken
from tba.objectives._terms import of_response, positive
from tba.types import Batch


@dataclass(frozen=True)
class OnlineDpo:
    """Online DPO: prefers the better of two responses of the policy to the worse.

        loss[b] = -log sigmoid(beta (d_w - d_l)),  d = log pi - log ref

    w is the better and l the worse of two responses of the group. A pair of equal reward has
    loss 0.

    Direct Language Model Alignment from Online AI Feedback (arXiv 2402.04792); best against worst:
    arXiv 2410.18252.
    """

    beta: float = 0.1
    """Inverse temperature of the preference; larger values stay closer to the reference."""
    pair: Literal["best_worst", "first_two"] = "best_worst"
    """The best and the worst response of the group, or its first two, whatever their rewards."""
    length_normalised: bool = False
    """Use the mean over tokens for d, so that longer responses do not weigh more."""

    def __post_init__(self) -> None:
        positive(self, "beta")

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        considered = batch.reward if self.pair == "best_worst" else batch.reward[:, :2]
        better = considered.argmax(1, keepdim=True)
        worse = considered.argmin(1, keepdim=True)
        difference = of_response(logp - batch.ref_logp, batch, self.length_normalised)
        gap = difference.gather(1, better) - difference.gather(1, worse)
        margin = self.beta * gap.squeeze(1)
        differs = batch.reward.gather(1, better) > batch.reward.gather(1, worse)
        preferred = differs.squeeze(1).float()
        loss = -torch.nn.functional.logsigmoid(margin) * preferred
        return loss, {"rewards/margins": margin.detach(), "dpo/pairs": preferred}
