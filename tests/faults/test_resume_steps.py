"""A run resumes exactly: from every step, on several searchers, whatever the wall clock says."""

import ast
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from build import config, end_alike, newest_files, ray_config, replayed
from suite import cases, source_nodes
from toy import Ones

from tba.cli import _config
from tba.open import open_run, run
from tba.prompt import Answer, Prompt
from tba.run import Run
from tba.runs.folder import CHECKPOINTS, METRICS, read
from tba.runs.generations import generations, path_of
from tba.runtime.ray import RaySearchers

STEPS = 30
CONFIGS: dict[str, tuple[str, ...]] = {
    "tb": ("strategy=mixture",),
    "rloo published every third step": ("objective=rloo", "runtime.publish_every=3"),
    "a head": ("objective=tb_learned_z", "strategy=recent"),
    "values by rollouts": ("objective=vineppo", "objective.step_tokens=2", "objective.rollouts=2"),
    "adapters": ("policy.lora.r=4", "policy.lora.alpha=8"),
    "new references": ("policy.reset_reference_every=4", "selection=difficulty"),
    "a constant lag": ("runtime.lag=2", "strategy=recent", "objective=ppo"),
    "a full buffer": ("replay.per_prompt=4", "replay.capacity=24", "strategy=uniform"),
}


def settings_of(name: str) -> tuple[str, ...]:
    plain = (f"run.steps={STEPS}", "eval.every=10", "checkpoint.every=0", "log.sample_every=5")
    return (*plain, "trainer.learning_rate=1e-3", *CONFIGS[name])


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """For a config: a run that never saved before its end, and one that kept every step."""
    folder = tmp_path_factory.mktemp("runs")

    def carried_out(name: str) -> tuple[Path, Path]:
        whole, kept = folder / name / "whole", folder / name / "kept"
        if not kept.exists():
            run(config(tiny_model, whole, *settings_of(name)))
            saves = ("checkpoint.every=1", f"checkpoint.keep={STEPS + 1}")
            run(config(tiny_model, kept, *settings_of(name), *saves))
        return whole, kept

    return carried_out


@cases(1, full=STEPS * len(CONFIGS))
def test_a_run_resumes_exactly_from_every_step(case, runs, tmp_path):
    """Thirty steps of eight configs; the process ended after the step, and wrote what came next."""
    step = case.index // len(CONFIGS) + 1
    whole, kept = runs(list(CONFIGS)[case.index % len(CONFIGS)])
    killed = tmp_path / "killed"
    shutil.copytree(kept, killed, ignore=lambda _, names: {*names} & {CHECKPOINTS})
    generation = path_of(kept / CHECKPOINTS, step)
    shutil.copytree(generation, path_of(killed / CHECKPOINTS, step))
    assert run(_config(["checkpoint.every=0"], killed), killed).steps == STEPS
    end_alike(whole, killed)


@dataclass(frozen=True)
class Picky(Ones):
    """Rejects all answers to every third prompt."""

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        if sum(map(ord, prompt.id)) % 3 == 0:
            return [None for _ in answers]
        return super().score(prompt, answers)


def stop_within_a_search(run: Run, step: int) -> None:
    """Stop a run at a step or soon after, when a part of what it waits for has arrived."""
    searchers = run.searchers
    assert isinstance(searchers, RaySearchers)

    class StopWithinSearch:
        @property
        def requested(self) -> bool:
            run.stop.requested |= run.step >= step and searchers._arrived() > 0
            return run.stop.requested

    stop: Any = StopWithinSearch()
    searchers._job = replace(searchers._job, stop=stop)


@pytest.mark.timeout(600)
@cases(2, full=6, part=3)
def test_a_run_with_several_searchers_in_lockstep_resumes_exactly(case, tiny_model, tmp_path):
    """One, two and four searchers. The order in which they end must not matter.

    Some prompts are rejected, and others take their place. The first session is stopped while they
    search: something has arrived, and something not.
    """
    searchers, stop = (1, 2, 4)[case.index % 3], 2 + case.index // 3
    settings = (
        "runtime.lag=0", f"runtime.searchers={searchers}", "runtime.publish_every=1",
        "runtime.prompts_per_task=2", "runtime.cores=share", "trainer.batch_size=40",
        "strategy=recent", "trainer.learning_rate=1e-3", "eval.prompts=0",
        "task=test_resume_steps.Picky", "reward.max_rejected=1",
    )  # fmt: skip
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(ray_config(tiny_model, whole, *settings, "run.steps=6"))
    with open_run(ray_config(tiny_model, part, *settings, "run.steps=6")) as first:
        stop_within_a_search(first, stop)
        assert not first.train().finished
    run(_config([], part), part)
    assert replayed(whole) == replayed(part)
    one, other = newest_files(whole), newest_files(part)
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        assert one[name] == other[name], name


@cases(7, full=10)
def test_a_clock_that_jumps_changes_nothing(case, tiny_model, tmp_path, monkeypatch):
    """By up to a year, forwards or backwards, at every look."""
    settings = ("run.steps=12", "checkpoint.every=3", "trainer.learning_rate=1e-3")
    run(config(tiny_model, tmp_path / "whole", *settings))
    wall, year = time.time, 365 * 24 * 3600.0
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: wall() + case.rng.uniform(-year, year))
        run(config(tiny_model, tmp_path / "jumped", *settings, "run.steps=6"))
        run(_config(["run.steps=12"], tmp_path / "jumped"), tmp_path / "jumped")
    end_alike(tmp_path / "whole", tmp_path / "jumped")


WALL_CLOCK = {
    "tba/runs/status.py": "how long ago a run was written to",
    "tba/runs/folder.py": "since when a folder is held",
    "tba/setup/checks.py": "the name of a new folder",
    "tba/runs/summary.py": "when a session began, to be read by a person",
    "tba/agents/wire.py": "when a reply was made, as OpenAI's API says it",
}


@cases(7, full=1, quick=1)
def test_no_deadline_is_of_the_wall_clock(case):
    """Every other time is of a clock that never jumps."""
    wall = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
    calls = [(file, node) for file, node in source_nodes() if isinstance(node, ast.Call)]
    users = {file for file, node in calls if ast.unparse(node.func) in wall}
    assert users <= WALL_CLOCK.keys()


@cases(26, full=16, quick=1, part=8)
def test_an_evaluation_never_touches_training(case, tiny_model, tmp_path):
    """Evaluated at every step or only at the ends: the same weights, buffer and prompts to come."""
    chosen = settings_of(list(CONFIGS)[case.index % len(CONFIGS)])
    often = (f"eval.samples={1 + case.index % 3}", "eval.k=[]")
    small = ("run.steps=10", "checkpoint.every=4")
    run(config(tiny_model, tmp_path / "never", *chosen, *small, "eval.every=0"))
    run(config(tiny_model, tmp_path / "often", *chosen, *small, "eval.every=1", *often))
    one, other = (newest_files(tmp_path / name) for name in ("never", "often"))
    weights = [name for name in one if name.startswith("model/") and "safetensors" in name]
    assert weights
    for name in (*weights, "optimizer.safetensors", "trainer.json"):
        assert one[name] == other[name], name
    assert replayed(tmp_path / "never") == replayed(tmp_path / "often")
    cursors = [json.loads(files["state.json"])["cursor"] for files in (one, other)]
    assert cursors[0] == cursors[1]
    evaluated = [r for r in read(tmp_path / "often" / METRICS) if "eval/greedy_reward" in r]
    assert len(evaluated) == 11
    (newest,) = generations(tmp_path / "often" / CHECKPOINTS)[-1:]
    assert newest.name == "step-00000010"
    held_out = {f"{i}+2" for i in range(20)}
    content = [row[0] for row in replayed(tmp_path / "often")]
    prompts = {each.id for each in content if isinstance(each, Prompt)}
    assert prompts and not prompts & held_out
