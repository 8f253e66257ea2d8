"""The result of a run, as Python sees it: tables of what it wrote, and the trained model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame

from tba.learn.state import MODEL
from tba.models.lora import merged
from tba.models.pretrained import load_model, load_text
from tba.runs.checks import config_of
from tba.runs.choice import choose
from tba.runs.log import METRICS, SAMPLES, read
from tba.runs.summary import Summary

EVALUATED = "eval/sampled_reward"  # a metric of every evaluation, and of no training step


@dataclass(frozen=True)
class Result:
    """Everything that a run has written to its folder, read when it is asked for."""

    folder: Path

    @property
    def summary(self) -> Summary:
        """The totals, and the first and last scores; ValueError until the run has ended."""
        return Summary.read(self.folder)

    def metrics(self) -> DataFrame:
        """Return the metrics of each training step, in order, with a column `step`."""
        return DataFrame([row for row in read(self.folder / METRICS) if EVALUATED not in row])

    def evaluations(self) -> DataFrame:
        """Return the scores of each evaluation, in order; `step` is the version evaluated."""
        rows = read(self.folder / METRICS)
        # a resumed run may have repeated one
        by_step = {row["step"]: row for row in rows if EVALUATED in row}
        return DataFrame([by_step[step] for step in sorted(by_step)])

    def samples(self) -> DataFrame:
        """Return the stored prompts with their completions and rewards, in the order written."""
        return DataFrame(read(self.folder / SAMPLES))

    def model(self, step: int | str | None = None) -> Any:
        """Return the trained model in fp32, for transformers, with a LoRA adapter merged into it.

        The checkpoint is the newest one, the one of a `step`, or the "best" (see docs/tasks.md).
        """
        policy = config_of(self.folder).policy
        folder = choose(self.folder, step) / MODEL
        if policy.lora is not None:
            return merged(policy, folder)
        return load_model(policy.model_copy(update={"model": str(folder)}), torch.float32)

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
        return load_text(config_of(self.folder).policy).tokenizer
