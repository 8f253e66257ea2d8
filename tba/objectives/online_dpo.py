"""Direct preference optimisation on what the policy itself finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tba.objectives import Loss
from tba.objectives._terms import of_response, positive
from tba.types import Batch


@dataclass(frozen=True)
class OnlineDpo:
    """Prefers the better of two of the policy's own responses to the worse.

    loss = -log sigmoid(beta (d_w - d_l)), d = log pi - log ref, w the better and l the worse of two responses of the group.

    `best_worst` takes the group's best and worst, `first_two` its first two, whatever their rewards: the pair of a group of two.
    Responses of equal reward prefer nothing: such a group has loss 0.
    Direct Language Model Alignment from Online AI Feedback (arXiv 2402.04792); best against worst: arXiv 2410.18252.
    """

    beta: float = 0.1
    pair: Literal["best_worst", "first_two"] = "best_worst"
    length_normalised: bool = False
    """d as a mean over tokens, so that a longer response has no larger say."""

    def __post_init__(self) -> None:
        positive("beta", self.beta, 0.1)

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        considered = batch.reward if self.pair == "best_worst" else batch.reward[:, :2]
        better, worse = considered.argmax(1, keepdim=True), considered.argmin(1, keepdim=True)
        difference = of_response(logp - batch.ref_logp, batch, self.length_normalised)
        margin = self.beta * (difference.gather(1, better) - difference.gather(1, worse)).squeeze(1)
        preferred = (
            (batch.reward.gather(1, better) > batch.reward.gather(1, worse)).squeeze(1).float()
        )
        loss = -torch.nn.functional.logsigmoid(margin) * preferred
        return loss, {"rewards/margins": margin.detach(), "dpo/pairs": preferred}
