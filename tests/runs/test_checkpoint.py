"""Checkpoints are written in the background, one at a time, whole or not at all."""

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from build import CHECKPOINT_DEADLINE as DEADLINE
from build import Slow, config
from build import file_names as names
from build import save_checkpoint as save

from tba.errors import EngineError, NoAnswerError
from tba.open import run
from tba.runs.checkpoint import Checkpoints, damage, generations
from tba.runs.folder import METRICS, read
from tba.runtime.local import LocalSearchers


def join(step: int) -> None:
    """Wait until the save of this step has ended, well or badly."""
    for thread in threading.enumerate():
        if thread.name == f"checkpoint of step {step}":
            thread.join(DEADLINE)


def test_a_save_waits_for_the_one_before(tmp_path):
    """Nothing has its final name before it is complete; the state is that of the call."""
    trainer = Slow()
    checkpoints = Checkpoints(tmp_path, keep=2, deadline=0.1)
    save(checkpoints, trainer, 1)
    trainer.state = "changed"
    assert names(tmp_path) == [".step-00000001"]
    assert checkpoints.metrics() == {}
    message = r"checkpoint of step 1 was not written within trainer.deadline = 0.1 s; raise it"
    with pytest.raises(TimeoutError, match=message):
        save(checkpoints, trainer, 2)
    with pytest.raises(TimeoutError, match=message):
        checkpoints.wait()
    trainer.go.set()
    join(1)
    save(checkpoints, trainer, 2)
    join(2)
    checkpoints.wait()
    first, second = generations(tmp_path)
    assert (first / "state").read_text() == "as it was"
    assert (second / "state").read_text() == "changed"
    assert damage(first) == damage(second) == {}
    assert checkpoints.metrics().keys() == {"checkpoint/seconds", "checkpoint/blocked"}
    assert checkpoints.metrics() == {}  # reported once


@pytest.mark.parametrize("call", ["save", "wait", "metrics", "end"])
def test_a_failed_save_is_raised_at_the_next_call(tmp_path, call):
    """The generation before stays, and what was left behind goes with the next save."""
    trainer = Slow()
    trainer.go.set()
    checkpoints = Checkpoints(tmp_path, keep=1, deadline=DEADLINE)
    save(checkpoints, trainer, 1)
    checkpoints.wait()
    trainer.error = OSError("no space left on device")
    save(checkpoints, trainer, 2)
    join(2)
    with pytest.raises(RuntimeError, match="checkpoint of step 2 was not written: no space left"):
        if call == "save":
            save(checkpoints, trainer, 3)
        if call == "wait":
            checkpoints.wait()
        if call == "metrics":
            checkpoints.metrics()
        if call == "end":
            checkpoints.__exit__(None)
    assert names(tmp_path) == [".step-00000002", "step-00000001"]
    trainer.error = None
    save(checkpoints, trainer, 3)
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000003"]


def test_a_save_does_not_create_the_folder_of_a_run_that_was_moved(tmp_path):
    trainer, folder = Slow(), tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    trainer.go.set()
    checkpoints = Checkpoints(folder, keep=2, deadline=DEADLINE)
    save(checkpoints, trainer, 1)
    checkpoints.wait()
    folder.parent.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        save(checkpoints, trainer, 2)
    assert names(tmp_path) == ["away"]


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.ENOENT])
def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path, monkeypatch, caplog, number
):
    """NFS keeps open files, and somebody else may remove it: the next save tries again."""
    trainer, remove = Slow(), shutil.rmtree
    trainer.go.set()
    checkpoints = Checkpoints(tmp_path, keep=1, deadline=DEADLINE)
    save(checkpoints, trainer, 1)
    checkpoints.wait()

    def refuse(path: Path, **options: Any) -> None:
        if path.name == ".step-00000001":
            raise OSError(number, os.strerror(number), str(path))
        remove(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        save(checkpoints, trainer, 2)
        checkpoints.wait()
    assert names(tmp_path) == [".step-00000001", "step-00000002"]
    assert damage(tmp_path / "step-00000002") == {}
    assert f"{tmp_path}/.step-00000001 could not be removed ([Errno {number}]" in caplog.text
    save(checkpoints, trainer, 3)
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("error", [None, ValueError("of the run"), KeyboardInterrupt()])
def test_the_end_waits_for_a_save_unless_interrupted(tmp_path, error):
    trainer = Slow()
    threading.Timer(0.3, trainer.go.set).start()
    try:
        with Checkpoints(tmp_path, keep=1, deadline=DEADLINE) as checkpoints:
            save(checkpoints, trainer, 1)
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert raised is error
    interrupted = isinstance(error, KeyboardInterrupt)
    assert names(tmp_path) == [".step-00000001" if interrupted else "step-00000001"]
    checkpoints.wait()


def test_a_run_logs_its_saves_and_ends_with_a_complete_one(tiny_model, tmp_path, monkeypatch):
    """A row has the seconds of the save before it; here each has ended by then."""
    save = Checkpoints.save

    def save_and_wait(checkpoints: Checkpoints, *parts: Any) -> None:
        save(checkpoints, *parts)
        checkpoints.wait()

    monkeypatch.setattr(Checkpoints, "save", save_and_wait)
    folder = tmp_path / "run"
    assert run(config(tiny_model, folder, "checkpoint.every=2", "eval.prompts=0")).finished
    rows = [row for row in read(folder / METRICS) if "checkpoint/seconds" in row]
    assert rows
    assert all(row["checkpoint/seconds"] > 0 for row in rows)
    assert all(row["checkpoint/blocked"] > 0 for row in rows)
    assert names(folder / "checkpoints") == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize("error", [NoAnswerError, EngineError])
def test_no_checkpoint_lacks_a_reference_that_could_not_be_replaced(
    error, tiny_model, tmp_path, monkeypatch
):
    """A resumed run would not replace it again."""

    def lost(searchers: LocalSearchers, sent: Any) -> None:
        raise error("Ray is lost")

    monkeypatch.setattr(LocalSearchers, "reset_reference", lost)
    folder = tmp_path / "run"
    settings = ("runtime.use=local", "checkpoint.every=2", "policy.reset_reference_every=3")
    with pytest.raises(RuntimeError, match="the reference could not be replaced: Ray is lost"):
        run(config(tiny_model, folder, *settings))
    assert names(folder / "checkpoints") == ["step-00000002"]
