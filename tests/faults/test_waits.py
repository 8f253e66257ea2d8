"""Every wait has a deadline, and what hangs is noticed within it."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from suite import Case, cases
from test_checkpoint import Slow, save
from test_isolation import guard_of, judge, misbehaving, reasons
from test_loop import config
from toy import Given
from waits import LIMITED, LIMITS, UNLIMITED, has_limit, may_wait, waits

from tba.run import open_run
from tba.runs.checkpoint import Checkpoints
from tba.runs.lock import locked
from tba.runtime.publisher import Publisher
from tba.tasks._tools import within

MARGIN = 2.0
"""Most seconds past its deadline after which a hang is noticed."""


@cases(12, full=1, quick=1)
def test_every_wait_has_a_limit_or_a_reason(case: Case) -> None:
    """Found in the source: joins, results, selects, reads of pipes, and calls to Ray."""
    every = list(waits())
    case.tried = case.survived = len(every)
    assert len(every) > 35
    assert {call for call, limited in every if not limited} <= UNLIMITED.keys()
    assert {call for call, limited in every if limited} <= LIMITED.keys()


def test_a_wait_without_a_limit_would_be_found() -> None:
    found = {
        "thread.join()": False, "thread.join(3)": True, "', '.join(names)": None,
        "queue.get()": False, "ray.get(x)": False, "ray.get(x, timeout=3)": True,
        "table.get(key)": None, "future.result()": False, "select.select(a, b, c)": False,
        "process.communicate()": False, "wait(futures)": False, "wait(futures, 3)": True,
        "changed.wait_for(done)": False, "changed.wait_for(done, 3)": True,
        "asyncio.wait(tasks)": False, "ray.put(x)": False, "queue.put(x)": None,
    }  # fmt: skip
    for text, limited in found.items():
        (statement,) = ast.parse(text).body
        assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        call = statement.value
        assert may_wait(call) == (limited is not None), text
        if limited is not None:
            assert (has_limit(call) or any(k.arg in LIMITS for k in call.keywords)) == limited


# Hangs

TIMES: list[float] = []


def began() -> None:
    TIMES[:] = [time.monotonic()]


def noticed() -> None:
    TIMES.append(time.monotonic())


def in_a_reward(seconds: float, model: Path, folder: Path) -> None:
    guard = guard_of(misbehaving(), deadline=seconds)
    try:
        assert reasons(judge(guard, ["warm"])) == [[4.0]]
        began()
        assert reasons(judge(guard, ["interpreter lock"])) == [["timeout"]]
        noticed()
    finally:
        guard.close()


def in_a_save(seconds: float, model: Path, folder: Path) -> None:
    trainer = Slow()
    checkpoints = Checkpoints(folder, keep=1, deadline=seconds, config={})
    try:
        save(checkpoints, trainer, 1)
        began()
        with pytest.raises(TimeoutError, match=r"checkpoint\.deadline"):
            checkpoints.wait()
        noticed()
    finally:
        trainer.go.set()
        checkpoints.wait()


def in_a_publication(seconds: float, model: Path, folder: Path) -> None:
    source = Given(ready=threading.Event())
    publisher = Publisher(lambda weights, since: None, lambda error: None, seconds)
    try:
        publisher.publish(source, 1)
        began()
        with pytest.raises(TimeoutError, match=r"runtime\.task_deadline"):
            publisher.finish()
        noticed()
    finally:
        assert source.ready is not None
        source.ready.set()
        publisher.close()


def in_a_search(seconds: float, model: Path, folder: Path) -> None:
    """In the trainer's process, between the searches of a batch, each of half a second."""
    settings = ("engine=scripted", "engine.latency=0.5", "runtime.prompts_per_task=1")
    slow = (f"runtime.gather_deadline={seconds}", "trainer.batch_size=240")
    with open_run(config(model, folder, *settings, *slow, "eval.prompts=0")) as opened:
        began()
        with pytest.raises(TimeoutError, match=r"runtime\.gather_deadline"):
            opened.train()
        noticed()


def in_a_tool(seconds: float, model: Path, folder: Path) -> None:
    released = threading.Event()
    began()
    assert within(seconds, [lambda: released.wait(60), lambda: 3]) == [None, 3]
    noticed()
    released.set()


def of_another_run(seconds: float, model: Path, folder: Path) -> None:
    began()
    with locked(folder), pytest.raises(ValueError, match="in use"), locked(folder, wait=seconds):
        pass
    noticed()


HANGS: tuple[Callable[[float, Path, Path], None], ...] = (
    in_a_reward, in_a_save, in_a_publication, in_a_search, in_a_tool, of_another_run,
)  # fmt: skip


@cases(12, full=30, quick=len(HANGS), part=12)
def test_a_hang_is_noticed_within_its_deadline_and_two_seconds(
    case: Case, tiny_model: Path, tmp_path: Path
) -> None:
    seconds = float(case.rng.uniform(0.3, 1.5))
    HANGS[case.index % len(HANGS)](seconds, tiny_model, tmp_path)
    first, last = TIMES
    assert case.noticed(last - first - seconds) < MARGIN
