"""What hangs is noticed within its deadline."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import programs
import pytest
from build import Slow, Steps, config, guard_of, misbehaving, requests
from build import isolation_judge as judge
from build import isolation_reasons as reasons
from build import save_checkpoint as save
from fakes import Given
from suite import cases

from tba.engines._batch import RunningBatch
from tba.errors import ClusterLostError, EngineError
from tba.open import open_run
from tba.prompt import Prompt
from tba.runs.checkpoint import Checkpoints
from tba.runs.folder import locked
from tba.runtime import SearchJob
from tba.runtime.deadline import Calls, bind_ray
from tba.runtime.placement import Place
from tba.runtime.ray import Publisher
from tba.runtime.shared_memory import SharedMemory
from tba.scoring.scoring import Scoring, ScoringProcess
from tba.search.prompts import SearchState
from tba.search.result import SearchStats
from tba.setup.setup import check
from tba.tasks.custom import Custom

MARGIN = 2.0
"""Most seconds past its deadline after which a hang is noticed."""


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
    checkpoints = Checkpoints(folder, keep=1, deadline=seconds)
    try:
        began()
        save(checkpoints, trainer, 1)
        with pytest.raises(TimeoutError, match=r"trainer\.deadline"):
            while True:  # a train loop, in which no other save is due
                checkpoints.metrics()
                time.sleep(0.01)
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
    """In the trainer's process, between the searches of a batch, each of a tenth of a second."""
    settings = ("engine=scripted", "engine.latency=0.1", "runtime.prompts_per_task=1")
    slow = (f"trainer.deadline={seconds}", "trainer.batch_size=240")
    with open_run(config(model, folder, *settings, *slow, "eval.prompts=0")) as opened:
        began()
        with pytest.raises(TimeoutError, match=r"trainer\.deadline"):
            opened.searchers.gather(240 // opened.config.trainer.group_size)
        noticed()


def in_a_tool(seconds: float, model: Path, folder: Path) -> None:
    """One that holds the interpreter lock of the process that scores."""
    environment = f"{Path(programs.__file__)}:Mortal"
    task = partial(Custom, data="", passed=(len,), environment=environment)
    guard = Scoring({"": task()}, ScoringProcess({"": task}, 1.0), deadline=seconds)
    try:
        ((desk, _),) = guard.reset("", [Prompt("0", "?")], 99)
        began()
        (result,) = guard.call_tools("", [(desk, "freeze", {}, "", 99)])
        assert result.reason == "timeout"
        noticed()
    finally:
        guard.close()


def of_another_run(seconds: float, model: Path, folder: Path) -> None:
    began()
    with locked(folder), pytest.raises(ValueError, match="in use"), locked(folder, wait=seconds):
        pass
    noticed()


def in_an_engine(seconds: float, model: Path, folder: Path) -> None:
    """In a step, while a call waits for its response."""
    engine = Steps()
    engine.allowed.clear()
    batch = RunningBatch(lambda: engine, slots=1, in_flight=False, deadline=seconds)
    try:
        began()
        with pytest.raises(EngineError, match="no answer within"):
            batch.run(requests(1))
        noticed()
    finally:
        engine.allowed.set()
        batch.close()


def in_the_start_of_a_scoring_process(seconds: float, model: Path, folder: Path) -> None:
    """A judge that loads for ever."""
    task = Custom(data="", reward="", passed=(len,))

    def load() -> Custom:
        time.sleep(60)
        return task

    process = ScoringProcess({"": load}, 1.0, start_deadline=seconds)
    began()
    with pytest.raises(RuntimeError, match=r"runtime\.start_deadline"):
        Scoring({"": task}, process, 1.0).wait_until_ready()
    noticed()


def in_a_call_to_ray(seconds: float, model: Path, folder: Path) -> None:
    """One that does not return, as when Ray's own processes are stopped."""
    released, calls = threading.Event(), Calls(seconds)
    try:
        began()
        with pytest.raises(ClusterLostError, match=rf"not answer within {seconds:g} s"):
            calls("answer", released.wait, 60)
        noticed()
    finally:
        released.set()
        calls.close()


def in_all_searchers_on_ray(seconds: float, model: Path, folder: Path) -> None:
    """Ray answers, and no search ends."""
    bind_ray(None)
    from tba.runtime import ray
    from tba.runtime.cluster import Slot
    from tba.runtime.pool import Pool, SearcherHandle

    def start(pool: Pool, slot: Slot) -> None:
        pool.handles.append(SearcherHandle(slot, MagicMock(), 0, [], calls))

    def none_ended(refs: list[Any]) -> list[Any]:
        time.sleep(0.01)
        return []

    calls = Calls(60.0)
    settings = (f"trainer.deadline={seconds}", "eval.prompts=0", "runtime.use=ray")
    parts = check(config(model, folder, *settings))
    stream = parts.prompt_stream()
    job = SearchJob(parts.search_setup(), stream)
    cluster: Any = SimpleNamespace(
        connection=SimpleNamespace(calls=calls), transport=SharedMemory(), machine="here",
        searchers=[Slot(Place("cpu"), {})],
    )  # fmt: skip
    state = SearchState(stream.cursor(), 0, SearchStats(), None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "start", start)
        patch.setattr(ray, "ended", none_ended)
        searchers = ray.RaySearchers(job, cluster, False, state, None)
        try:
            began()
            with pytest.raises(TimeoutError, match=r"trainer\.deadline"):
                searchers.gather(1)
            noticed()
        finally:
            searchers.close()
            calls.close()


HANGS: tuple[Callable[[float, Path, Path], None], ...] = (
    in_a_reward, in_a_save, in_a_publication, in_a_search, in_a_tool, of_another_run, in_an_engine,
    in_the_start_of_a_scoring_process, in_a_call_to_ray, in_all_searchers_on_ray,
)  # fmt: skip


@cases(12, full=30, quick=len(HANGS), part=12)
def test_a_hang_is_noticed_within_its_deadline_and_two_seconds(case, tiny_model, tmp_path):
    seconds = float(case.rng.uniform(0.3, 1.5))
    HANGS[case.index % len(HANGS)](seconds, tiny_model, tmp_path)
    first, last = TIMES
    assert case.noticed(last - first - seconds) < MARGIN
