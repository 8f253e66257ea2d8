"""A number that changes with the step: an option of an objective given as a table in the config."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A number that is linear from `start` to `end` over `steps` steps, then constant.

    From `cut_step` on, if given, it is `cut_to` instead. The paper's code uses a linear schedule
    for GSM8K (.014 to .004 over 500 steps), and linear-then-cut for TL;DR (1.0 falling to 0, cut
    to .05 at step 32 of 256), which trades KL for win rate.
    """

    start: float
    end: float
    steps: int
    cut_step: int | None = None
    cut_to: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(
                f"a schedule needs steps >= 1, not {self.steps};"
                " for a constant, write the number alone"
            )
        if (self.cut_step is None) != (self.cut_to is None):
            raise ValueError("a schedule with a cut needs both cut_step and cut_to")

    def at(self, step: int) -> float:
        """Return the value at a step."""
        if self.cut_step is not None and self.cut_to is not None and step >= self.cut_step:
            return self.cut_to
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)
