"""One process at a time writes to the folder of a run, and a killed one leaves it free."""

import errno
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from build import ENVIRONMENT, config
from filelock import FileLock

from tba.config.schema import Config
from tba.open import open_run, run
from tba.runs.folder import HOLDER, LOCK, locked
from tba.setup.checks import check_start, placed


def checked(chosen: Config, resume: Path | None = None) -> None:
    """Check a run as the command line does first."""
    check_start(placed(chosen), resume)


HOLD = """
import sys, time
from pathlib import Path
from tba.runs.folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("second", ["start", "resume"])
def test_a_second_run_in_a_folder_is_refused_and_told_who_has_it(tiny_model, tmp_path, second):
    folder = tmp_path / "run"
    chosen = config(tiny_model, folder, "run.steps=1", "eval.prompts=0")
    holder = rf"{re.escape(str(folder))} is in use by process {os.getpid()} on \S+ since \d{{4}}-"
    resume = folder if second == "resume" else None
    with open_run(chosen):
        before = sorted(folder.iterdir())
        for start in (run, checked):
            with pytest.raises(ValueError, match=holder):
                start(chosen, resume)
        assert sorted(folder.iterdir()) == before
    assert run(chosen).finished


def test_a_folder_on_a_full_disk_is_refused(tmp_path, monkeypatch):
    """A limit of file sizes stands for it: both end in an error of the write."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would leave half a file
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(ValueError, match=r"run.folder = .* cannot be used .* File too large"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            with locked(tmp_path):
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with locked(tmp_path):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        told = f"in use by process {holder.pid} on "
        with pytest.raises(ValueError, match=told), locked(tmp_path):
            pass
        holder.kill()
    with locked(tmp_path, wait=5.0):
        assert str(os.getpid()) in (tmp_path / HOLDER).read_text()
    assert not (tmp_path / HOLDER).exists()


def test_a_check_does_not_keep_a_start_out(tmp_path):
    """It has the lock for a moment."""
    with FileLock(tmp_path / LOCK, thread_local=False) as lock:
        end = threading.Timer(0.2, lock.release)
        end.start()
        with locked(tmp_path):
            end.join()


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path):
        assert f"{tmp_path} cannot be locked" in caplog.text


@pytest.mark.parametrize(
    ("folder", "why"), [("/dev/null", "File exists"), ("/dev/null/run", "Not a directory")]
)
def test_a_path_that_cannot_be_a_folder_is_refused(tiny_model, folder, why):
    told = f"run.folder = '{folder}' cannot be used as a folder: {why}; choose another one"
    with pytest.raises(ValueError, match=re.escape(told)):
        run(config(tiny_model, Path(folder)))
    told = told.replace("File exists", "Not a directory")
    with pytest.raises(ValueError, match=re.escape(told)):
        checked(config(tiny_model, Path(folder)))
