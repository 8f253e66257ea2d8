"""What a reward function does to its process neither ends a run nor changes its result."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from build import config, newest_files, without_clock
from toy import Ones

from tba.assemble import open_run
from tba.prompt import Answer
from tba.replay.buffer import ReplayBuffer
from tba.runs.log import METRICS, read
from tba.runs.summary import Summary

REWARD = r"""
import locale, os, random, re, signal, sys, tempfile, threading, time, warnings

def dtype():
    import torch
    torch.set_default_dtype(torch.float64)

def stdout():
    print("a line")  # which would raise in the second call
    sys.stdout.close()
    sys.stderr.close()
    for number in (1, 2):
        try:
            os.close(number)
        except OSError:
            pass

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

def memory():
    [bytes(10**8) for _ in range(100)]

def interrupt():
    raise KeyboardInterrupt

FAULTS = {
    "": lambda: None,
    "default dtype": dtype,
    "closed stdout": stdout,
    "folder": folder,
    "signals": signals,
    "seeds": seeds,
    "daemon threads": threads,
    "interpreter": interpreter,
    "interpreter lock": lambda: re.match(r"(a+)+$", "a" * 40 + "b"),
    "hang": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
    "abort": os.abort,
    "memory": memory,
    "interrupt": interrupt,
    "system exit": sys.exit,
}

def score(completions, fault, **columns):
    FAULTS[fault[0]]()
    return [float("1" in c) for c in completions]
"""
PROCESS = "process"
HARMLESS = [
    (PROCESS, "default dtype"),
    (PROCESS, "closed stdout"),
    (PROCESS, "folder"),
    (PROCESS, "signals"),
    (PROCESS, "seeds"),
    (PROCESS, "daemon threads"),
    (PROCESS, "interpreter"),
    ("none", "seeds"),
]
COSTLY = [
    (PROCESS, "interpreter lock", "timeout"),
    (PROCESS, "hang", "timeout"),
    (PROCESS, "exit", "died"),
    (PROCESS, "abort", "died"),
    (PROCESS, "memory", "memory"),
    (PROCESS, "interrupt", "raised"),
    (PROCESS, "system exit", "raised"),
]


def carried_out(
    model: Path, folder: Path, faults: list[str], *settings: str
) -> tuple[Summary, ReplayBuffer]:
    """Carry out a run; its reward function does to its process what the row of a prompt says."""
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{i}+1=", "fault": fault} for i, fault in enumerate(faults)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ("task=custom", "task.held_out_size=1", f"task.reward={folder}/rewards.py:score")
    few = (f"task.data={folder}/rows.jsonl", "eval.prompts=0", "run.steps=2")
    with open_run(config(model, folder / "run", *task, *few, *settings)) as opened:
        return opened.train(), opened.buffer


def result(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the model after training, and the metrics."""
    rows = without_clock(read(folder / "run" / METRICS))
    return newest_files(folder / "run")["model/model.safetensors"], rows


@pytest.fixture(scope="module")
def sound(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, list[dict[str, Any]]]:
    """The result of a run whose reward function does nothing else."""
    folder = tmp_path_factory.mktemp("sound") / "own"
    carried_out(tiny_model, folder, [""] * 10, "reward.isolate=process")
    return result(folder)


def own_state() -> tuple[Any, ...]:
    """Return what belongs to this process."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGIO, signal.SIGCHLD)
    handlers = [signal.getsignal(number) for number in numbers]
    return Path.cwd(), torch.get_default_dtype(), handlers, sys.stdout, sys.getrecursionlimit()


@pytest.mark.parametrize(("isolate", "fault"), HARMLESS)
def test_what_a_reward_does_to_its_process_does_not_change_the_result(
    tiny_model: Path, tmp_path: Path, sound: Any, isolate: str, fault: str
) -> None:
    """Bit for bit."""
    before = own_state()
    chosen = f"reward.isolate={isolate}"
    summary, _ = carried_out(tiny_model, tmp_path / "own", [fault] * 10, chosen)
    assert (summary.finished, summary.rejected, summary.searcher_restarts) == (True, {}, 0)
    assert result(tmp_path / "own") == sound
    assert own_state() == before


@pytest.mark.parametrize(("isolate", "fault", "reason"), COSTLY)
def test_a_reward_that_fails_costs_the_samples_of_its_own_group(
    tiny_model: Path, tmp_path: Path, isolate: str, fault: str, reason: str
) -> None:
    """Every other sample has the right reward."""
    before, faults = own_state(), ["", "", fault, *[""] * 7]
    few = ("reward.deadline=0.3", "reward.max_memory=1", f"reward.isolate={isolate}")
    summary, buffer = carried_out(tiny_model, tmp_path / "own", faults, *few)
    assert (summary.finished, summary.steps, summary.searcher_restarts) == (True, 2, 0)
    assert summary.rejected.keys() == {reason} and summary.rejected[reason] in (4, 8)
    assert buffer.counts["added"] == summary.samples_generated - summary.rejected[reason] == 36
    characters = dict(enumerate("<>0123456789+="))
    for group in buffer.groups():
        assert group.prompt.columns["fault"] == ""
        for t in group.trajectories:
            text = "".join(characters[i] for i in t.tokens.tolist() if i > 1)
            (right,) = Ones().score(group.prompt, [Answer(text, t.finished)])
            assert t.reward == right
    assert own_state() == before
