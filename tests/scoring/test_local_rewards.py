"""A scoring process that cannot be replaced costs its searcher or the run, which is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
from build import config

from tba.child import Child
from tba.cli import _config
from tba.config.schema import Config
from tba.errors import EngineError
from tba.open import run
from tba.runs.checkpoint import newest
from tba.scoring import scoring

REWARD = """
import os
from pathlib import Path

def score(completions, fault, **columns):
    once = Path(__file__).with_name("once")
    if fault[0] and not once.exists():
        once.touch()
        os._exit(3)
    return [float("1" in c) for c in completions]
"""


def exiting(model: Path, folder: Path) -> Config:
    """A run whose scoring process ends once."""
    (folder / "rewards.py").write_text(REWARD)
    data = [{"prompt": f"{i}+1=", "fault": i == 0} for i in range(28)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    return config(
        model, folder / "run", "task=custom", f"task.data={folder}/rows.jsonl",
        f"task.reward={folder}/rewards.py:score", "task.held_out_size=1", "eval.prompts=0",
        "reward.isolate=process", "reward.deadline=0.5", "reward.max_rejected=1.0", "run.steps=9",
    )  # fmt: skip


def test_a_run_whose_scoring_process_cannot_be_replaced_is_saved(tiny_model, tmp_path, monkeypatch):
    """There is room for the first process only."""
    chosen, started = exiting(tiny_model, tmp_path), []

    def start(*arguments: Any, **options: Any) -> Child:
        if started:
            raise OSError("Resource temporarily unavailable")
        started.append(Child(*arguments, **options))
        return started[0]

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "Child", start)
        patch.setattr("tba.scoring.process.PAUSES", (0.0, 0.1))
        with pytest.raises(EngineError, match="unavailable"):
            run(chosen)
    folder = tmp_path / "run"
    assert newest(folder / "checkpoints")
    assert run(_config([], folder), folder).finished
