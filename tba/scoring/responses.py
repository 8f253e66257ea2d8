"""Responses of a search to its prompts, and what turns them into trajectories with rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.prompt import Answer
from tba.scoring.verdicts import Verdict, added
from tba.types import Completion


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool call as the policy reads it; it may be an error, and may be cut."""

    content: str
    failed: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Responses:
    """Responses to prompts, as tokens and as answers that a task scores."""

    prompts: Sequence[np.ndarray]
    completions: Sequence[Sequence[Completion]]
    answers: Sequence[Sequence[Answer | Verdict]]
    """Answers to score, or verdicts, for example if an environment could not be reset."""
    results: Sequence[ToolResult] = ()
    """Results of the tool calls."""
    rewards: Sequence[Sequence[Verdict]] | None = None
    """Rewards that a program returned, to which the task's functions add theirs."""

    def rewarded(
        self, verdicts: list[list[Verdict]], scored: Sequence[Sequence[Answer | Verdict]]
    ) -> list[list[Verdict]]:
        """Return the verdicts of the task's functions with the program's rewards added.

        `scored` are the answers that the functions scored, or verdicts, to which nothing is added.
        """
        if self.rewards is None:
            return verdicts
        rewarded = []
        for group in zip(verdicts, self.rewards, scored, strict=True):
            triples = zip(*group, strict=True)
            rewarded.append([added(v, r) if isinstance(a, Answer) else v for v, r, a in triples])
        return rewarded
