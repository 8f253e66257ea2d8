"""Ranks of a trainer that die, hang or fail: the run goes on from its newest checkpoint."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from build import children, conserved, goes_on, nothing_is_left, ray_config, steps
from suite import cases, command_of

import tba
from tba.config.schema import Config
from tba.errors import TrainerLost
from tba.open import run
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import newest
from tba.runs.folder import CHECKPOINTS, METRICS, WARNINGS, read
from tba.runs.generations import damage, generations, step_of
from tba.runs.summary import Summary
from tba.runtime import ranks

AGAIN = 45.0
"""Most seconds from a fault until the next step, on idle cores."""
STEPS = 14
ANSWERS = 4
SETTINGS = (
    "trainer.devices=2", f"run.steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=100",
    "task.size=20000", "eval.prompts=0", "objective=broken.Broken", "engine=scripted",
    "engine.answers=['1','2','3','4','5','6']", "engine.latency=0.05", "engine.own_reference=true",
)  # fmt: skip
MOMENTS = {
    "forward": (6, 12),
    "backward": (3, 9),
    "optimizer": (3, 9),
    "publication": (3, 5),
    "saving": (3, 5),
    "loading": (1, 1),
}
"""Calls in which a rank is killed, at each moment: after the first checkpoint."""


@dataclass
class Watch:
    """What a run does about faults: when it notices them, and when it takes steps."""

    folder: Path
    marks: Path
    noticed: list[float] = field(default_factory=list)
    stepped: list[float] = field(default_factory=list)
    processes: list[psutil.Process] = field(default_factory=list)
    spoilt: list[Path] = field(default_factory=list)
    """Checkpoints that the test has damaged."""

    def faults(self) -> list[float]:
        """Return the times of the faults."""
        return [float(path.read_text()) for path in sorted(self.marks.iterdir())]

    def delays(self) -> list[float]:
        """Return the seconds from each fault until it was noticed."""
        return [min(t for t in self.noticed if t > fault) - fault for fault in self.faults()]

    def look(self) -> None:
        """Find the ranks, and check that no part of a checkpoint is visible."""
        for process in children():
            if "RankActor" in " ".join(command_of(process)):
                self.processes.append(process)
        visible = {*generations(self.folder / CHECKPOINTS)} - {*self.spoilt}
        assert not any(map(damage, visible))


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch(tmp_path / "run", tmp_path / "marks")
    watch.marks.mkdir()

    class Noticed(TrainerLost):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            watch.noticed.append(time.monotonic())
            watch.look()

    def step(trainer: Any, *arguments: Any, step: Any = ranks.ShardedTrainer.step) -> Any:
        watch.look()
        metrics = step(trainer, *arguments)
        watch.stepped.append(time.monotonic())
        return metrics

    monkeypatch.setattr(ranks, "TrainerLost", Noticed)
    monkeypatch.setattr(ranks.ShardedTrainer, "step", step)
    return watch


def config(model: Path, watch: Watch, *settings: str) -> Config:
    own = (f"objective.marks={watch.marks}", f"objective.checkpoints={watch.folder / CHECKPOINTS}")
    return ray_config(model, watch.folder, *SETTINGS, *own, *settings)


def restarts(folder: Path) -> list[dict[str, Any]]:
    """Return the warnings of restarts, each with the step from which the run went on."""
    return [row for row in read(folder / WARNINGS) if row["key"].startswith("lost ranks")]


def nothing_is_lost_or_doubled(folder: Path) -> None:
    """Each step is there once; samples are in the buffer, or their prompts in flight."""
    buffer = ReplayBuffer()
    newest_one = newest(folder / CHECKPOINTS)
    buffer.load(newest_one)
    state = json.loads((newest_one / "state.json").read_text())
    assert steps(folder) == [*range(1, step_of(newest_one) + 1)]
    assert conserved(buffer)
    generated = state["stats"]["counts"]["samples_generated"]
    assert generated == buffer.counts["added"] == ANSWERS * buffer.prompts
    out = state["cursor"]["outstanding"]
    assert state["cursor"]["state"]["chosen"] == buffer.prompts + len(out)
    assert not {*out} & {g.prompt.id for g in buffer.groups()}


def waits_for_new_groups(folder: Path, groups: int) -> None:
    """No step after a restart before so many groups have arrived."""
    rows = {row["step"]: row for row in read(folder / METRICS) if "loss" in row}
    for restart in restarts(folder):
        before, after = (rows[restart["step"] + n]["samples_generated"] for n in (0, 1))
        assert after - before >= ANSWERS * groups


@pytest.mark.timeout(600)
@cases(27, full=20)
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(case, tiny_model, watch):
    """At a random moment; while a rank loads, another one is killed."""
    moment = list(MOMENTS)[case.index % len(MOMENTS)]
    first, last = MOMENTS[moment]
    rank, call = int(case.rng.integers(2)), int(case.rng.integers(first, last + 1))
    faults = f"{moment} kill {rank} {call}"
    if moment == "loading":
        faults = f"forward kill {int(case.rng.integers(2))} 9,{faults}"
    share = f"objective.share={case.rng.uniform()}"
    chosen = config(tiny_model, watch, f"objective.faults={faults}", share)
    with case.attempt(), nothing_is_left() as processes:
        summary = run(chosen)
        processes += watch.processes
        count = len(watch.faults())
        assert summary.trainer_restarts == len(restarts(watch.folder)) == count
        assert f"rank {rank}" in restarts(watch.folder)[-1]["text"]
        assert case.noticed(max(watch.delays())) < 2
        last_fault = watch.faults()[-1]
        assert min(t for t in watch.stepped if t > last_fault + 2) - last_fault < AGAIN
    nothing_is_lost_or_doubled(watch.folder)
    waits_for_new_groups(watch.folder, chosen.trainer.groups)
    goes_on(watch.folder, "trainer.devices=1")


HANGS = {"stop": 2.0, "sleep": 2.0, "raise": -4.0}
"""Most seconds after `trainer.deadline` in which a fault is noticed."""


@pytest.mark.timeout(600)
@cases(27, full=6, part=3)
def test_a_rank_that_stops_sleeps_or_raises_is_ended_at_the_deadline(case, tiny_model, watch):
    fault = list(HANGS)[case.index % len(HANGS)]
    moment = case.pick(["forward", "backward", "optimizer"])
    rank = int(case.rng.integers(2))
    deadline = 15.0  # also of the first groups, while searchers still load their models
    faults = f"objective.faults={moment} {fault} {rank} 6"
    with case.attempt(), nothing_is_left() as processes:
        run(config(tiny_model, watch, faults, f"trainer.deadline={deadline}"))
        processes += watch.processes
        (restart,) = restarts(watch.folder)
        assert f"{rank}" in restart["text"].partition("of the trainer")[0]
        late = watch.delays()[0] - deadline
        assert late < HANGS[fault]
        if fault != "raise":
            case.noticed(max(0.0, late))
    nothing_is_lost_or_doubled(watch.folder)


@pytest.mark.timeout(600)
@cases(27, full=1)
def test_a_run_without_restarts_left_ends_with_a_sound_checkpoint(case, tiny_model, watch, caplog):
    """A damaged file is then named, and the checkpoint before it is used."""
    faults = "objective.faults=optimizer kill 1 4,forward kill 0 9"
    given = config(tiny_model, watch, faults, "runtime.max_restarts=1")
    with nothing_is_left() as processes:
        with pytest.raises(TrainerLost, match=f"rank 0 .*1 restart.*\n.*--resume {watch.folder}"):
            run(given)
        processes += watch.processes
    sound = generations(watch.folder / CHECKPOINTS)
    assert len(sound) > 1 and not any(map(damage, sound))
    of_a_rank = sorted(sound[-1].glob("optimizer*.safetensors"))[-1]
    watch.spoilt.append(sound[-1])
    of_a_rank.write_bytes(of_a_rank.read_bytes()[:-1] + b"?")
    run(given, watch.folder)
    assert f"DAMAGED CHECKPOINT {sound[-1].name}: {of_a_rank.name}" in caplog.text
    nothing_is_lost_or_doubled(watch.folder)


@pytest.mark.timeout(600)
@cases(27, full=2)
def test_a_checkpoint_that_a_rank_cannot_finish_is_never_visible(case, tiny_model, watch):
    """The disk is full while it writes, which ends the run; or it is killed between two files."""
    fault = ("full", "kill")[case.index]
    given = config(tiny_model, watch, f"objective.faults=file {fault} 0 3")
    if fault == "full":
        with pytest.raises(OSError, match=r"No space left.* With free space, `tba train --resume"):
            run(given)
        watch.look()
        run(given, watch.folder)
    else:
        assert run(given).trainer_restarts == 1
    nothing_is_lost_or_doubled(watch.folder)


@pytest.mark.timeout(600)
@cases(27, full=1)
def test_a_run_that_was_started_from_python_is_restarted_with_its_rows(case, tiny_model, watch):
    rows = [{"prompt": f"{i}+1="} for i in range(2000)]
    given = config(tiny_model, watch, "objective.faults=forward kill 1 9").nested()
    del given["task"]
    folder = tba.train(given, data=rows, reward=_length).folder
    assert Summary.read(folder).trainer_restarts == 1
    assert steps(folder) == [*range(1, STEPS + 1)]


def _length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


@pytest.mark.timeout(600)
@cases(27, full=1)
def test_a_run_without_a_checkpoint_does_not_begin_anew(case, tiny_model, watch):
    now = ("objective.faults=forward raise 1 3", "checkpoint.every=0", "objective.checkpoints=")
    given = config(tiny_model, watch, *now)
    with pytest.raises(TrainerLost, match=r"no checkpoint yet: remove its folder"):
        run(given)
