"""Many faults in a row: nothing grows, and a run that cannot go on ends with a checkpoint."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hostile
import numpy as np
import psutil
import pytest
from build import as_settings, config, conserved, goes_on, ray_config
from fakes import count
from suite import carry_out, cases, forked

from tba.cli import _config
from tba.engines.scripted import Scripted
from tba.engines.transformers import Transformers
from tba.errors import EngineError, SearchError
from tba.open import open_run, run
from tba.runs.folder import CHECKPOINTS, METRICS, read
from tba.runs.generations import damage, generations
from tba.types import Completion, Sampling
from tba.weights import Weights


@dataclass
class Failing(Scripted):
    """Engine that fails at every so many calls, or at all from one on; it counts them."""

    folder: str = ""
    every: int = 10**9
    start: int = 10**9

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        number = count(Path(self.folder))
        if number >= self.start or number % self.every == self.every - 1:
            raise EngineError("out of memory")
        return super().generate(prompts, sampling, seed)


# Soak


@dataclass
class Usage:
    """Memory in MB, descriptors, threads and processes of a run, again and again."""

    process: psutil.Process
    rows: list[tuple[float, int, int, int]] = field(default_factory=list)

    def look(self) -> None:
        p = self.process
        with p.oneshot():
            memory, files, threads = p.memory_full_info().uss / 1e6, p.num_fds(), p.num_threads()
        self.rows.append((memory, files, threads, len(p.children(recursive=True))))

    def growth(self) -> np.ndarray:
        """How much the median of the last third is above that of the second one.

        What a reward function has started may stay for a while, which a median leaves out.
        """
        third = len(self.rows) // 3
        looked = np.array(self.rows, float)
        return np.median(looked[2 * third :], 0) - np.median(looked[third : 2 * third], 0)


@pytest.mark.timeout(1800)
@cases(14, full=2, part=1)
def test_nothing_grows_in_a_long_run_with_faults(case, tiny_model, tmp_path):
    """Thousands of steps, with over a hundred hostile rewards; the buffer is full after a few."""
    steps = (2500, 12000)[case.index]
    bad = [k for k in hostile.KINDS if not k.startswith(("sleeps", "waits", "holds", "returns no"))]
    rows = [{"prompt": f"{i}+1=", "kind": ""} for i in range(steps)]
    places = case.rng.choice(steps - 200, 110, replace=False) + 100
    for place in places.tolist():
        rows[place]["kind"] = case.pick(bad)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "run"
    chosen = as_settings(
        config(
            tiny_model, folder, "task=custom", f"task.data={tmp_path}/rows.jsonl",
            f"task.reward={hostile.__file__}:score", "task.held_out_size=4", "eval.every=100",
            f"run.steps={steps}", "reward.isolate=process", "reward.deadline=0.2",
            "reward.max_rejected=1.0", "reward.max_memory=1", "engine=scripted",
            "engine.own_reference=true",
            "trainer.batch_size=4", "replay.capacity=400", "checkpoint.every=100",
            "log.sample_every=0", "eval.prompts=2",
        )
    )  # fmt: skip
    with forked(carry_out, chosen) as process:
        usage = Usage(psutil.Process(process.pid))
        while process.is_alive() and not read(folder / METRICS)[10:]:
            time.sleep(0.2)
        while process.exitcode is None:
            try:
                usage.look()
            except psutil.NoSuchProcess:
                break
            process.join(0.5)
        process.join(60)
        assert process.exitcode == 0
    rejected = json.loads((folder / "summary.json").read_text())["rejected"]
    case.tried = case.survived = len(places)
    assert len(usage.rows) >= 30
    assert sum(rejected.values()) >= 100, rejected
    memory, files, threads, children = usage.growth()
    assert memory < 20 and files <= 2 and threads <= 1 and children <= 1, usage.growth()


# Restarts, stragglers, and searchers that do not take new weights


@cases(20, full=5, quick=1, part=2)
def test_a_storm_of_restarts_ends_with_a_checkpoint_and_a_name(case, tiny_model, tmp_path):
    """An engine that fails for good after some calls; when it works again, the run goes on."""
    folder, calls = tmp_path / "run", tmp_path / "calls"
    start = int(case.rng.integers(3, 9))
    settings = (
        "engine=test_long_runs.Failing", f"engine.folder={calls}", f"engine.start={start}",
        "eval.prompts=0", "run.steps=12",
    )  # fmt: skip
    began = time.monotonic()
    with (
        open_run(config(tiny_model, folder, *settings)) as opened,
        pytest.raises(EngineError, match="out of memory"),
    ):
        opened.train()
    case.noticed(time.monotonic() - began)
    newest = generations(folder / CHECKPOINTS)[-1]
    assert newest.name == f"step-{opened.step:08d}" and damage(newest) == {}
    summary = run(_config(["engine.start=1000000"], folder), folder)
    assert summary.finished and conserved(opened.buffer)


@pytest.mark.timeout(600)
@cases(20, full=2, part=1)
def test_a_storm_on_ray_ends_with_a_checkpoint(case, tiny_model, tmp_path, caplog):
    """A searcher that fails for good after some searches. When it works again, the run goes on, and
    no prompt is lost."""
    folder, calls = tmp_path / "run", tmp_path / "calls"
    start, restarts = int(case.rng.integers(3, 9)), 3 + case.index
    settings = (
        "engine=test_long_runs.Failing", f"engine.folder={calls}", f"engine.start={start}",
        "engine.latency=0.05", "engine.own_reference=true", "runtime.concurrent_searches=1",
        f"runtime.max_restarts={restarts}", "runtime.fresh=1", "run.steps=1000000",
        "task.size=20000", "eval.prompts=0", "reward.quarantine=0",
    )  # fmt: skip
    ends = rf"out of memory(.|\n)* after runtime\.max_restarts = {restarts} restarts"
    with (
        open_run(ray_config(tiny_model, folder, *settings)) as opened,
        pytest.raises(EngineError, match=ends),
    ):
        opened.train()
    case.tried = case.survived = opened.searchers.stats.counts["searchers/restarts"]
    told = [r.getMessage() for r in caplog.records if "its tasks are issued again" in r.msg]
    assert len(told) == restarts
    newest = generations(folder / CHECKPOINTS)[-1]
    assert newest.name == f"step-{opened.step:08d}" and damage(newest) == {}
    goes_on(folder, "engine.start=1000000")


@cases(18, full=10, quick=1)
def test_stragglers_and_a_full_buffer_lose_and_double_nothing(case, tiny_model, tmp_path):
    """Searches whose time is spread over three orders of magnitude, a buffer of a batch or two."""
    capacity = int(case.rng.integers(4, 30))
    settings = (
        "engine=scripted", "engine.answers=['1','2','3','4','5','6']", "engine.latency=0.003",
        "engine.tail=1.5", f"replay.capacity={capacity}", "replay.per_prompt=4",
        "runtime.prompts_per_task=1", "eval.prompts=0", "run.steps=20", f"run.seed={case.index}",
    )  # fmt: skip
    with open_run(config(tiny_model, tmp_path / "run", *settings)) as opened:
        summary = opened.train()
    counts = opened.buffer.counts
    assert summary.finished and conserved(opened.buffer) and len(opened.buffer) <= capacity
    assert counts["added"] == summary.samples_generated == 21 * 12
    assert counts["evicted_capacity"] > 0


@dataclass
class Stale(Transformers):
    """Engine that keeps its first weights and says that it has the new ones."""

    def load_weights(self, weights: Weights) -> float | None:
        kept = {n: p.detach().numpy().copy() for n, p in self.model.named_parameters()}
        super().load_weights(weights)
        own = {name: kept[name] for name in weights.arrays}
        return super().load_weights(Weights(weights.version, own, weights.probe))


@cases(19, full=5, quick=1)
def test_an_engine_that_never_takes_new_weights_is_noticed(case, tiny_model, tmp_path):
    """Its log-probs are then not the trainer's: the run ends."""
    settings = (
        "engine=test_long_runs.Stale", "eval.prompts=0", f"run.seed={case.index}",
        "policy.autocast=off", "trainer.learning_rate=3e-2", "run.steps=30",
        f"runtime.publish_every={1 + case.index % 2}",
    )  # fmt: skip
    with (
        open_run(config(tiny_model, tmp_path / "run", *settings)) as opened,
        pytest.raises(SearchError, match=r"loads or caches weights"),
    ):
        opened.train()
    steps = [row for row in read(tmp_path / "run" / METRICS) if "loss" in row]
    case.noticed(steps[-1]["time"] if steps else 0.0)
    assert len(steps) < 10
    assert opened.searchers.stats.counts["searchers/restarts"] == 0
    assert damage(generations(tmp_path / "run" / CHECKPOINTS)[-1]) == {}
