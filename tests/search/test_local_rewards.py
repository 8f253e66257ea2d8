"""Rewards that misbehave do not end a local run in the default setting, a process of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from build import config

import tba
from tba.assemble import run
from tba.child import Child
from tba.cli import _config
from tba.config.schema import Config
from tba.engines import EngineError
from tba.runs.checkpoint import newest
from tba.search import scoring

REWARD = r"""
import json, os, re, signal, socket, sys, threading, time
from pathlib import Path

def closed(completions):
    sys.stdout.close()
    os.close(1)
    os.close(2)
    return [0.0] * len(completions)

def forked(completions):
    if os.fork() == 0:
        return [5.0] * len(completions)  # two processes answer from now on
    return [0.0] * len(completions)

def garbage(completions):
    for end in range(3, 64):
        try:
            socket.socket(fileno=os.dup(end)).send(b"[1, 2]\n5\n\xff\n")
        except OSError:
            pass
    return [0.0] * len(completions)

def interrupted(completions):
    raise KeyboardInterrupt

def threads(completions):
    for _ in range(100):
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
    return [0.0] * len(completions)

FAULTS = {
    "interpreter lock": lambda completions: re.match(r"(a+)+$", "a" * 40 + "b"),
    "hang": lambda completions: time.sleep(60),
    "stop": lambda completions: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda completions: os._exit(3),
    "system exit": lambda completions: sys.exit(3),
    "abort": lambda completions: os.abort(),
    "closed": closed,
    "forked": forked,
    "garbage": garbage,
    "interrupt": interrupted,
    "threads": threads,
    "dict": lambda completions: dict.fromkeys(range(len(completions)), 1.0),
    "huge": lambda completions: [1e308] * len(completions),
    "deep": lambda completions: json.loads("[" * 10**6),
}

def score(completions, fault, **columns):
    once = Path(__file__).with_name("once-" + fault[0])
    if fault[0] and not once.exists():
        once.touch()
        return FAULTS[fault[0]](completions)
    return [float("1" in c) for c in completions]
"""
KINDS = [line.split('"')[1] for line in REWARD.splitlines() if line.startswith('    "')]
QUICK = ["exit", "garbage", "interrupt", "closed", "dict", "huge"]


def misbehaving(model: Path, folder: Path, kinds: list[str], *settings: str) -> Config:
    """A run of which one prompt for each kind meets a fault, once."""
    (folder / "rewards.py").write_text(REWARD)
    faults = [*kinds, *[""] * (28 - len(kinds))]
    data = [{"prompt": f"{i}+1=", "fault": fault} for i, fault in enumerate(faults)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    return config(
        model, folder / "run", "task=custom", f"task.data={folder}/rows.jsonl",
        f"task.reward={folder}/rewards.py:score", "task.held_out_size=1", "eval.prompts=0",
        "reward.isolate=process", "reward.deadline=0.5", "reward.max_rejected=1.0", *settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kinds", [QUICK, pytest.param(KINDS, marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_a_local_run_goes_on_whatever_its_reward_does(
    tiny_model: Path, tmp_path: Path, kinds: list[str]
) -> None:
    """Each of the faults costs samples of its own group, or of those beside it, and no restart."""
    threads = set(threading.enumerate())
    summary = tba.train(misbehaving(tiny_model, tmp_path, kinds, "run.steps=9")).summary
    met = {path.name.removeprefix("once-") for path in tmp_path.glob("once-*")}
    assert met == set(kinds)
    assert (summary.finished, summary.steps, summary.searcher_restarts) == (True, 9, 0)
    assert {"died", "not_finite"} <= summary.rejected.keys()
    assert "timeout" in summary.rejected or "hang" not in kinds
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


def failing(numbers: Callable[[int], bool]) -> Callable[..., Child]:
    """Return what starts processes, but finds no room for the processes of these numbers."""
    numbered = count()

    def start(*arguments: Any, **options: Any) -> Child:
        if numbers(next(numbered)):
            raise OSError("Resource temporarily unavailable")
        return Child(*arguments, **options)

    return start


def test_a_scoring_process_that_cannot_be_replaced_costs_a_restart_of_the_searcher(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "Child", failing(lambda number: number == 1))
    summary = tba.train(misbehaving(tiny_model, tmp_path, ["exit"], "run.steps=9")).summary
    assert (tmp_path / "once-exit").exists()
    assert (summary.finished, summary.searcher_restarts) == (True, 1)


def test_a_run_whose_searcher_cannot_be_restarted_is_saved(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = misbehaving(tiny_model, tmp_path, ["exit"], "run.steps=9")
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "Child", failing(lambda number: number > 0))
        with pytest.raises(EngineError, match=r"a new searcher cannot start: (.|\n)*unavailable"):
            run(chosen)
    folder = tmp_path / "run"
    assert newest(folder / "checkpoints")
    assert run(_config([], folder), folder).finished
