"""Kills in the middle of a save: what is on disk then is enough to go on, or says how."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import names
from test_loop import config

from tba.assemble import run
from tba.cli import _config
from tba.runs.generations import damage, generations
from tba.runs.offline import export_run

SMALL = ("eval.prompts=0", "checkpoint.keep=1")


def killed(at: str) -> Callable[[Path, Path], Path]:
    """Return a `rename` that fails for files whose name begins so, as if there was a kill."""
    rename = Path.rename

    def until(path: Path, target: Path) -> Path:
        if path.name.startswith(at):
            raise OSError("killed")
        return rename(path, target)

    return until


@pytest.mark.parametrize(
    ("at", "left", "used"),
    [
        ("step-", [".step-00000004", "step-00000004"], "step-00000004"),
        (".step-", [".replaced-step-00000004", ".step-00000004"], ".step-00000004"),
    ],
    ids=["before the first rename", "between the two"],
)
def test_a_kill_while_a_generation_is_saved_again_loses_nothing(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    left: list[str],
    used: str,
) -> None:
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"
    run(config(tiny_model, folder, "run.steps=4", *SMALL))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed(at))
        with pytest.raises(RuntimeError, match="killed"):
            run(_config([], folder), folder)  # ends at once, and saves step 4 again
    assert names(checkpoints) == left
    (generation,) = generations(checkpoints)
    assert generation.name == used and damage(generation) == {}
    export_run(folder, tmp_path / "exported")  # needs no repair
    assert run(_config(["run.steps=5"], folder), folder).steps == 5
    assert names(checkpoints) == ["step-00000005"]


def test_a_run_killed_in_its_first_save_says_how_to_start_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    chosen = config(tiny_model, folder, "run.steps=2", *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed(".step-"))
        with pytest.raises(RuntimeError, match="killed"):
            run(chosen)
    assert names(folder / "checkpoints") == [".step-00000002"]
    remove = re.escape(f"`rm -r {folder}`")
    with pytest.raises(ValueError, match=f"nothing to resume; .*remove its folder .{remove}"):
        run(_config([], folder), folder)
    with pytest.raises(ValueError, match=f"before its first checkpoint .*; remove it .{remove}"):
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


def test_an_unfinished_save_is_removed_before_the_next_one_needs_its_room(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run(config(tiny_model, folder, "run.steps=2", *SMALL))
    (folder / "checkpoints" / ".step-00000001").mkdir()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("tba.runs.checkpoint._commit", full)
    with pytest.raises(RuntimeError, match="no space left"):
        run(_config(["run.steps=3"], folder), folder)
    assert names(folder / "checkpoints") == [".step-00000003", "step-00000002"]
