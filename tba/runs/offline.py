"""What can be done with a run's checkpoint afterwards: evaluate it, export it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.config.loading import override_all, parse
from tba.models.pretrained import computes_in_bf16
from tba.runs import checkpoint
from tba.runs.folder import RunFolder
from tba.runs.parts import check
from tba.runtime.placement import gpu_count
from tba.tasks._memory import refuse


def evaluate_run(run: Path, settings: Sequence[str], reference: bool) -> dict[str, Any]:
    """Scores of the newest sound checkpoint (or of the model that the run started from) on the task's held-out prompts.

    The KL is to the reference that the checkpoint has: the first model, unless it has been reset.
    """
    folder = RunFolder.reopen(run)
    tables = folder.config()
    refuse(parse(tables).task, str(run))
    override_all(tables, settings)
    generation = None if reference else checkpoint.newest(folder.checkpoints)
    parts = check(parse(tables))
    if not parts.held_out:
        raise ValueError(
            "there is nothing to evaluate on: set eval.prompts=128, and hold prompts out in the task"
        )
    device = "cuda:0" if gpu_count() else "cpu"
    bf16 = computes_in_bf16(parts.config.policy, device)
    searcher = parts.search_setup().build(device, bf16)
    if generation is not None:
        checkpoint.hand_over(generation, searcher, bf16)
    scores = searcher.evaluate().scores
    model = parts.config.policy.model if generation is None else str(generation / "model")
    return {"run": str(run), "model": model, "prompts": len(parts.held_out), **scores}


def export_run(run: Path, out: Path) -> Path:
    """The newest sound checkpoint's model and tokenizer in a new folder."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a new folder")
    generation = checkpoint.newest(RunFolder.reopen(run).checkpoints)
    shutil.copytree(generation / "model", out, dirs_exist_ok=True)
    return out
