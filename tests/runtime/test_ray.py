"""Searchers in processes of their own: killed, hung, and gone without a trace afterwards."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from build import (
    ENVIRONMENT,
    HOME,
    as_settings,
    children,
    conserved,
    nothing_is_left,
    run_and_keep,
    wait_until,
)
from build import ray_config as config

from tba.open import open_run
from tba.prompt import Prompt
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


def test_neither_side_waits_and_the_phases_are_told(
    tiny_model, tmp_path, sent, capsys, monkeypatch
):
    """A search takes far longer than a step: all that the trainer waits would not pay for one.

    The baseline, of two pieces, goes first. Only the user enters the folder of the private Ray,
    which has a session of its own. No file of the current folder hides a module of Python, and the
    module path may have entries that are no text, or no UTF-8.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, f"{tmp_path}/\udcff"])
    for name in ("statistics", "types", "random", "queue", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('this is no module of Python')")
    search = 0.6
    slow = (
        "engine=scripted", f"engine.latency={search}", "engine.answers=['1','2','33']",
        "eval.every=0", "eval.prompts_per_task=2", "run.steps=60", "runtime.max_reuse=inf",
        "log.console=lines",
    )  # fmt: skip
    with open_run(config(tiny_model, tmp_path / "run", *slow)) as run:
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
    assert conserved(run.buffer)
    assert summary["searcher_wait_fraction"] < 0.25
    lines = capsys.readouterr().out.splitlines()
    expected = (
        "starting Ray", "loading the model", "starting the searchers, which load the model",
        "generating 0/", "training", "step 1/60  ",
    )  # fmt: skip
    places = [next(i for i, line in enumerate(lines) if line.startswith(e)) for e in expected]
    assert places == sorted(places)


def test_search_and_learning_take_turns(tiny_model, tmp_path, monkeypatch):
    """lag = 0 on two searchers: all is on policy, both have work, and none has too much.

    A new reference arrives in its turn, and so do values.
    """
    bind_ray(None)
    from tba.runtime.pool import SearcherHandle

    given: Counter[int] = Counter()
    search = SearcherHandle.search

    def counting(self: SearcherHandle, prompts: list[Prompt], *rest: Any) -> None:
        given[id(self)] += len(prompts)
        search(self, prompts, *rest)

    monkeypatch.setattr(SearcherHandle, "search", counting)
    settings = (
        "runtime.lag=0", "runtime.publish_every=1", "runtime.searchers=2", "runtime.cores=share",
        "strategy=recent", "run.steps=8",
    )  # fmt: skip
    changing = (
        "policy.reset_reference_every=3", "trainer.learning_rate=1e-2", "objective=vineppo",
        "objective.step_tokens=1", "objective.rollouts=2",
    )  # fmt: skip
    ended = run_and_keep(config(tiny_model, tmp_path / "run", *settings, *changing))
    rows = [r for r in read(tmp_path / "run" / METRICS) if "kl" in r]
    assert [r["off_policy/lag_max"] for r in rows] == [0] * 8
    assert [r["samples_generated"] for r in rows] == [12 * (step + 1) for step in range(1, 9)]
    on_reference = [step for step, r in enumerate(rows) if abs(r["log_ratio"]) < 1e-4]
    assert on_reference == [0, 3, 6]
    # three prompts a turn: two for one of them, one for the other
    assert sum(given.values()) == 27 and min(given.values()) >= 7
    for trajectory in (t for g in ended.buffer.groups() for t in g.trajectories):
        assert trajectory.value is not None and np.isfinite(trajectory.value).all()
        assert len(trajectory.value) == len(trajectory.tokens)


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
