"""Processes of a run on Ray that are killed: the run goes on or saves, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from build import ENVIRONMENT, HOME, WATCHER, as_settings, children, goes_on, steps
from build import ray_config as config
from suite import Case, alive, cases, command_of, until

from tba.runs.folder import CHECKPOINTS
from tba.runs.generations import damage, generations

MEMORY = Path("/dev/shm")
TRAIN = """
import sys
from tba.cli import main
from tba.runtime.deadline import Calls

def lose(calls, reason, lose=Calls.lose):
    print("NOTICED:", reason, file=sys.stderr, flush=True)
    lose(calls, reason)

Calls.lose = lose
main()
"""
"""`tba`, which says at once that Ray is lost: the run itself saves and cleans up first."""


def named(*words: str) -> Callable[[Sequence[str]], bool]:
    return lambda command: any(word in part for part in command for word in words)


VICTIMS: dict[str, Callable[[Sequence[str]], bool]] = {
    "driver": lambda command: False,  # found by its number
    "raylet": lambda command: command[0].endswith("/raylet"),
    "GCS": lambda command: command[0].endswith("gcs_server"),
    "agent": named("agent.py", "runtime_env/agent/main.py"),
    "searcher": named("ray::SearcherActor"),
    "watcher": named(WATCHER),
}
NOTICED = {
    "raylet": "NOTICED: its raylet",
    "GCS": "NOTICED: its gcs_server",
    "searcher": "its tasks are issued again",
}
"""What a run says when it has noticed that one of them is gone."""


@dataclass
class Started:
    """A run in a process of its own, and what it uses: processes, files in memory, a session."""

    process: subprocess.Popen[bytes]
    folder: Path
    errors: Path
    processes: set[psutil.Process] = field(default_factory=set)
    memory: set[Path] = field(default_factory=set)

    def told(self) -> str:
        return self.errors.read_text(errors="replace")

    def ended(self) -> bool:
        return self.process.poll() is not None

    def look(self) -> None:
        """Find the processes of the run, and the files that they share in memory."""
        with suppress(psutil.NoSuchProcess):
            self.processes |= {psutil.Process(self.process.pid), *children(self.process.pid)}
        self.memory |= files_in_memory(self.processes)

    def left(self) -> list[psutil.Process | Path]:
        """Return what is left of the run."""
        memory = [path for path in self.memory if path.exists()]
        sessions = HOME.glob(f"tba-*/ray/session_*_{self.process.pid}")
        return [*alive([*self.processes]), *memory, *sessions]

    def victim(self, name: str) -> list[psutil.Process]:
        """Return the process of this name, or none if it has not started."""
        if name == "driver":
            return [psutil.Process(self.process.pid)]
        commands = [(p, command_of(p)) for p in alive(children(self.process.pid))]
        return [p for p, command in commands if command and VICTIMS[name](command)][:1]


def files_in_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of /dev/shm that a process has mapped.

    They are compared by their inodes, because a semaphore is mapped before it gets its name.
    """
    mapped = set()
    for process in processes:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if str(MEMORY) in line}
    return {Path(entry.path) for entry in os.scandir(MEMORY) if entry.inode() in mapped}


@contextmanager
def started(folder: Path, given: Sequence[str]) -> Iterator[Started]:
    command, errors = [sys.executable, "-c", TRAIN, "train", *given], folder.parent / "errors"
    with errors.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=ENVIRONMENT)
    try:
        yield Started(process, folder, errors)
    finally:
        process.kill()
        process.wait(60)


def kill(case: Case, run: Started, name: str) -> None:
    """Kill a process of the run, and record how long the run takes to notice."""
    until(lambda: len(run.victim(name)) > 0, 10)
    run.victim(name)[0].send_signal(signal.SIGKILL)
    if name in NOTICED:
        seconds = until(lambda: NOTICED[name] in run.told() or run.ended(), 30)
        assert NOTICED[name] in run.told(), run.told()[-2000:]
        assert case.noticed(seconds) < 5


def goes_on_or_ends(run: Started, name: str) -> None:
    """Wait until a run has ended, or else stop it after many more steps."""
    if name not in ("driver", "raylet", "GCS"):
        at = len(steps(run.folder))
        until(lambda: run.ended() or len(steps(run.folder)) > at + 200, 60)
        run.look()
        run.process.terminate()
    run.process.wait(60)


def leaves_nothing_and_goes_on(
    case: Case, name: str, model: Path, folder: Path, *settings: str
) -> None:
    """Kill a process of a run at a random moment.

    A run that ends by itself has saved its last step and prints how to resume it. The others are
    stopped. After ten seconds, there is no process, shared memory or session folder of the run.
    """
    common = ("run.steps=1000000", "checkpoint.every=10", "task.size=20000", "runtime.fresh=1")
    chosen = config(model, folder, *common, *settings)
    with started(folder, as_settings(chosen)) as run:
        until(lambda: len(steps(folder)) >= 12 or run.ended(), 300)
        assert not run.ended(), run.told()[-2000:]
        run.look()
        time.sleep(float(case.rng.uniform(0, 2)))
        run.look()
        kill(case, run, name)
        goes_on_or_ends(run, name)
    deadline = time.monotonic() + 10
    sound, told = generations(folder / CHECKPOINTS)[-1], run.told()
    assert damage(sound) == {}
    if name != "driver" and run.process.returncode != 0:
        assert f"--resume {folder}" in told, told[-2000:]
    if name != "driver":
        last = steps(folder)[-1]  # or the step after it, which ended while it was lost
        assert int(sound.name.rpartition("-")[2]) in (last, last + 1), told[-2000:]
    while run.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert case.left(len(run.left())) == 0, run.left()
    goes_on(folder)


@pytest.mark.timeout(600)
@cases(11, full=50, part=10)
def test_whatever_is_killed_leaves_nothing_behind_and_goes_on(case, tiny_model, tmp_path):
    """Driver, raylet, GCS, an agent, a searcher or the watcher."""
    name = list(VICTIMS)[case.index % len(VICTIMS)]
    slow = ("engine=scripted", "engine.answers=['1','2','33']", "engine.latency=0.05")
    own = (*slow, "engine.own_reference=true")
    leaves_nothing_and_goes_on(case, name, tiny_model, tmp_path / "run", *own)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
@pytest.mark.timeout(900)
@cases(11, full=3, part=1)
def test_whatever_is_killed_with_vllm_leaves_nothing_behind_and_goes_on(case, wide_model, tmp_path):
    name = ("searcher", "driver", "raylet")[case.index]
    own = ("engine=vllm", "engine.kv_cache_gib=0.1")
    leaves_nothing_and_goes_on(case, name, wide_model, tmp_path / "run", *own)


@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("after", [0.0, 0.5, 2.0])
def test_a_stop_while_ray_starts_ends_the_run_and_leaves_nothing(after, tiny_model, tmp_path):
    """The run ends without Python's last collection, which takes longer than everything else."""
    chosen = config(tiny_model, tmp_path / "run", "run.steps=1000000")
    with started(tmp_path / "run", as_settings(chosen)) as run:
        watchers = named(WATCHER)
        until(lambda: any(map(watchers, map(command_of, children(run.process.pid)))), 300)
        time.sleep(after)
        run.look()
        run.process.terminate()
        run.process.wait(30)
        assert run.process.returncode == 130
        assert "stopped before the first step" in run.told()
    until(lambda: not run.left(), 2)


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_a_searcher_that_ray_ends_because_memory_is_full_is_told(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "RAY_memory_usage_threshold", "0.01")
    monkeypatch.setitem(ENVIRONMENT, "RAY_memory_monitor_refresh_ms", "100")
    chosen = config(tiny_model, tmp_path / "run", "runtime.max_restarts=0", "run.steps=1000000")
    with started(tmp_path / "run", as_settings(chosen)) as run:
        run.process.wait(300)
        assert "a searcher died (Ray ended it, because this machine's memory is full)" in run.told()
