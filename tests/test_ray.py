"""Searchers in processes of their own: killed, hung, and gone without a trace afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from test_loop import ENVIRONMENT, as_settings

import tba.run
from tba.cli import _config
from tba.config.loading import load
from tba.config.schema import Config
from tba.replay.buffer import ReplayBuffer
from tba.run import Run, open_run
from tba.runs import checkpoint
from tba.runs.log import METRICS, SUMMARY, read
from tba.runtime.bind import bind_ray
from tba.runtime.placement import Place, divide


def config(model: Path, folder: Path, *settings: str) -> Config:
    return load(
        None,
        [
            f"policy.model={model}", f"run.folder={folder}", "run.steps=40", "runtime.use=ray", "sampling.max_tokens=5", "sampling.samples=4",
            "trainer.batch_size=12", "trainer.group_size=4", "task=toy.Ones", "eval.prompts=4", "eval.every=15", "eval.samples=1", "eval.k=[]",
            "runtime.prompts_per_task=3", "runtime.publish_every=2", "log.console=off", "log.tensorboard=false", *settings,
        ],
    )  # fmt: skip


def run_and_keep(
    config: Config, resume: Path | None = None, meanwhile: Callable[[Run], None] | None = None
) -> Run:
    """Carry out a run and return it, closed; `meanwhile` runs in a thread beside it."""
    with open_run(config, resume) as run:
        thread = threading.Thread(target=meanwhile, args=(run,), daemon=True) if meanwhile else None
        if thread is not None:
            thread.start()
        run.train()
        if thread is not None:
            thread.join(timeout=60)
    return run


def conserved(buffer: ReplayBuffer) -> bool:
    c = buffer.counts
    lost = c["evicted_per_prompt"] + c["evicted_capacity"] + c["evicted_reference"]
    return c["added"] == len(buffer) + c["duplicates"] + lost


def shared_memory() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir()}


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    return true()


def test_neither_side_waits(tiny_model: Path, tmp_path: Path) -> None:
    """Search takes far longer than a step, and the trainer goes on learning: all its waiting would not pay for one search. Evaluations stop nobody."""
    search = 0.6
    slow = (
        "engine=scripted",
        f"engine.latency={search}",
        "engine.answers=['1','2','33']",
        "run.steps=60",
    )
    run = run_and_keep(config(tiny_model, tmp_path / "run", *slow))
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert summary["trainer_wait_fraction"] * summary["seconds"] < search
    assert summary["samples_trained"] == 60 * 12
    assert conserved(run.buffer)
    assert summary["searcher_wait_fraction"] < 0.25


def test_weights_reach_the_searchers(tiny_model: Path, tmp_path: Path) -> None:
    """Versions travel on the data, lag is what was consumed, and after a sync both sides compute the same log-probs."""
    run_and_keep(config(tiny_model, tmp_path / "run", "run.steps=120", "strategy=recent"))
    rows = [r for r in read(tmp_path / "run" / METRICS) if "loss" in r]
    assert rows[-1]["off_policy/lag_mean"] < 60
    gaps = [r["sync/logp_gap"] for r in rows if r["sync/logp_gap"] is not None]
    assert gaps
    assert max(gaps) < 1e-4
    versions = [r["step"] for r in read(tmp_path / "run" / METRICS) if "eval/greedy_pass@1" in r]
    assert versions[0] == 0
    assert versions[-1] == 120


def test_search_and_learning_take_turns(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lag = 0 on two searchers: all is on policy, both have work, none too much, a reset reference arrives in its turn, and so do values."""
    bind_ray(None)
    from tba.runtime.ray import RaySearchers

    given: Counter[int] = Counter()
    give = RaySearchers._give
    monkeypatch.setattr(
        RaySearchers,
        "_give",
        lambda self, handle, task: (
            given.update({id(handle): len(task.prompts)}),
            give(self, handle, task),
        )[1],
    )
    settings = (
        "runtime.lag=0",
        "runtime.publish_every=1",
        "runtime.searchers=2",
        "runtime.cores=share",
        "strategy=recent",
        "run.steps=8",
    )
    changing = (
        "policy.reset_reference_every=3",
        "trainer.learning_rate=1e-2",
        "objective=vineppo",
        "objective.step_tokens=1",
        "objective.rollouts=2",
    )
    ended = run_and_keep(config(tiny_model, tmp_path / "run", *settings, *changing))
    rows = [r for r in read(tmp_path / "run" / METRICS) if "kl" in r]
    assert [r["off_policy/lag_max"] for r in rows] == [0] * 8
    assert [r["samples_generated"] for r in rows] == [12 * (step + 1) for step in range(1, 9)]
    assert [abs(r["kl"]) < 1e-4 for r in rows] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    stored = [t for g in ended.buffer.groups() for t in g.trajectories]
    assert (
        sum(given.values()) == 27 and min(given.values()) >= 7
    )  # three a turn: two for one of them, one for the other
    assert all(
        t.value is not None and np.isfinite(t.value).all() and len(t.value) == len(t.tokens)
        for t in stored
    )


def test_a_stop_while_the_trainer_waits_costs_neither_data_nor_result(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Taking turns: stopped while a batch is found, no batch is learned from twice. Stopped during the last evaluation, the run is not finished."""
    slow = (
        "engine=scripted",
        "engine.latency=0.5",
        "engine.answers=['1','2','33']",
        "eval.every=0",
    )
    turns = ("runtime.lag=0", "runtime.publish_every=1", "strategy=recent", "run.steps=5")
    folder = tmp_path / "run"

    def stop_after(step: int) -> Callable[[Run], None]:
        def stop(_: Run) -> None:
            assert wait_until(
                lambda: any(r["step"] == step and "loss" in r for r in read(folder / METRICS)), 60
            )
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)

        return stop

    for steps, finished in ((2, False), (5, False), (None, True)):
        resume = folder if (folder / "config.json").exists() else None
        told = config(tiny_model, folder, *slow, *turns) if resume is None else _config([], resume)
        run_and_keep(told, resume, stop_after(steps) if steps else None)
        summary = json.loads((folder / SUMMARY).read_text())
        assert summary["finished"] == finished, steps
    rows = [r for r in read(folder / METRICS) if "loss" in r]
    assert [(r["step"], r["off_policy/lag_max"]) for r in rows] == [
        (step, 0) for step in range(1, 6)
    ]
    assert summary["eval/last"]["step"] == 5
    assert summary["samples_generated"] == 6 * 12


def test_a_killed_searcher_costs_its_work_in_flight(tiny_model: Path, tmp_path: Path) -> None:
    """kill -9 while it generates: replaced, its prompts issued again, nothing twice, and the run completes."""
    settings = (
        "engine=scripted",
        "engine.latency=0.2",
        "engine.answers=['1','2','3','4','5','6']",
        "run.steps=400",
        "task.size=3000",
        "eval.every=0",
    )

    def kill(run: Run) -> None:
        time.sleep(2.0)
        os.kill(run.searchers.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]

    run = run_and_keep(config(tiny_model, tmp_path / "run", *settings), meanwhile=kill)
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert (summary["finished"], summary["searcher_restarts"]) == (True, 1)
    assert conserved(run.buffer)
    # every prompt that was gathered is there once with all four samples; those in flight were at most two tasks of three
    columns = run.buffer.columns()
    assert all(columns.count[columns.rows(p)].sum() == 4 for p in columns.prompts)
    assert run.buffer.counts["added"] == 4 * run.buffer.prompts
    cursor = run.searchers.state().cursor
    assert cursor["state"]["chosen"] == run.buffer.prompts + len(cursor["outstanding"])
    assert len({*cursor["outstanding"]} & {g.prompt.id for g in run.buffer.groups()}) == 0


def test_a_hung_searcher_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    """Ray does not report a hang; its deadline does. Its late result is never accepted."""
    settings = (
        "engine=scripted",
        "engine.latency=0.1",
        "run.steps=80",
        "runtime.task_deadline=2.0",
        "eval.prompts=0",
        "task.size=3000",
    )

    def stop(run: Run) -> None:
        time.sleep(2.0)
        os.kill(run.searchers.pids[0], signal.SIGSTOP)  # type: ignore[attr-defined]

    started = time.monotonic()
    config_ = config(tiny_model, tmp_path / "run", *settings, "runtime.fresh=1")
    run = run_and_keep(config_, meanwhile=stop)
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert summary["searcher_restarts"] == 1
    assert conserved(run.buffer)
    assert run.buffer.counts["added"] == 4 * run.buffer.prompts
    assert time.monotonic() - started < 120


def test_a_searcher_that_cannot_start_ends_the_run_with_its_reason(
    tiny_model: Path, tmp_path: Path
) -> None:
    broken = config(tiny_model, tmp_path / "run", "engine=scripted", "engine.answers=[]")
    with pytest.raises(RuntimeError, match=r"engine\.answers is empty"):
        tba.run.run(broken)


@pytest.mark.parametrize("how", ["finished", "interrupted", "killed"])
def test_nothing_is_left_behind(tiny_model: Path, tmp_path: Path, how: str) -> None:
    """No process, port or shared memory of ours ten seconds after any exit; and all ports are on loopback."""
    folder = tmp_path / "run"
    steps = 5 if how == "finished" else 1_000_000
    settings = as_settings(config(tiny_model, folder, f"run.steps={steps}", "checkpoint.every=5"))
    before = shared_memory()
    process = subprocess.Popen(
        [sys.executable, "-m", "tba.cli", "train", *settings],
        start_new_session=True,
        env=ENVIRONMENT,
    )
    assert wait_until(lambda: len(read(folder / METRICS)) >= 3, 90)
    children = psutil.Process(process.pid).children(recursive=True)
    if how != "finished":
        listening = [
            c
            for p in [psutil.Process(process.pid), *children]
            for c in p.net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        if how == "killed":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches every process of the group
    process.wait(timeout=60)
    assert wait_until(
        lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children), 10
    ), [c for c in children if c.is_running()]
    assert shared_memory() <= before


def test_a_killed_run_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    """kill -9 of everything; --resume continues with step, buffer and cursor, and no prompt is lost."""
    folder = tmp_path / "run"
    settings = as_settings(
        config(tiny_model, folder, "run.steps=1000000", "checkpoint.every=10", "task.size=5000")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tba.cli", "train", *settings], env=ENVIRONMENT
    )
    assert wait_until(lambda: len(checkpoint.generations(folder / "checkpoints")) >= 2, 90)
    process.kill()
    process.wait(timeout=10)
    step = json.loads((checkpoint.newest(folder / "checkpoints") / "state.json").read_text())[
        "progress"
    ]["step"]
    run = run_and_keep(_config([f"run.steps={step + 10}"], folder), resume=folder)
    assert conserved(run.buffer)
    cursor = run.searchers.state().cursor
    held = {g.prompt.id for g in run.buffer.groups()}
    assert len(held) + len(cursor["outstanding"]) == cursor["state"]["chosen"]
    rows = [r["step"] for r in read(folder / METRICS) if "loss" in r]
    assert rows == list(range(1, step + 11))


@pytest.mark.parametrize(
    ("cores", "gpus", "searchers", "trainer", "places"),
    [
        (2, 0, 1, Place("cpu", (0,)), [Place("cpu", (1,))]),
        (0, 0, 2, Place("cpu"), [Place("cpu")] * 2),
        (2, 0, 3, Place("cpu", (0,)), [Place("cpu", (1,))] * 3),
        (8, 0, 2, Place("cpu", (0, 1, 2, 3)), [Place("cpu", (4, 5)), Place("cpu", (6, 7))]),
        (1, 0, 1, Place("cpu", (0,)), [Place("cpu", (0,))]),
        (8, 0, 6, Place("cpu", (0, 1)), [Place("cpu", (core,)) for core in range(2, 8)]),
        (4, 1, 1, Place("cuda:0", (0, 1)), [Place("cuda:0", (2, 3))]),
        (
            8,
            4,
            3,
            Place("cuda:0", (0, 1, 2, 3)),
            [Place("cuda:1", (4,)), Place("cuda:2", (5,)), Place("cuda:3", (6,))],
        ),
    ],
)
def test_cores_and_devices_are_divided(
    cores: int, gpus: int, searchers: int, trainer: Place, places: list[Place]
) -> None:
    assert divide(list(range(cores)), gpus, searchers) == (trainer, places)
