"""Links in a run's folder that somebody has planted: nothing is ever written through one."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from build import config

from tba.open import run
from tba.runs.folder import (
    CONFIG,
    HOLDER,
    LOCK,
    METRICS,
    SAMPLES,
    SESSIONS,
    SUMMARY,
    WARNINGS,
    locked,
    open_plain,
    write_whole,
)
from tba.tools.report import report

PRECIOUS = "precious\n"


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "symbolic": lambda path, target: path.symlink_to(target),
    "dangling": lambda path, target: path.symlink_to(target.with_name("absent")),
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    file = tmp_path / "target"
    file.write_text(PRECIOUS)
    return file


def untouched(target: Path) -> bool:
    return target.read_text() == PRECIOUS and not target.with_name("absent").exists()


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_an_appended_file_is_refused(plant, tmp_path, target):
    plant(tmp_path / "rows", target)
    with pytest.raises(ValueError, match=r"rows is a link, .*remove it"):
        open_plain(str(tmp_path / "rows"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert untouched(target)


@pytest.mark.parametrize("name", ["config.json", ".config.json"])
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_whole_file_takes_its_place(plant, name, tmp_path, target):
    plant(tmp_path / name, target)
    write_whole(tmp_path / "config.json", "{}\n")
    assert (tmp_path / "config.json").read_text() == "{}\n"
    assert not (tmp_path / "config.json").is_symlink()
    assert untouched(target)


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_lock_writes_through_none(plant, tmp_path, target):
    folder = tmp_path / "run"
    folder.mkdir()
    plant(folder / LOCK, target)
    plant(folder / HOLDER, target)
    with suppress(ValueError), locked(folder):
        pass
    assert untouched(target)


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_no_file_of_a_resumed_run_goes_through_a_link(plant, tiny_model, tmp_path, target):
    """Neither those of the run itself, nor of its checkpoints, nor of its report."""
    folder, tensorboard = tmp_path / "run", ["log.report_to=tensorboard"]
    settings = ["run.steps=2", "checkpoint.every=1", *tensorboard]
    run(config(tiny_model, folder, *settings))
    report([folder])
    for name in (CONFIG, METRICS, SAMPLES, WARNINGS, SUMMARY, "report/index.html"):
        (folder / name).with_name(f".{Path(name).name}").unlink(missing_ok=True)
        plant((folder / name).with_name(f".{Path(name).name}"), target)
    for name in (METRICS, SUMMARY, "report/index.html"):
        (folder / name).rename(kept := folder / "kept")
        (folder / name).symlink_to(kept)
    for name in (".step-00000003", "step-00000003"):
        (folder / "checkpoints" / name).symlink_to(elsewhere := tmp_path / "elsewhere")
    elsewhere.mkdir(exist_ok=True)
    before = (folder / "kept").read_text()
    run(config(tiny_model, folder, "run.steps=3", *settings[1:]), resume=folder)
    report([folder])
    assert untouched(target)
    assert list(elsewhere.iterdir()) == []
    assert (folder / "kept").read_text() == before
    assert not (folder / METRICS).is_symlink()
    assert not (folder / "checkpoints" / "step-00000003").is_symlink()


def test_a_run_whose_checkpoints_are_a_link_is_not_resumed(tiny_model, tmp_path):
    settings = config(tiny_model, folder := tmp_path / "run", "run.steps=1")
    run(settings)
    (folder / "checkpoints").rename(elsewhere := tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(elsewhere)
    (elsewhere / ".step-00000009").mkdir()
    with pytest.raises(ValueError, match="checkpoints is a link"):
        run(settings, resume=folder)
    assert (elsewhere / ".step-00000009").exists()


@pytest.mark.parametrize("name", [METRICS, SESSIONS, "tensorboard"])
def test_a_new_run_refuses_links(name, tiny_model, tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(elsewhere / "absent" if name == METRICS else elsewhere)
    with pytest.raises((ValueError, RuntimeError), match=f"{name} is a link"):
        run(config(tiny_model, folder, "run.steps=1", "log.report_to=tensorboard"))
    assert list(elsewhere.iterdir()) == []
