"""A crash at every change that a save makes to a disk; damage to every file of a checkpoint."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build import Slow, as_settings, config, end_alike
from build import file_names as names
from suite import Case, cases, forked

from tba.cli import _config
from tba.config.schema import Config
from tba.open import run
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import FORMAT, STATE, Checkpoints, newest, restore
from tba.runs.folder import CHECKPOINTS
from tba.runs.generations import damage, files_of, generations

EXIT = 9
SAVES = ("eval.prompts=0", "checkpoint.every=1", "checkpoint.keep=1", "log.sample_every=1")
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}


class Crash:
    """Ends the process before the change with this number; number 0 only counts changes.

    If `torn`, it ends within the change before, if that opened a file to write: the file has half
    of its content, or the row that was appended to it has no end.
    """

    def __init__(self, folder: Path, number: int, torn: bool):
        self._folder, self._number, self._torn = str(folder), number, torn
        self._written: tuple[Path, int | None] | None = None  # a file, and where rows were appended
        self.changes = 0

    def install(self) -> None:
        fsync = os.fsync

        def synced(handle: int) -> None:
            self._change()
            fsync(handle)

        os.fsync = synced
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if arguments else ""
        if event == "open" and path.startswith(self._folder):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR):
                self._change()
                appended = arguments[2] & os.O_APPEND and Path(path).exists()
                self._written = Path(path), Path(path).stat().st_size if appended else None
        elif event in CHANGES and (path.startswith(self._folder) or path[:1] != "/"):
            self._change()  # a relative path is a name in a folder that is open

    def _change(self) -> None:
        written, self._written = self._written, None
        self.changes += 1
        if self.changes == self._number:
            if self._torn and written is not None and written[0].exists():
                path, before = written
                size = path.stat().st_size
                # `open` with an opener is two events, and before the second there is no new row
                os.truncate(path, size // 2 if before is None else max(before, size - 5))
            os._exit(EXIT)


def crash(settings: list[str], resume: Path | None, folder: Path, number: int, torn: bool) -> None:
    """Run until a change; each save is waited for, so that changes have an order."""
    torch.set_num_threads(1)  # as in the tests' own process
    torch.manual_seed(0)  # its state is saved
    save = Checkpoints.save

    def save_and_wait(checkpoints: Checkpoints, *parts: Any) -> None:
        save(checkpoints, *parts)
        checkpoints.wait()

    Checkpoints.save = save_and_wait  # type: ignore[method-assign]
    chosen = _config(settings, resume)
    planned = Crash(folder, number, torn)
    planned.install()
    run(chosen, resume)
    folder.with_name("changes").write_text(str(planned.changes))


def crashed(settings: list[str], folder: Path, number: int, torn: bool, resume: bool) -> int | None:
    """Return how a process ended that had to crash."""
    arguments = settings, folder if resume else None, folder, number, torn
    with forked(crash, *arguments) as process:
        process.join(120)
        return process.exitcode


@pytest.fixture(scope="module")
def begun(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two steps, beside one of four, and the number of changes of two more."""
    folder = tmp_path_factory.mktemp("begun")
    run(config(tiny_model, folder / "whole", *SAVES, "run.steps=4"))
    run(config(tiny_model, folder / "part", *SAVES, "run.steps=2"))
    shutil.copytree(folder / "part", folder / "counted")
    assert crashed(["run.steps=4"], folder / "counted", 0, False, resume=True) == 0
    end_alike(folder / "whole", folder / "counted")
    return folder


@pytest.mark.timeout(600)
@cases(3, full=40)
def test_a_crash_at_any_change_of_a_save_or_a_prune_costs_nothing(case, begun, tmp_path):
    """Of a resumed run of two steps, whose metrics and samples are written as well."""
    changes = int((begun / "changes").read_text())
    assert changes > 60
    for number in range(1 + case.index, changes + 1, 40):
        for torn in (False, True):
            folder = shutil.copytree(begun / "part", tmp_path / f"{number}-{torn}")
            with case.attempt():
                assert crashed(["run.steps=4"], folder, number, torn, resume=True) == EXIT
                sound = generations(folder / CHECKPOINTS)[-1]
                assert damage(sound) == {}
                assert run(_config(["run.steps=4"], folder), folder).finished
                end_alike(begun / "whole", folder)
                left = names(folder / CHECKPOINTS)
                case.left(len(left) - 1)
                assert left == ["step-00000004"]
            shutil.rmtree(folder)


def started_again(chosen: Config, folder: Path) -> None:
    """Do as the messages say until the run has ended."""
    torch.manual_seed(0)
    try:
        run(_config(["run.steps=2"], folder), folder)
    except ValueError as error:
        told = str(error)
        assert "nothing to resume" in told or "is not the folder of a run" in told, told
        try:
            run(chosen)
        except ValueError as refused:
            assert f"remove it (`rm -r {folder}`)" in str(refused)
            shutil.rmtree(folder)
            run(chosen)


@pytest.mark.timeout(600)
@cases(3, full=20)
def test_a_crash_at_any_change_of_a_new_run_leaves_it_resumable_or_says_what_to_do(
    case, tiny_model, tmp_path
):
    whole = tmp_path / "whole"
    torch.manual_seed(0)
    run(config(tiny_model, whole, *SAVES, "run.steps=2"))
    counted = as_settings(config(tiny_model, tmp_path / "counted", *SAVES, "run.steps=2"))
    assert crashed(counted, tmp_path / "counted", 0, False, resume=False) == 0
    changes = int((tmp_path / "changes").read_text())
    for number in range(1 + case.index, changes + 1, 20):
        folder = tmp_path / str(number)
        chosen = config(tiny_model, folder, *SAVES, "run.steps=2")
        with case.attempt():
            assert crashed(as_settings(chosen), folder, number, number % 2 > 0, False) == EXIT
            started_again(chosen, folder)
            end_alike(whole, folder)
        shutil.rmtree(folder)


# Damage


def flipped(content: bytes, case: Case) -> bytes:
    damaged = bytearray(content)
    damaged[case.rng.integers(len(damaged))] ^= 1 << int(case.rng.integers(8))
    return bytes(damaged)


DAMAGE: dict[str, Callable[[bytes, Case], bytes | None]] = {
    "flipped": flipped,
    "cut": lambda content, case: content[: case.rng.integers(len(content))],
    "deleted": lambda content, case: None,
    "emptied": lambda content, case: b"",
    "extended": lambda content, case: content + b"\0",
}


@pytest.fixture(scope="module")
def twice(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("twice") / "run"
    run(config(tiny_model, folder, "checkpoint.every=4", "checkpoint.keep=2", "eval.prompts=0"))
    return folder


@cases(4, full=25, quick=1)
def test_damage_to_any_file_of_a_checkpoint_is_noticed_and_named(case, twice, tmp_path, caplog):
    """In each file of the newest generation. The one before is used; a run resumed from it ends
    as the whole one did."""
    folder = tmp_path / "run"
    subprocess.run(["cp", "-a", twice, folder], check=True, timeout=60)
    older, last = generations(folder / CHECKPOINTS)
    damaged = list(DAMAGE)[case.index % len(DAMAGE)]
    files = files_of(last)
    assert {"manifest.json", "state.json", "model/model.safetensors"} < files.keys()
    for name, path in files.items():
        sound = path.read_bytes()
        if not sound and damaged in ("flipped", "cut"):  # no groups are held, for example
            continue
        content = DAMAGE[damaged](sound, case)
        if content == sound:
            continue
        path.unlink() if content is None else path.write_bytes(content)
        caplog.clear()
        with case.attempt():
            assert newest(folder / CHECKPOINTS) == older, name
            assert f"DAMAGED CHECKPOINT {last.name}: " in caplog.text
            assert name == "manifest.json" or name in caplog.text
        path.write_bytes(sound)
    assert newest(folder / CHECKPOINTS) == last
    chosen = last / case.pick(list(files))
    chosen.unlink()
    assert run(_config([], folder), folder).steps == 8
    end_alike(twice, folder)


@cases(21, full=1, quick=1)
def test_a_checkpoint_of_another_format_is_refused_with_what_to_do(case, tmp_path):
    for state in ({}, *({"format": number} for number in (*range(FORMAT), FORMAT + 1, "6", None))):
        (tmp_path / STATE).write_text(json.dumps(state))
        told = "another version of tba and cannot be resumed by this one; `tba export` still writes"
        with case.attempt(), pytest.raises(ValueError, match=told):
            restore(tmp_path, Slow(), ReplayBuffer())
