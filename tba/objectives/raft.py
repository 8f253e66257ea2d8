"""Learning from the good responses alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from tba.objectives import Loss
from tba.objectives._terms import of_response
from tba.types import Batch


@dataclass(frozen=True)
class Raft:
    """Imitates the good responses, and learns nothing from the others.

    loss = -mean_j [r_j is good] log pi(y_j): likelihood of the responses whose reward is at least `threshold`.

    On rewards of 0 and 1 that is REINFORCE without a baseline. With `best` the group's best is good (all of the best,
    where several are; none, where all are equal).
    RAFT (arXiv 2304.06767), algorithm 1; with a threshold: A Minimalist Approach to LLM Reasoning (arXiv 2504.11343).
    """

    threshold: float | Literal["best"] = 0.5
    length_normalised: bool = False
    """log pi(y_j) as a mean over tokens."""

    def __call__(self, logp: Float[Tensor, "B K T"], batch: Batch) -> Loss:
        if isinstance(self.threshold, str):
            best = batch.reward.amax(1, keepdim=True)
            good = (batch.reward == best) & (best > batch.reward.amin(1, keepdim=True))
        else:
            good = batch.reward >= self.threshold
        return -(good.float() * of_response(logp, batch, self.length_normalised)).mean(1), {
            "raft/accepted": good.float().mean(1)
        }
