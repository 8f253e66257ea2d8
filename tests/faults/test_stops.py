"""Signals at random moments: the run saves, leaves, and goes on as if nothing had been."""

import os
import shutil
import signal
import time
from pathlib import Path

import torch
from build import as_settings, config, newest_files, replayed
from suite import carry_out, cases, forked, until

from tba.cli import _config
from tba.open import run
from tba.runs.folder import CHECKPOINTS, METRICS, read
from tba.runs.generations import damage, generations
from tba.stop import TWICE

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SCHEDULED = 5.0
"""Seconds in which a process of a busy machine notices that it should end."""
SETTINGS = ("eval.prompts=0", "checkpoint.every=7", "trainer.learning_rate=1e-3")


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read(folder / METRICS) if "loss" in row]


def goes_on_exactly(model: Path, folder: Path, step: int) -> None:
    """Two steps more end like a run that was never stopped."""
    assert run(_config([f"run.steps={step + 2}"], folder), folder).finished
    whole = folder.with_name("whole")
    torch.manual_seed(0)
    run(config(model, whole, *SETTINGS, f"run.steps={step + 2}"))
    one, other = newest_files(whole), newest_files(folder)
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        assert one[name] == other[name], name
    assert replayed(whole) == replayed(folder)
    assert steps(folder) == list(range(1, step + 3))


@cases(10, full=50)
def test_a_signal_at_any_moment_saves_and_leaves(case, tiny_model, tmp_path):
    """SIGTERM, SIGINT and SIGHUP, within two seconds from the first step on."""
    folder, number = tmp_path / "run", SIGNALS[case.index % len(SIGNALS)]
    chosen = as_settings(config(tiny_model, folder, *SETTINGS, "run.steps=100000"))
    with forked(carry_out, chosen) as process:
        until(lambda: len(steps(folder)) > 0 or not process.is_alive(), 60)
        assert process.pid is not None
        time.sleep(case.rng.uniform(0, 2))
        os.kill(process.pid, number)
        process.join(60)
        assert process.exitcode == 0, number
    newest = generations(folder / CHECKPOINTS)[-1]
    assert damage(newest) == {} and newest.name == f"step-{steps(folder)[-1]:08d}"
    goes_on_exactly(tiny_model, folder, steps(folder)[-1])


@cases(10, full=10, quick=0, part=2)
def test_a_second_signal_leaves_at_once(case, tiny_model, tmp_path):
    """With a sound checkpoint of a step before, from which the run goes on exactly."""
    folder = tmp_path / "run"
    settings = (*SETTINGS, "checkpoint.every=1")
    chosen = as_settings(config(tiny_model, folder, *settings, "run.steps=100000"))
    with forked(carry_out, chosen) as process:
        until(lambda: len(steps(folder)) > 5, 60)
        assert process.pid is not None
        time.sleep(case.rng.uniform(0, 1))
        for number in case.rng.permutation([signal.SIGTERM, signal.SIGINT])[:2]:
            os.kill(process.pid, int(number))
            time.sleep(TWICE + case.rng.uniform(0, 0.02))
        started = time.monotonic()
        process.join(30)
        assert case.noticed(time.monotonic() - started) < SCHEDULED
        assert process.exitcode is not None
    sound = [g for g in generations(folder / CHECKPOINTS) if damage(g) == {}]
    goes_on_exactly(tiny_model, folder, int(sound[-1].name.removeprefix("step-")))


@cases(11, full=20)
def test_a_killed_local_run_goes_on_exactly(case, tiny_model, tmp_path):
    """SIGKILL at a random moment, in most cases within a save."""
    folder = tmp_path / "run"
    settings = (*SETTINGS, "checkpoint.every=1", "log.sample_every=1")
    chosen = as_settings(config(tiny_model, folder, *settings, "run.steps=100000"))
    with forked(carry_out, chosen):
        until(lambda: len(generations(folder / CHECKPOINTS)) > 0, 60)
        time.sleep(case.rng.uniform(0, 1))
    newest = generations(folder / CHECKPOINTS)[-1]
    assert damage(newest) == {}
    shutil.copytree(folder, tmp_path / "copy")  # what a person may do before
    goes_on_exactly(tiny_model, tmp_path / "copy", int(newest.name.rpartition("-")[2]))
