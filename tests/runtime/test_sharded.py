"""Runs whose trainer is divided over two ranks on this machine."""

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import ray
import torch
from build import newest_files, ray_config, replayed, run_and_keep
from safetensors.torch import load_file
from torch import distributed

from tba.config.schema import DEFAULT, load
from tba.config.tables import RuntimeTable
from tba.errors import TrainerLost
from tba.learn.trainer import MicroBatchResult
from tba.open import run
from tba.prompt import Prompt
from tba.runs.checkpoint import newest
from tba.runs.folder import CHECKPOINTS, METRICS, read
from tba.runtime.cluster import Connection
from tba.runtime.deadline import bind_ray
from tba.runtime.placement import Place
from tba.runtime.ranks import RankActor, ShardedTrainer, _gather
from tba.tools.report import report
from tba.weights import Publication

TWO = (
    "trainer.devices=2", "runtime.lag=0", "runtime.publish_every=1", "runtime.searchers=1",
    "checkpoint.every=2",
)  # fmt: skip


def test_a_run_of_two_ranks(tiny_model, tmp_path, monkeypatch):
    """They meet where only this user enters, and take turns with two searchers (lag = 0).

    All is on policy, both searchers have work, and none has too much. A new reference arrives in
    its turn, and so do values. In tests/learn/test_divided.py, any number of ranks goes on from a
    checkpoint.
    """
    bind_ray(None)
    from tba.runtime.pool import SearcherHandle

    folder = tmp_path / "run"
    met: list[Path] = []
    given: Counter[int] = Counter()
    search = SearcherHandle.search

    def step(trainer: Any, *given: Any, step: Any = ShardedTrainer.step) -> Any:
        met.append(Path(trainer._meeting))
        assert met[0].stat().st_mode & 0o777 == 0o700 and (met[0] / "store").stat().st_size > 0
        return step(trainer, *given)

    def counting(self: SearcherHandle, prompts: list[Prompt], *rest: Any) -> None:
        given[id(self)] += len(prompts)
        search(self, prompts, *rest)

    monkeypatch.setattr(ShardedTrainer, "step", step)
    monkeypatch.setattr(SearcherHandle, "search", counting)
    changing = (
        "runtime.searchers=2", "runtime.cores=share", "strategy=recent", "run.steps=5",
        "policy.reset_reference_every=3", "trainer.learning_rate=1e-2", "objective=vineppo",
        "objective.step_tokens=1", "objective.rollouts=2",
    )  # fmt: skip
    ended = run_and_keep(ray_config(tiny_model, folder, *TWO, *changing))
    assert len(met) == 5 and not met[0].exists()
    rows = [row for row in read(folder / METRICS) if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, 6)]
    assert min(row["batch/imbalance"] for row in rows) >= 0
    assert max(row["sync/logp_gap"] for row in rows) < 1e-4
    assert "2 ranks, the longest" in report([folder]).read_text("utf-8")
    assert [row["off_policy/lag_max"] for row in rows] == [0] * 5
    assert [row["samples_generated"] for row in rows] == [12 * (step + 1) for step in range(1, 6)]
    on_reference = [step for step, row in enumerate(rows) if abs(row["log_ratio"]) < 1e-4]
    assert on_reference == [0, 3]
    # three prompts a turn: two for one of them, one for the other
    assert sum(given.values()) == 18 and min(given.values()) >= 5
    for trajectory in (t for g in ended.buffer.groups() for t in g.trajectories):
        assert trajectory.value is not None and np.isfinite(trajectory.value).all()
        assert len(trajectory.value) == len(trajectory.tokens)


def test_ranks_exchange_numbers_and_unpickle_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed.distributed_c10d, "_unpickler", None)
    store = distributed.FileStore(str(tmp_path / "store"))
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    metrics = {"loss": torch.tensor([0.1, -1e-30]), "full": torch.tensor([True, False])}
    first, second = _gather([MicroBatchResult(metrics, 3, 1), MicroBatchResult({}, 2, 2)])
    monkeypatch.setattr("tba.runtime.ranks.MAX_BYTES_SENT", 10)
    with pytest.raises(RuntimeError, match="bytes, more than a trainer rank sends"):
        _gather([MicroBatchResult(metrics, 3, 1)])
    distributed.destroy_process_group()
    assert first.metrics.keys() == metrics.keys() and (first.tokens, first.padding) == (3, 1)
    for name, values in metrics.items():
        assert first.metrics[name].double().equal(values.double())
    assert second == MicroBatchResult({}, 2, 2)


@pytest.mark.slow
def test_a_resumed_run_of_two_ranks_equals_the_uninterrupted_one(tiny_model, tmp_path):
    """Bit for bit, in lockstep with one searcher."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(ray_config(tiny_model, whole, *TWO, "run.steps=4"))
    run(ray_config(tiny_model, part, *TWO, "run.steps=2"))
    run(ray_config(tiny_model, part, *TWO, "run.steps=4"), resume=part)
    assert replayed(whole) == replayed(part)
    one, other = newest_files(whole), newest_files(part)
    written = [name for name in one if re.match(r"(model/model|optimizer)-.*safetensors", name)]
    assert len(written) == 4
    for name in written:
        assert one[name] == other[name], name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_like_one_process(tmp_path):
    """20 steps of the default task at its rate, in lockstep, with one searcher."""
    rows: list[list[dict[str, float]]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for devices in (1, 2):
        folder = tmp_path / f"{devices}"
        lockstep = ("runtime.lag=0", "runtime.searchers=1", "runtime.publish_every=1")
        quiet = ("eval.every=0", "eval.prompts=0", "log.console=off", "run.steps=20")
        run(
            load(DEFAULT, [f"run.folder={folder}", f"trainer.devices={devices}", *lockstep, *quiet])
        )
        rows.append([row for row in read(folder / METRICS) if "loss" in row])
        files = (newest(folder / CHECKPOINTS) / "model").glob("*.safetensors")
        weights.append({n: t for file in files for n, t in load_file(file).items()})
    one, two = weights
    assert one.keys() == two.keys()
    for name, tensor in two.items():
        assert (tensor - one[name]).norm() < 1e-4 * one[name].norm(), name
    computed = (
        "loss", "reward", "kl", "kl/k3", "entropy", "grad_norm", "log_ratio", "off_policy/ess",
    )  # fmt: skip
    for alone, divided in zip(*rows, strict=True):
        for name in computed:
            assert divided[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-4), name


def test_ranks_drop_copies_whose_functions_no_longer_exist():
    """A newer publication replaces one that waits; a copy that is being sent is kept."""

    class Source:
        def copy_rows(self, version: int, is_reference: bool) -> Any:
            return lambda: Publication(version, None)

    rank: Any = RankActor(Place("meta"), {})
    rank._trainer = Source()
    trainer: Any = ShardedTrainer.__new__(ShardedTrainer)
    trainer._numbers, trainer._unsent = count(), WeakValueDictionary()
    trainer._call = lambda method, _, *given, passed: rank.copy(*given)
    first = trainer.copy(version=4)
    assert rank.send_rows(0).version == 4 and trainer._unsent[0] is first
    waiting = trainer.copy(version=5)
    assert [*rank._copies] == [1]
    del first, waiting
    newest = trainer.copy(version=6)
    assert [*rank._copies] == [2] and rank.send_rows(2).version == 6
    assert [*trainer._unsent.values()] == [newest]


def test_all_threads_report_the_rank_that_died_first(tmp_path):
    """All ranks end when rank 1 dies: a call of another thread, to rank 0 only, fails for this."""
    connection = Connection(RuntimeTable(), ranks=2)

    class Rank:
        def wait(self) -> None:
            time.sleep(600)

    trainer: Any = ShardedTrainer.__new__(ShardedTrainer)
    trainer._calls, trainer._meeting, trainer._lost = connection.calls, tmp_path / "ranks", None
    trainer._deadline = 600.0
    trainer._ranks = [ray.remote(Rank).remote() for _ in range(2)]
    limit = 600.0, "trainer.deadline", ()
    try:
        with ThreadPoolExecutor(1) as pool:
            one = [trainer._ranks[0].wait.remote]
            joining = pool.submit(trainer._wait, one, "publish", *limit)
            ray.kill(trainer._ranks[1])
            for call in (partial(trainer._call, "wait", "write"), joining.result):
                with pytest.raises(TrainerLost, match="process of rank 1 of the trainer has died"):
                    call()
    finally:
        connection.close()
