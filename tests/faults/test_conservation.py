"""Searchers that are killed and stopped at random moments: no trajectory is lost or doubled."""

import os
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from build import children, conserved, run_and_keep, wait_until
from build import ray_config as config
from suite import Case, alive, cases, command_of, until

from tba.cli import _config
from tba.run import Run

ANSWERS = 4


def searchers() -> list[psutil.Process]:
    """Return the processes of searchers that have started."""
    started = []
    for process in children():
        title = " ".join(command_of(process))
        if title.startswith("ray::SearcherActor") and "__init__" not in title:
            started.append(process)
    return started


def restarts_of(run: Run) -> int:
    return run.searchers.stats.counts["searchers/restarts"]


def ended_by(
    run: Run, case: Case, kill: Callable[[int], float], ended: set[psutil.Process]
) -> None:
    """End one of two searchers, and wait until it has been replaced."""

    def running() -> list[psutil.Process]:  # a later process may have the number of an ended one
        return sorted({*searchers()} - ended, key=lambda process: process.pid)

    def all_started() -> bool:  # until the run knows it, `runtime.start_deadline` holds
        return len(running()) == run.searchers.stats.latest["searchers/running"] == 2

    until(all_started, 120, every=0.1)
    restarts = restarts_of(run)
    chosen = case.pick(running())
    ended.add(chosen)
    limit = kill(chosen.pid)
    began = time.monotonic()
    with case.attempt():
        until(lambda: restarts_of(run) > restarts, limit + 20, every=0.02)
        assert case.noticed(time.monotonic() - began) < limit


def nothing_is_lost_or_doubled(run: Run) -> None:
    """Every prompt that was gathered is there once with all its samples, the others are out.

    Those in quarantine are neither, and they are counted.
    """
    assert conserved(run.buffer)
    columns = run.buffer.columns()
    assert all(columns.count[columns.rows(p)].sum() == ANSWERS for p in columns.prompts)
    gathered = run.buffer.prompts
    generated = run.searchers.stats.counts["samples_generated"]
    assert run.buffer.counts["added"] == ANSWERS * gathered == generated
    cursor, limit = run.searchers.state().cursor, run.config.reward.quarantine
    deaths = cursor.get("deaths", {})
    aside = {name for name, count in deaths.items() if 0 < limit <= count}
    assert len(aside) == run.searchers.stats.counts["searchers/quarantined"]
    out = [name for name in cursor["outstanding"] if name not in aside]
    assert cursor["state"]["chosen"] == gathered + len(out) + len(aside)
    assert not {*out, *aside} & {g.prompt.id for g in run.buffer.groups()}


def survives_ended_searchers(
    case: Case, model: Path, folder: Path, kills: int, deadline: float, *settings: str
) -> None:
    """So many of two searchers are ended in a run, which is then stopped, and resumed with one.

    A killed one is noticed within 5 s, a stopped one within its deadline and 2 s. Every second case
    has the default quarantine, which may set a prompt aside that was searched at two ends.
    """
    common = (
        "runtime.searchers=2", "runtime.cores=share", f"runtime.task_deadline={deadline}",
        "runtime.fresh=1", "runtime.max_restarts=1000", "run.steps=1000000", "task.size=20000",
        "eval.prompts=0", "checkpoint.every=50",
    )  # fmt: skip
    quarantine = () if case.index % 2 else ("reward.quarantine=0",)
    failures: list[BaseException] = []
    ended: set[psutil.Process] = set()

    def kill(pid: int) -> float:
        time.sleep(float(case.rng.exponential(0.5)))
        stop = case.rng.random() < 0.3
        os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
        return deadline + 2 if stop else 5.0

    def attack(run: Run) -> None:
        try:
            assert wait_until(lambda: run.step > 0, 90)
            for _ in range(kills):
                ended_by(run, case, kill, ended)
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    chosen = config(model, folder, *common, *quarantine, *settings)
    run = run_and_keep(chosen, meanwhile=attack)
    if failures:
        raise failures[0]
    assert restarts_of(run) >= len(ended) == kills  # a busy machine may be late itself
    nothing_is_lost_or_doubled(run)
    assert case.left(len(alive(searchers()))) == 0
    steps = run.step + 20
    again = run_and_keep(_config([f"run.steps={steps}", "runtime.searchers=1"], folder), folder)
    nothing_is_lost_or_doubled(again)
    assert again.step == steps


@pytest.mark.timeout(900)
@cases(9, full=20)
def test_killed_and_stopped_searchers_lose_and_double_nothing(case, tiny_model, tmp_path):
    slow = (
        "engine=scripted", "engine.answers=['1','2','3','4','5','6']", "engine.latency=0.3",
        "engine.tail=0.5", "engine.own_reference=true",
    )  # fmt: skip
    survives_ended_searchers(case, tiny_model, tmp_path / "run", 10, 6.0, *slow)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
@pytest.mark.timeout(900)
@cases(9, full=2, part=1)
def test_killed_and_stopped_searchers_with_vllm_lose_and_double_nothing(case, wide_model, tmp_path):
    own = ("engine=vllm", "engine.kv_cache_gib=0.1", "runtime.start_deadline=300")
    survives_ended_searchers(case, wide_model, tmp_path / "run", 3, 20.0, *own)
