"""Readers of checkpoints beside a run that removes them: they hold what they read."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from build import CHECKPOINT_DEADLINE as DEADLINE
from build import Slow
from build import save_checkpoint as save

from tba.runs.checkpoint import Checkpoints, choose_checkpoint, chosen
from tba.runs.generations import (
    MANIFEST,
    damage,
    generations,
    locked_generations,
    path_of,
    remove,
    step_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def saves(folder: Path) -> Iterator[Callable[[int], None]]:
    """Save a step and keep only that."""
    folder.parent.mkdir()
    trainer = Slow()
    trainer.go.set()
    checkpoints = Checkpoints(folder, keep=1, deadline=DEADLINE)

    def saved(step: int) -> None:
        save(checkpoints, trainer, step)
        checkpoints.wait()

    yield saved


def test_what_is_held_stays_until_it_is_released(folder, saves):
    saves(1)
    with chosen(folder.parent) as generation:
        saves(2)
        saves(3)
        assert [step_of(g) for g in generations(folder)] == [1, 3]
        assert generation == path_of(folder, 1) and damage(generation) == {}
        with chosen(folder.parent) as newer:  # a second reader, beside the first
            assert step_of(newer) == 3
    saves(4)
    assert [step_of(g) for g in generations(folder)] == [4]
    assert {p.name for p in folder.iterdir()} == {"step-00000004"}


def test_what_is_being_removed_is_not_chosen(folder, saves):
    """A part of a checkpoint is never taken for a damaged one."""
    saves(1)
    listed = generations(folder)
    remove(listed[0])
    saves(2)
    with locked_generations(folder) as complete:
        assert [step_of(g) for g in complete] == [2]
        assert choose_checkpoint(folder.parent, None, complete) == path_of(folder, 2)
    with pytest.raises(ValueError, match="no such checkpoint"), chosen(folder.parent, 1):
        pass


def test_readers_beside_saves_always_find_a_whole_checkpoint(folder, saves):
    saves(1)
    ended, steps = threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            with chosen(folder.parent) as generation:
                assert damage(generation) == {}
                steps.append(step_of(generation))

    errors: list[BaseException] = []

    def reading() -> None:
        try:
            read()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reading) for _ in range(3)]
    with ExitStack() as ending:
        for thread in threads:
            thread.start()
            ending.callback(thread.join)
        ending.callback(ended.set)
        for step in range(2, 14):
            saves(step)
    assert errors == []
    assert len(set(steps)) > 1


def test_a_checkpoint_without_a_manifest_is_damaged_and_not_held_back(folder, saves):
    saves(1)
    (path_of(folder, 1) / "manifest.json").unlink()
    with pytest.raises(ValueError, match="damaged"), chosen(folder.parent):
        pass
    saves(2)
    assert [step_of(g) for g in generations(folder)] == [2]


def linked(path: Path) -> None:
    """Move a file or a folder away, and leave a link."""
    shutil.move(path, elsewhere := path.parents[3] / "elsewhere")
    path.symlink_to(elsewhere)


def replaced(path: Path, plant: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    plant(path)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "manifest-device": lambda g: replaced(g / MANIFEST, lambda p: p.symlink_to("/dev/zero")),
    "manifest-deep": lambda g: (g / MANIFEST).write_text('{"a":' * 100_000),
    "file-device": lambda g: replaced(g / "state.json", lambda p: p.symlink_to("/dev/zero")),
    "file-link": lambda g: linked(g / "state.json"),
    "folder-link": lambda g: linked(g / "model"),
    "step-link": linked,
}
"""What somebody may put into a checkpoint that he gives to another one."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("plant", HOSTILE.values(), ids=HOSTILE)
def test_nothing_in_a_checkpoint_can_hang_or_redirect_its_reader(plant, folder, saves):
    saves(1)
    plant(path_of(folder, 1))
    with pytest.raises(ValueError, match="are damaged"), chosen(folder.parent):
        pass
