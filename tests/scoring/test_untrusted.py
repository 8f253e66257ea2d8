"""What a reward function does to its process neither ends a run nor changes its result."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from build import config, newest_files, without_clock

from tba.open import run
from tba.runs.folder import METRICS, read
from tba.runs.summary import Summary

REWARD = r"""
import locale, os, random, re, signal, sys, tempfile, threading, time, warnings

def dtype():
    import torch
    torch.set_default_dtype(torch.float64)

def folder():
    os.chdir(tempfile.gettempdir())

def signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGIO, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))

def seeds():
    import numpy
    random.seed(0)
    numpy.random.seed(0)

def threads():
    for _ in range(5):
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()

def interpreter():
    os.environ.clear()
    sys.path.clear()
    sys.setrecursionlimit(200)
    locale.setlocale(locale.LC_ALL, "C")
    warnings.simplefilter("error")
    threading.settrace(lambda *_: None)

FAULTS = {
    "default dtype": dtype,
    "folder": folder,
    "signals": signals,
    "seeds": seeds,
    "daemon threads": threads,
    "interpreter": interpreter,
}

def score(completions, fault, **columns):
    for one in fault[0]:
        FAULTS[one]()
    return [float("1" in c) for c in completions]
"""
FAULTS = [line.split('"')[1] for line in REWARD.splitlines() if line.startswith('    "')]


def carried_out(model: Path, folder: Path, faults: list[str], isolate: str) -> Summary:
    """Carry out a run whose reward function does all this to its process in each call."""
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{i}+1=", "fault": faults} for i in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ("task=custom", "task.held_out_size=1", f"task.reward={folder}/rewards.py:score")
    few = (f"task.data={folder}/rows.jsonl", "eval.prompts=0", "run.steps=2")
    return run(config(model, folder / "run", *task, *few, f"reward.isolate={isolate}"))


def result(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the model after training, and the metrics."""
    rows = without_clock(read(folder / "run" / METRICS))
    return newest_files(folder / "run")["model/model.safetensors"], rows


def own_state() -> tuple[Any, ...]:
    """Return what belongs to this process."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGIO, signal.SIGCHLD)
    handlers = [signal.getsignal(number) for number in numbers]
    return Path.cwd(), torch.get_default_dtype(), handlers, sys.stdout, sys.getrecursionlimit()


def test_what_a_reward_does_to_its_process_does_not_change_the_result(tiny_model, tmp_path):
    """Bit for bit; test_isolation.py has what costs a group its rewards."""
    before = own_state()
    cases = {"sound": ([], "process"), "all": (FAULTS, "process"), "seeds": (["seeds"], "none")}
    for name, (faults, isolate) in cases.items():
        summary = carried_out(tiny_model, tmp_path / name, faults, isolate)
        assert (summary.finished, summary.rejected, summary.searcher_restarts) == (True, {}, 0)
        assert result(tmp_path / name) == result(tmp_path / "sound"), name
        assert own_state() == before
