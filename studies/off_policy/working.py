"""Addition with written working: each column's sum is written before the answer.

task.use = "studies.off_policy.working.WrittenSums"

    1487+2536=  ->  7+6+0=13;8+3+1=12;4+5+1=10;1+2+1=4;4023

A column has both digits and the carry, from the last column to the first. Answers have 37 to 43
tokens. The model of the study, studies/off_policy/model, writes a carry of 0 everywhere in 78 % of
its answers; scripts/train_arithmetic_model.py says how it was trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tba.prompt import Answer, Prompt
from tba.tasks.arithmetic import Arithmetic


@dataclass(frozen=True)
class WrittenSums(Arithmetic):
    """Sums whose reward is 1 if the text after the last semicolon is the right answer, else 0."""

    digits: int = 4
    """Digits of each number."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        right = prompt.columns["answer"]
        return [float(a.finished and a.text.rpartition(";")[2] == right) for a in answers]
