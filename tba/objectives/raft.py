from dataclasses import dataclass

from tba.objectives import Loss, Objective, PerToken, total
from tba.prompt import passes
from tba.types import Batch


@dataclass(frozen=True)
class Raft(Objective):
    """RAFT: maximises the likelihood of the good responses, and ignores the others.

        loss[b] = -mean_j [r_j >= threshold] log pi(y_j)

    With rewards of 0 and 1 this is REINFORCE without a baseline.

    RAFT (arXiv 2304.06767), algorithm 1; with a threshold: A Minimalist Approach to LLM Reasoning
    (arXiv 2504.11343).
    """

    threshold: float = 0.5
    """Lowest reward of a good response."""

    learns_from_equal_rewards = True

    def __call__(self, logp: PerToken, batch: Batch) -> Loss:
        accepted = passes(batch.reward, self.threshold).float()
        loss = -(accepted * total(logp, batch)).mean(1)
        return loss, {"raft/accepted": accepted.mean(1)}
