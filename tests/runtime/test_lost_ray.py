"""Ray's own processes are killed and stopped: the run is saved first, and nothing is left of it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from build import (
    ENVIRONMENT,
    HOME,
    WATCHER,
    as_settings,
    children,
    conserved,
    nothing_is_left,
    run_and_keep,
    wait_until,
)
from build import ray_config as config

from tba.cli import _config
from tba.runs import checkpoint
from tba.runs.folder import METRICS, read
from tba.stop import TWICE

SECONDS = 180.0
"""Deadline of every wait in these tests."""


@dataclass
class Started:
    """A run that would take hours, in a process of its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    errors: Path

    def steps(self) -> int:
        return sum("loss" in row for row in read(self.folder / METRICS))

    def part(self, name: str) -> psutil.Process:
        """Return a process of Ray, or the watcher."""
        found = [p for p in psutil.Process(self.process.pid).children() if name in named(p)]
        assert len(found) == 1, [named(p) for p in found]
        return found[0]

    def sessions(self) -> list[Path]:
        return list(HOME.glob(f"tba-*/ray/session_*_{self.process.pid}"))


def named(process: psutil.Process) -> str:
    """Return the program of a process, and the script or the function if it is Python."""
    try:
        words = process.cmdline()
        return " ".join(Path(word).name for word in [*words[:2], *words[4:5]])
    except psutil.Error:  # it has ended
        return ""


@contextmanager
def started(model: Path, folder: Path, *settings: str) -> Iterator[Started]:
    """Start a run; nothing of Ray is left ten seconds after the block."""
    more = ("run.steps=1000000", "checkpoint.every=0", "task.size=5000", "eval.every=0")
    given = as_settings(config(model, folder, *more, *settings))
    command, errors = [sys.executable, "-m", "tba.cli", "train", *given], folder.parent / "errors"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command, start_new_session=True, env=ENVIRONMENT, stderr=file, stdout=file
        )
    run = Started(process, folder, errors)
    try:
        yield run
        assert wait_until(lambda: not run.sessions(), 10)
    finally:
        process.kill()
        process.wait(timeout=SECONDS)


def saved_step(folder: Path) -> int:
    state = json.loads((checkpoint.newest(folder / "checkpoints") / "state.json").read_text())
    return state["progress"]["step"]


@pytest.mark.fault
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_run_without_ray_is_saved_and_says_how_to_go_on(tiny_model, tmp_path, part):
    """No step is lost, and no prompt. The last step may be without its row of metrics."""
    folder = tmp_path / "run"
    with (
        nothing_is_left() as processes,
        started(tiny_model, folder, "runtime.cluster_deadline=3") as run,
    ):
        assert wait_until(lambda: run.steps() >= 3, SECONDS), run.errors.read_text()
        processes += children(run.process.pid)
        victim = run.part(part)
        victim.suspend()
        status = run.process.wait(timeout=SECONDS)
        assert status in (1, 2), run.errors.read_text()  # 1: Ray had to be abandoned
    step = saved_step(folder)
    told = run.errors.read_text()
    assert f"error: Ray is lost: its {part} (process {victim.pid}) is stopped" in told
    assert f"`tba train --resume {folder}` continues from step {step}" in told
    assert 3 <= run.steps() <= step <= run.steps() + 1
    resumed = run_and_keep(_config([f"run.steps={step + 3}"], folder), resume=folder)
    assert conserved(resumed.buffer)
    cursor, samples = resumed.searchers.state().cursor, resumed.config.sampling.samples
    arrived = cursor["state"]["chosen"] - len(cursor["outstanding"])
    assert resumed.buffer.counts["added"] == samples * arrived


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_although_ray_is_stopped(tiny_model, tmp_path, number):
    """Its deadline has not passed: nothing that the run does waits for it."""
    folder = tmp_path / "run"
    with nothing_is_left() as processes, started(tiny_model, folder) as run:
        assert wait_until(lambda: run.steps() >= 3, SECONDS), run.errors.read_text()
        processes += children(run.process.pid)
        run.part("raylet").suspend()
        run.process.send_signal(number)
        assert run.process.wait(timeout=SECONDS) == 0, run.errors.read_text()
    assert saved_step(folder) == run.steps() >= 3


@pytest.mark.fault
def test_a_second_signal_leaves_at_once_although_ray_is_stopped(tiny_model, tmp_path):
    """The first one waits for searches that take an hour, in lockstep, after the models' start."""
    slow = ("engine=scripted", "engine.latency=3600", "engine.answers=['1']", "eval.prompts=0")
    with nothing_is_left() as processes, started(tiny_model, tmp_path / "run", *slow) as run:
        assert wait_until(
            lambda: any("SearcherActor" in named(p) for p in children(run.process.pid)), SECONDS
        )
        processes += children(run.process.pid)
        for part in ("raylet", "gcs_server"):
            run.part(part).suspend()
        run.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: "interrupt again" in run.errors.read_text(), SECONDS)
        time.sleep(2 * TWICE)  # before, it counts as the first
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(timeout=SECONDS) != 0, run.errors.read_text()


@pytest.mark.fault
@pytest.mark.parametrize("moment", [WATCHER, "session", "gcs_server", "raylet", "step"])
def test_a_kill_at_any_moment_leaves_nothing_behind(tiny_model, tmp_path, moment):
    """The watcher has started before Ray."""
    with nothing_is_left() as processes, started(tiny_model, tmp_path / "run") as run:
        own = psutil.Process(run.process.pid)

        def come() -> bool:
            if moment == "session":
                return bool(run.sessions())
            if moment == "step":
                return run.steps() > 0
            return any(moment in named(p) for p in own.children())

        processes.append(own)
        assert wait_until(come, SECONDS), run.errors.read_text()
        processes += children(run.process.pid)
        run.process.kill()
        run.process.wait(timeout=SECONDS)


def stopped_raylet(run: Started) -> psutil.Process:
    """Stop the raylet as soon as there is one."""
    own = psutil.Process(run.process.pid)
    found: list[psutil.Process] = []

    def come() -> bool:
        found.extend(p for p in own.children() if named(p).startswith("raylet"))
        return bool(found)

    assert wait_until(come, SECONDS), run.errors.read_text()
    found[0].suspend()
    return found[0]


@pytest.mark.fault
def test_a_raylet_may_start_more_slowly_than_ray_expects(tiny_model, tmp_path):
    """Ray waits for 30 s by itself."""
    with started(tiny_model, tmp_path / "run") as run:
        raylet = stopped_raylet(run)
        time.sleep(35)
        raylet.resume()
        assert wait_until(lambda: run.steps() > 0, SECONDS), run.errors.read_text()
        run.process.terminate()
        assert run.process.wait(timeout=SECONDS) == 0, run.errors.read_text()


@pytest.mark.fault
def test_a_ray_that_does_not_start_is_an_error_that_says_why(tiny_model, tmp_path):
    with (
        nothing_is_left() as processes,
        started(tiny_model, tmp_path / "run", "runtime.start_deadline=5") as run,
    ):
        stopped_raylet(run)
        processes += children(run.process.pid)
        assert run.process.wait(timeout=SECONDS) == 2
        told = " ".join(run.errors.read_text().split())
        assert "Ray did not start within runtime.start_deadline = 5 s: this machine is" in told
        assert "Traceback" not in told
