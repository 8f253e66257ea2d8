from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from tba.config.tables import PositiveFloat
from tba.objectives import Loss, Objective, PerToken, log_ratio, ratio, standardised, token_mean
from tba.types import Batch


@dataclass(frozen=True)
class M2po(Objective):
    """M2PO: policy gradient without clipping that masks the tokens that changed most.

        loss[b] = -sum_jt M_jt rho_jt A_j / (tokens of the group)
        A_j     = (r_j - mean r) / (std r + 1e-4)

    rho = pi / mu of a token, with mu the policy that sampled it. Tokens are masked, M = 0, in the
    order of (log rho)^2, the largest first, until the mean of the others is below `threshold`.

    Prosperity Before Collapse (arXiv 2510.01161). There, the mask is computed over a batch; here,
    over a group, so that a group's loss depends on that group only.
    """

    needs_behavior = True
    threshold: PositiveFloat = 0.04
    """Upper bound on the mean of (log rho)^2 over the unmasked tokens."""

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        change = log_ratio(logp, batch)
        kept = self.kept(change.detach().square(), batch.mask)
        advantage = standardised(batch.reward)[..., None]
        loss = -token_mean(kept * ratio(change) * advantage, batch)
        return loss, {"clip_ratio": 1 - token_mean(kept.float(), batch)}

    def kept(self, moment: PerToken, mask: Bool[Tensor, "B K T"]) -> Bool[Tensor, "B K T"]:
        """Return the tokens that are not masked; `moment` is (log rho)^2."""
        flat = moment.masked_fill(~mask, float("inf")).flatten(1)
        rising, order = flat.sort(dim=1, stable=True)
        count = torch.arange(1, flat.shape[1] + 1, device=flat.device)
        is_within = rising.cumsum(1) / count < self.threshold
        return torch.zeros_like(is_within).scatter(1, order, is_within).view_as(mask)
