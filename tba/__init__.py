"""Reinforcement-learning post-training of language models with Trajectory Balance with Asynchrony (arXiv 2503.18929)."""

import os

# Before torch is imported: on a CPU, threads that spin while they wait slow other processes down 30 to 50 times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from typing import TYPE_CHECKING

from tba.config.loading import load
from tba.config.schema import Config

if TYPE_CHECKING:
    from pathlib import Path

    from tba.runs.summary import Summary

__version__ = "0.2.0"
__all__ = ["Config", "load", "train"]


def train(config: Config, resume: "Path | None" = None) -> "Summary":
    """Runs `config` to its end and returns its summary, as `tba train` does; `resume` is the folder of a run to go on with."""
    from tba.run import run

    return run(config, resume)
