"""Processes of a run on Ray that are killed: the run goes on or saves, and nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from suite import Case, alive, cases, until
from test_loop import ENVIRONMENT, as_settings
from test_ray import children, config, conserved, run_and_keep, shared_memory

from tba.cli import _config
from tba.runs.generations import damage, generations
from tba.runs.log import CHECKPOINTS, METRICS, read

SESSIONS = Path("/tmp/ray")


def named(*words: str) -> Callable[[Sequence[str]], bool]:
    return lambda command: any(word in part for part in command for word in words)


VICTIMS: dict[str, Callable[[Sequence[str]], bool]] = {
    "driver": lambda command: False,  # found by its number
    "raylet": lambda command: command[0].endswith("/raylet"),
    "GCS": lambda command: command[0].endswith("gcs_server"),
    "agent": named("agent.py", "runtime_env/agent/main.py"),
    "searcher": named("ray::SearcherActor"),
    "watcher": named("reaper.py"),
}


def victim(driver: int, name: str) -> psutil.Process:
    if name == "driver":
        return psutil.Process(driver)
    processes = [p for p in children(driver) if p.status() != psutil.STATUS_ZOMBIE]
    return next(p for p in processes if p.cmdline() and VICTIMS[name](p.cmdline()))


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read(folder / METRICS) if "loss" in row]


def leaves_nothing_and_goes_on(
    case: Case, name: str, model: Path, folder: Path, *settings: str
) -> None:
    """Kill a process of a run at a random moment.

    A run that ends by itself has saved its last step and prints how to resume it. The others are
    stopped. After ten seconds, there is no process, shared memory or session folder of the run.
    """
    memory, processes = shared_memory(), set[psutil.Process]()
    common = ("run.steps=1000000", "checkpoint.every=10", "task.size=20000", "runtime.fresh=1")
    chosen = config(model, folder, *common, *settings)
    command = [sys.executable, "-m", "tba.cli", "train", *as_settings(chosen)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stderr=pipe, text=True, env=ENVIRONMENT) as run:
        try:
            until(lambda: len(steps(folder)) >= 12 or run.poll() is not None, 300)
            processes |= {psutil.Process(run.pid), *children(run.pid)}
            time.sleep(float(case.rng.uniform(0, 2)))
            processes |= {*children(run.pid)}
            victim(run.pid, name).send_signal(signal.SIGKILL)
            began = time.monotonic()
            ends = name in ("driver", "raylet", "GCS")
            if ends:
                run.wait(60)
                case.noticed(time.monotonic() - began)
            else:
                at = len(steps(folder))
                until(lambda: run.poll() is not None or len(steps(folder)) > at + 200, 60)
                if run.poll() is None:
                    processes |= {*children(run.pid)}
                    run.terminate()
                    run.wait(60)
        finally:
            run.kill()
        assert run.stderr is not None
        told = run.stderr.read()
    deadline = time.monotonic() + 10
    sound = generations(folder / CHECKPOINTS)[-1]
    assert damage(sound) == {}
    if name != "driver" and run.returncode != 0:
        assert f"--resume {folder}" in told, told[-2000:]
    if name != "driver":
        last = steps(folder)[-1]  # or the step after it, which ended while it was lost
        assert int(sound.name.rpartition("-")[2]) in (last, last + 1), told[-2000:]
    try:
        until(lambda: not alive([*processes]), max(0.1, deadline - time.monotonic()), every=0.1)
        until(lambda: not [*SESSIONS.glob(f"session_*_{run.pid}")], 1.0)
        assert shared_memory() <= memory
    except AssertionError:
        case.leftovers = len(alive([*processes]))
        raise
    goes_on(folder)


@pytest.mark.timeout(600)
@cases(11, full=50, part=10)
def test_whatever_is_killed_leaves_nothing_behind_and_goes_on(
    case: Case, tiny_model: Path, tmp_path: Path
) -> None:
    """Driver, raylet, GCS, an agent, a searcher or the watcher."""
    name = list(VICTIMS)[case.index % len(VICTIMS)]
    slow = ("engine=scripted", "engine.answers=['1','2','33']", "engine.latency=0.05")
    own = (*slow, "engine.own_reference=true")
    leaves_nothing_and_goes_on(case, name, tiny_model, tmp_path / "run", *own)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
@pytest.mark.timeout(900)
@cases(11, full=3, part=1)
def test_whatever_is_killed_with_vllm_leaves_nothing_behind_and_goes_on(
    case: Case, wide_model: Path, tmp_path: Path
) -> None:
    name = ("searcher", "driver", "raylet")[case.index]
    own = ("engine=vllm", "engine.kv_cache_gib=0.1")
    leaves_nothing_and_goes_on(case, name, wide_model, tmp_path / "run", *own)


def goes_on(folder: Path, *settings: str) -> None:
    """Ten steps more: every prompt was answered once, or is out."""
    newest = generations(folder / CHECKPOINTS)[-1]
    step = json.loads((newest / "state.json").read_text())["progress"]["step"]
    alone = ("runtime.use=local", "runtime.searchers=1")
    run = run_and_keep(_config([f"run.steps={step + 10}", *alone, *settings], folder), folder)
    assert conserved(run.buffer)
    cursor = run.searchers.state().cursor
    held = {g.prompt.id for g in run.buffer.groups()}
    assert len(held) + len(cursor["outstanding"]) == cursor["state"]["chosen"]
    assert run.searchers.stats.samples == 4 * len(held)
    rows = steps(folder)
    assert rows == sorted(set(rows)) and {*range(1, step + 11)} - {*rows} <= {step}
    assert (folder / "summary.json").exists()
