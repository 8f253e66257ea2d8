"""Kills in the middle of a save: what is on disk then is enough to go on, or says how."""

import shutil
from pathlib import Path

import pytest
from build import config
from build import file_names as names

from tba.cli import _config
from tba.open import run
from tba.runs.generations import damage, generations, recover

SMALL = ("eval.prompts=0", "checkpoint.keep=1")


def test_a_kill_while_a_generation_is_saved_again_loses_nothing(tiny_model, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"
    run(config(tiny_model, folder, "run.steps=4", *SMALL))

    def cut_off(complete: Path, target: Path) -> None:
        shutil.rmtree(target)
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("tba.runs.checkpoint.put", cut_off)
        with pytest.raises(RuntimeError, match="killed"):
            run(_config([], folder), folder)  # ends at once, and saves step 4 again
    assert names(checkpoints) == [".step-00000004"]
    recover(checkpoints)
    (generation,) = generations(checkpoints)
    assert generation.name == "step-00000004" and damage(generation) == {}
    assert run(_config(["run.steps=5"], folder), folder).steps == 5
    assert names(checkpoints) == ["step-00000005"]


def test_unfinished_saves_are_removed_and_files_of_others_are_left_alone(tiny_model, tmp_path):
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"
    run(config(tiny_model, folder, "run.steps=2", *SMALL))
    orphan = checkpoints / ".step-00000001"
    orphan.mkdir()
    (orphan / "state.json").write_text("{")
    (checkpoints / "step-99999999").write_text("a file")
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000002-backup")
    assert [g.name for g in generations(checkpoints)] == ["step-00000002"]
    assert run(_config(["run.steps=3"], folder), folder).finished
    assert names(checkpoints) == ["step-00000002-backup", "step-00000003", "step-99999999"]
