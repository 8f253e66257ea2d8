"""What can be done with a run's checkpoint afterwards: evaluate it, export it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba import build, checkpoint
from tba.config import override_all, parse
from tba.runfolder import RunFolder


def evaluate_run(run: Path, settings: Sequence[str], reference: bool) -> dict[str, Any]:
    """Scores of the newest sound checkpoint (or of the model that the run started from) on the task's held-out prompts."""
    folder = RunFolder.reopen(run)
    tables = folder.config()
    override_all(tables, settings)
    if not reference:
        generation = checkpoint.newest(folder.checkpoints)
        tables["policy"]["model"] = str(generation / "model")
    parts = build.check(parse(tables))
    device = "cuda:0" if build.gpus() else "cpu"
    scores = build.evaluation(parts, build.searcher(parts, device, build.bf16(parts.config.policy, device))).scores
    return {"run": str(run), "model": tables["policy"]["model"], "prompts": len(parts.held_out), **scores}


def export_run(run: Path, out: Path) -> Path:
    """The newest sound checkpoint's model and tokenizer in a new folder."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a new folder")
    generation = checkpoint.newest(RunFolder.reopen(run).checkpoints)
    shutil.copytree(generation / "model", out, dirs_exist_ok=True)
    return out
