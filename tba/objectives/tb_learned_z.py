from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tba.config.tables import PositiveFloat
from tba.objectives import Head, Loss, Objective, PerToken, Taper, tapered, total
from tba.types import Batch


@dataclass(frozen=True)
class TrajectoryBalanceLearnedZ(Objective):
    """Trajectory balance in its original form, with a learned log Z.

        loss[b] = (beta / 2) mean_j w_j (log Z(x) + (log pi - log ref)_j - r_j / beta)^2

    log Z(x) is a linear head on the mean hidden state of the prompt, which learns from the same
    loss. Where it equals the group's own estimate, the gradient is that of `tb`. `taper` chooses
    the weights w as for `tb`, by the sign of the term in the square and by the reward; they have no
    gradient, and the optimum is the same for all positive weights.

    `gamma` and `tau` temper the target as in `tb`.

    Trajectory balance (arXiv 2201.13259), equation 14. For language models: arXiv 2405.18540;
    arXiv 2310.04363 learns one scalar log Z instead of a head.
    """

    beta: PositiveFloat = 0.05
    """Temperature of the target: smaller values weigh the reward more, larger ones keep more of the
    reference's diversity."""
    taper: Taper = "none"
    """Responses with weight min(pi / mu, 1), as for `tb`: residual, reward, or none."""
    head_learning_rate: PositiveFloat = 0.05
    """AdamW's learning rate for the head; it follows the policy's schedule."""
    gamma: PositiveFloat = 1.0
    """Temperature of the reference in the target; above 1, the reward weighs more."""
    tau: PositiveFloat = 1.0
    """Temperature of the whole target; above 1, it is flatter."""

    learns_from_equal_rewards = True

    @property
    def head(self) -> Head:
        return Head("prompt", self.head_learning_rate)

    def __call__(self, logp: PerToken, batch: Batch, head: Float[Tensor, " B"]) -> Loss:
        kl = total(logp - batch.ref_logp / (self.gamma * self.tau), batch)
        residual = self.beta * (kl + head[:, None]) - batch.reward / self.tau
        weight = tapered(self.taper, residual.detach(), logp, batch)
        loss = (weight * residual.square()).mean(1) / (2 * self.beta)
        return loss, {"tb/log_z": head.detach()}
