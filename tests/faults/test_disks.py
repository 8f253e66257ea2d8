"""Disks that are full, that cannot be written to, and folders that are gone."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from build import as_settings, config
from suite import carry_out, cases, forked, until

from tba.cli import _config
from tba.open import run
from tba.runs.checkpoint import newest
from tba.runs.folder import CHECKPOINTS
from tba.runs.generations import damage, generations

STEPS = 60
SETTINGS = ("eval.prompts=0", "checkpoint.every=2", "log.sample_every=1", f"run.steps={STEPS}")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=30, capture_output=True)


def remount_read_only(place: Path) -> None:
    """Try for a while: the kernel refuses it while a file is being written."""
    for _ in range(200):
        with suppress(subprocess.CalledProcessError):
            mount("-o", "remount,bind,ro", str(place))
            return
        time.sleep(0.02)
    pytest.fail(f"{place} could not be made read-only")


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A small file system in memory, which only root may mount."""
    folder.mkdir()
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    try:
        mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    except subprocess.SubprocessError:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        unmount(folder)


def fill(ballast: Path, left: int) -> None:
    """Take all space of a disk but for so many bytes."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:  # full
            pass
        file.truncate(max(0, ballast.stat().st_size - left))


@cases(13, full=10)
def test_a_disk_that_is_full_ends_the_run_and_costs_no_step_that_was_saved(
    case, tiny_model, tmp_path
):
    """Something else fills it at a random moment, and frees it later."""
    with disk(tmp_path / "disk", "24m") as place:
        folder, ballast = place / "run", place / "ballast"
        chosen = as_settings(config(tiny_model, folder, *SETTINGS, "run.steps=100000"))
        with forked(carry_out, chosen) as process:
            assert process.pid is not None
            until(lambda: len(generations(folder / CHECKPOINTS)) > 0, 60, every=0.002)
            os.kill(process.pid, signal.SIGSTOP)  # else it may end before the disk is full
            fill(ballast, left=int(case.rng.integers(0, 3)) * 20_000)
            os.kill(process.pid, signal.SIGCONT)
            started = time.monotonic()
            while process.is_alive() and time.monotonic() < started + 60:
                process.join(0.2)
                with suppress(OSError), ballast.open("ab", buffering=0) as file:
                    while True:  # also what the run frees when it removes a checkpoint
                        file.write(bytes(4096))
            case.noticed(time.monotonic() - started)
            assert process.exitcode not in (None, 0)
        sound = newest(folder / CHECKPOINTS)
        assert damage(sound) == {}
        ballast.unlink()
        done = int(sound.name.rpartition("-")[2])
        assert run(_config([f"run.steps={done + 3}"], folder), folder).finished


@cases(13, full=5, part=1)
def test_a_disk_that_becomes_read_only_costs_nothing(case, tiny_model, tmp_path):
    """The run ends with the reason, and goes on once the disk can be written to again."""
    place = tmp_path / "disk"
    place.mkdir()
    folder = place / "run"
    if os.getuid() != 0:
        pytest.skip("only root can make a disk read-only")
    with ExitStack() as mounted:
        chosen = as_settings(config(tiny_model, folder, *SETTINGS, "run.steps=100000"))
        with forked(carry_out, chosen) as process:
            until(lambda: len(generations(folder / CHECKPOINTS)) > 0, 60)
            time.sleep(float(case.rng.uniform(0, 1)))
            mount("--bind", str(place), str(place))
            mounted.callback(unmount, place)
            remount_read_only(place)
            started = time.monotonic()
            process.join(30)
            case.noticed(time.monotonic() - started)
            assert process.exitcode not in (None, 0)
        mounted.close()
        assert damage(newest(folder / CHECKPOINTS)) == {}
        done = int(newest(folder / CHECKPOINTS).name.rpartition("-")[2])
        assert run(_config([f"run.steps={done + 3}"], folder), folder).finished


@cases(13, full=5, part=1)
def test_a_folder_that_is_removed_ends_the_run(case, tiny_model, tmp_path):
    """And goes on once it is back."""
    folder = tmp_path / "run"
    chosen = as_settings(config(tiny_model, folder, *SETTINGS, "run.steps=100000"))
    with forked(carry_out, chosen) as process:
        until(lambda: len(generations(folder / CHECKPOINTS)) > 0, 60)
        time.sleep(float(case.rng.uniform(0, 1)))
        folder.rename(tmp_path / "away")  # at once; what is removed file by file is written again
        started = time.monotonic()
        process.join(30)
        case.noticed(time.monotonic() - started)  # a busy machine needs more than five seconds
        assert process.exitcode not in (None, 0)
    sound = newest(tmp_path / "away" / CHECKPOINTS)
    assert damage(sound) == {}
    shutil.rmtree(folder, ignore_errors=True)
    done = int(sound.name.rpartition("-")[2])
    (tmp_path / "away").rename(folder)
    assert run(_config([f"run.steps={done + 3}"], folder), folder).finished
