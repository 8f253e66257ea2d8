"""The sums of the study with rewards that have degrees: the share of right digits.

task.use = "studies.off_policy.graded.GradedSums"
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tba.prompt import Answer, Prompt
from tba.tasks.arithmetic import Arithmetic


@dataclass(frozen=True)
class GradedSums(Arithmetic):
    """Sums whose reward is the share of digits that are right and in their place.

    An answer that is longer than the right one counts with its own length. Only the right answer
    has a reward of 1, and passes.
    """

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        right = str(prompt.columns["answer"])
        return [share(right, a.text) if a.finished else 0.0 for a in answers]


def share(right: str, text: str) -> float:
    """Return the share of characters that two texts have in common, place by place."""
    equal = sum(a == b for a, b in zip(right, text, strict=False))
    return equal / max(len(right), len(text))
