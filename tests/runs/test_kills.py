"""Kills in the middle of a save: what is on disk then is enough to go on, or says how."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from build import config
from build import file_names as names

from tba.assemble import run
from tba.cli import _config
from tba.runs.generations import damage, generations, recover

SMALL = ("eval.prompts=0", "checkpoint.keep=1")


def killed(*_: Any) -> None:
    """Stand in for a function at whose call the process is killed."""
    raise OSError("killed")


def test_a_kill_while_a_generation_is_saved_again_loses_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_run_killed_in_its_first_save_says_how_to_start_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    chosen = config(tiny_model, folder, "run.steps=2", *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr("tba.runs.checkpoint.sha256_of", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run(chosen)
    assert names(folder / "checkpoints") == [".step-00000002"]
    remove = re.escape(f"`rm -r {folder}`")
    with pytest.raises(ValueError, match=f"nothing to resume; .*remove its folder .{remove}"):
        run(_config([], folder), folder)
    with pytest.raises(ValueError, match=f"holds a run already; .* remove it .{remove}"):
        run(chosen)
    shutil.rmtree(folder)
    assert run(chosen).finished


def test_unfinished_saves_are_removed_and_files_of_others_are_left_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
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
