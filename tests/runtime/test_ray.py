"""Searchers in processes of their own: killed, hung, and gone without a trace afterwards."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy
from build import (
    ENVIRONMENT,
    HOME,
    as_settings,
    children,
    conserved,
    nothing_is_left,
    wait_until,
)
from build import ray_config as config

import tba
from tba.runs.folder import METRICS, SUMMARY, read
from tba.runtime.deadline import bind_ray


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that searchers get, in order."""
    bind_ray(None)
    from tba.runtime.pool import SearcherHandle

    names: list[str] = []
    for kind in ("search", "evaluate"):
        method = getattr(SearcherHandle, kind)

        def noting(
            self: SearcherHandle, *given: Any, kind: str = kind, method: Any = method
        ) -> None:
            names.append(kind)
            method(self, *given)

        monkeypatch.setattr(SearcherHandle, kind, noting)
    return names


def is_short(limit: int) -> Callable[..., list[float]]:
    """Return a closure, which is sent to a searcher by its value."""
    return lambda completions, prompts: [float(len(c) <= limit) for c in completions]


def test_neither_side_waits_and_the_phases_are_told(
    tiny_model, tmp_path, sent, capsys, monkeypatch
):
    """A search takes far longer than a step: all that the trainer waits would not pay for one.

    The baseline, of two pieces, goes first. Only the user enters the folder of the private Ray,
    which has a session of its own. No file of the current folder hides a module of Python, and the
    module path may have entries that are no text, or no UTF-8. Rewards are a function that is sent
    by its name and one that is sent by its value, with their weights.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, f"{tmp_path}/\udcff"])
    for name in ("statistics", "types", "random", "queue", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('this is no module of Python')")
    search = 0.6
    slow = (
        "engine=scripted", f"engine.latency={search}", "engine.answers=['1','2','33']",
        "eval.every=0", "eval.prompts_per_task=2", "run.steps=60", "runtime.max_reuse=inf",
        "log.console=lines", "task=custom", "task.held_out_size=4",
        "task.reward_weights=[0.0, 3.0]",
    )  # fmt: skip
    chosen = config(tiny_model, tmp_path / "run", *slow)
    rows = [{"prompt": f"{i}+{i}="} for i in range(50)]
    with tba.open_run(chosen, data=rows, reward=[toy.lengths, is_short(100)]) as run:
        (session,) = HOME.glob(f"tba-*/ray/session_*_{os.getpid()}")
        folder = session.parent.parent
        assert folder.stat().st_mode & 0o777 == 0o700
        of_ray = [p for p in psutil.Process().children() if p.name() in ("raylet", "gcs_server")]
        assert os.getsid(0) not in map(os.getsid, [p.pid for p in of_ray]) and len(of_ray) == 2
        run.train()
    assert not folder.exists()
    assert sent[:3] == ["evaluate"] * 2 + ["search"]
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert summary["trainer_wait_fraction"] * summary["seconds"] < search
    assert summary["samples_trained"] == 60 * 12
    assert summary["eval/last"]["greedy_reward"] == 3.0 and not summary["rejected"]
    steps = [row for row in read(tmp_path / "run" / METRICS) if "loss" in row]
    assert {row["reward"] for row in steps} == {3.0}
    assert conserved(run.buffer)
    assert summary["searcher_wait_fraction"] < 0.25
    lines = capsys.readouterr().out.splitlines()
    expected = (
        "starting Ray", "loading the model", "starting the searchers, which load the model",
        "generating 0/", "training", "step 1/60  ",
    )  # fmt: skip
    places = [next(i for i, line in enumerate(lines) if line.startswith(e)) for e in expected]
    assert places == sorted(places)


def started(model: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start a run that would take hours, in a process group of its own."""
    settings = ("run.steps=1000000", "checkpoint.every=10", "task.size=20000")
    command = [sys.executable, "-m", "tba.cli", "train"]
    given = as_settings(config(model, folder, *settings))
    return subprocess.Popen([*command, *given], start_new_session=True, env=ENVIRONMENT)


@pytest.mark.fault
def test_an_interrupted_run_listens_on_loopback_and_leaves_nothing_behind(tiny_model, tmp_path):
    """Ctrl-C reaches every process of the group."""
    folder = tmp_path / "run"
    with nothing_is_left() as processes:
        process = started(tiny_model, folder)
        try:
            assert wait_until(lambda: len(read(folder / METRICS)) >= 3, 240)
            processes += children(process.pid)
            connections = []
            for each in [psutil.Process(process.pid), *processes]:
                connections += each.net_connections("inet")
            listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
            assert listening and listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=60)
        finally:
            process.kill()
            process.wait(timeout=10)
