"""Whole runs: resuming is exact, damage is noticed, signals save, the summary adds up."""

import json
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from build import config, end_alike, newest_files, replayed, resumes_exactly
from safetensors.torch import load_file

import tba
import tba.stop
from tba.cli import _config
from tba.config.schema import load
from tba.engines.transformers import Transformers
from tba.errors import SearchError
from tba.learn.trainer import SingleTrainer
from tba.offline.eval import evaluate_run
from tba.open import run
from tba.replay.buffer import ReplayBuffer
from tba.runs import checkpoint
from tba.runs.folder import METRICS, read
from tba.search.result import Evaluation
from tba.setup.checks import check_resumed
from tba.setup.setup import check
from tba.types import Batch, Group

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.mark.parametrize(("objective", "publish_every"), [("tb", 1), ("rloo", 3)])
def test_a_resumed_run_equals_the_uninterrupted_one(tiny_model, tmp_path, objective, publish_every):
    """Model, optimizer, buffer, random states and cursor; killed between two publications, too."""
    settings = (f"objective={objective}", f"runtime.publish_every={publish_every}")
    resumes_exactly(tiny_model, tmp_path, "strategy=mixture", *settings)


def test_a_checkpoint_changes_nothing(tiny_model, tmp_path):
    """A run that saves at each step ends, bit for bit, like one that saves at its end only."""
    settings = ("objective=ppo", "strategy=recent", "runtime.lag=2")
    for name, every in (("whole", 0), ("part", 1)):
        own = (*settings, "policy.reset_reference_every=4", f"checkpoint.every={every}")
        run(config(tiny_model, tmp_path / name, *own))
    end_alike(tmp_path / "whole", tmp_path / "part")


def test_an_evaluation_lost_in_a_stop_is_made_again(tiny_model, tmp_path, monkeypatch):
    """No evaluation had ended by step 7: the resumed run makes one of version 7."""
    from tba.runtime.local import LocalSearchers

    metrics = tmp_path / "run" / METRICS
    with monkeypatch.context() as patch:
        patch.setattr(LocalSearchers, "evaluations", lambda self, finish=False: [])
        assert not run(config(tiny_model, tmp_path / "run", "run.steps=7")).finished
    assert [r["step"] for r in read(metrics) if "eval/greedy_pass@1" in r] == []
    assert run(_config(["run.steps=10"], tmp_path / "run"), tmp_path / "run").finished
    assert [r["step"] for r in read(metrics) if "eval/greedy_pass@1" in r] == [7, 9, 10]


def test_an_evaluation_that_ends_after_the_checkpoint_of_its_step_is_written_once(
    tiny_model, tmp_path, monkeypatch
):
    """Each ends a step late. A run that is killed later makes that of its checkpoint again."""
    from tba.runtime.local import LocalSearchers

    before: list[Evaluation] = []

    def late(self: LocalSearchers, finish: bool = False) -> list[Evaluation]:
        ended = [*before, *(self._evaluations if finish else ())]
        before[:] = self._evaluations
        self._evaluations = []
        return ended

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(LocalSearchers, "evaluations", late)
        run(config(tiny_model, folder, "run.steps=5", "checkpoint.every=3"))
    shutil.rmtree(checkpoint.newest(folder / "checkpoints"))  # as if killed after step 5
    run(_config([], folder), folder)
    rows = [r for r in read(folder / METRICS) if "eval/greedy_pass@1" in r]
    assert [r["step"] for r in rows] == [0, 3, 5]


def test_an_evaluation_whose_request_failed_is_made_again(tiny_model, tmp_path, monkeypatch):
    """The first one, of a run that is saved at step 0."""
    from tba.runtime.local import LocalSearchers

    def fail(self: LocalSearchers, *step: int) -> int:
        raise SearchError("no searcher is left")

    with monkeypatch.context() as patch, pytest.raises(SearchError):
        patch.setattr(LocalSearchers, "evaluate", fail)
        run(config(tiny_model, tmp_path / "run", "run.steps=2"))
    assert run(_config([], tmp_path / "run"), tmp_path / "run").finished
    rows = read(tmp_path / "run" / METRICS)
    assert [r["step"] for r in rows if "eval/greedy_pass@1" in r] == [0, 2]


def test_evaluations_of_one_version_are_logged_with_their_own_requests(
    tiny_model, tmp_path, monkeypatch
):
    """Those of steps 0 to 3 are of version 0. That of step 1 is left out before the first ends."""
    from tba.runtime.local import LocalSearchers

    def slow(self: LocalSearchers, finish: bool = False) -> list[Evaluation]:
        waiting = self._evaluations
        if finish or len(waiting) < 3:
            self._evaluations = [] if finish else waiting
            return waiting if finish else []
        first, second, *self._evaluations = waiting
        return [replace(second, scores={}), first]

    monkeypatch.setattr(LocalSearchers, "evaluations", slow)
    settings = ("run.steps=4", "eval.every=1", "runtime.publish_every=4")
    assert run(config(tiny_model, tmp_path / "run", *settings)).finished
    rows = [r for r in read(tmp_path / "run" / METRICS) if "eval/greedy_pass@1" in r]
    assert [(r["step"], r["requested"]) for r in rows] == [(0, 0), (0, 2), (0, 3), (4, 4)]
    times = [r["time"] for r in rows]
    assert times == sorted(set(times))


def test_any_error_of_a_searcher_is_raised_after_the_run_has_been_saved(
    tiny_model, tmp_path, monkeypatch
):
    from tba.runtime.local import LocalSearchers

    gather = LocalSearchers.gather

    def fail(self: LocalSearchers, at_least: int) -> list[Group]:
        if self._tasks == 9:
            raise MemoryError("CUDA out of memory")
        return gather(self, at_least)

    folder = tmp_path / "run"
    one_by_one = "runtime.prompts_per_task=1"
    told = rf"CUDA out of memory(.|\n)*--resume {folder}` continues from step 3"
    with monkeypatch.context() as patch, pytest.raises(SearchError, match=told) as error:
        patch.setattr(LocalSearchers, "gather", fail)
        run(config(tiny_model, folder, one_by_one))
    assert isinstance(error.value.__cause__, MemoryError)
    assert checkpoint.newest(folder / "checkpoints").name == "step-00000003"
    run(config(tiny_model, tmp_path / "whole", one_by_one))
    assert run(_config([], folder), folder).finished
    assert replayed(tmp_path / "whole") == replayed(folder)


def test_a_signal_ends_what_is_generated(tiny_model, tmp_path, monkeypatch):
    """The first evaluation, the first fill or a search between two steps: it is repeated."""
    monkeypatch.setattr(tba.stop, "TWICE", 0.01)
    generate, settings = Transformers.generate, ("run.steps=6", "runtime.prompts_per_task=1")
    calls = call = 0
    run(config(tiny_model, tmp_path / "whole", *settings))
    whole = newest_files(tmp_path / "whole")["model/model.safetensors"]

    def generate_until(self: Transformers, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the signal has ended nothing")
        return generate(self, *given)

    for call in (1, 4, 12):
        calls, folder = 0, tmp_path / f"{call}"
        with monkeypatch.context() as patch:
            patch.setattr(Transformers, "generate", generate_until)
            stopped = run(config(tiny_model, folder, *settings))
        assert not stopped.finished and calls == call and (stopped.steps == 0) == (call < 12)
        assert run(_config([], folder), folder).finished
        assert replayed(tmp_path / "whole") == replayed(folder), call
        assert newest_files(folder)["model/model.safetensors"] == whole, call


def test_a_signal_in_a_step_defers_the_evaluation_after_it(tiny_model, tmp_path, monkeypatch):
    """A stop may have seconds only: the evaluation is made after the run is resumed."""
    monkeypatch.setattr(tba.stop, "TWICE", 0.01)
    generate, step, folder = Transformers.generate, SingleTrainer.step, tmp_path / "run"
    is_stopped = False

    def step_and_signal(self: SingleTrainer, batch: Batch, number: int) -> dict[str, float]:
        nonlocal is_stopped
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
            is_stopped = True
        return step(self, batch, number)

    def generate_before(self: Transformers, *given: Any) -> Any:
        assert not is_stopped
        return generate(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(SingleTrainer, "step", step_and_signal)
        patch.setattr(Transformers, "generate", generate_before)
        assert run(config(tiny_model, folder, "eval.every=3", "run.steps=6")).steps == 3
    assert run(_config([], folder), folder).finished
    rows = [r["step"] for r in read(folder / METRICS) if "eval/greedy_pass@1" in r]
    assert rows == [0, 3, 6]


def test_a_resumed_run_has_the_optimizer_it_is_told_to_have(tiny_model, tmp_path):
    """Moments and the step of the schedule are kept; rate, betas and decay are those given."""
    folder = tmp_path / "run"
    first = ("run.steps=3", "trainer.learning_rate=0.1", "trainer.warmup_steps=2")
    run(config(tiny_model, folder, *first, "checkpoint.every=1", "checkpoint.keep=3"))
    for _ in range(2):  # as if killed after the first step
        shutil.rmtree(checkpoint.newest(folder / "checkpoints"))
    given = ["run.steps=3", "trainer.learning_rate=3e-3", "trainer.betas=[0.5, 0.9]"]
    told = _config([*given, "trainer.weight_decay=0.3"], folder)
    trainer = check(told).trainer("cpu")
    checkpoint.restore(checkpoint.newest(folder / "checkpoints"), trainer, ReplayBuffer(10, 100))
    (group,) = trainer.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.0015, (0.5, 0.9), 0.3)
    assert all(trainer.optimizer.state[p]["exp_avg"].abs().sum() > 0 for p in group["params"][:3])
    run(told, folder)
    rates = [r["learning_rate"] for r in read(folder / METRICS) if "loss" in r]
    assert rates == [0.0, 0.0015, 0.003]


def test_tensorboard_has_every_step_of_a_resumed_run_once(tiny_model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    settings = ("run.steps=6", "log.report_to=tensorboard", "checkpoint.every=4")
    run(config(tiny_model, folder, *settings))
    shutil.rmtree(checkpoint.newest(folder / "checkpoints"))  # as if killed after step 6
    run(_config(["run.steps=8"], folder), folder)
    told = EventAccumulator(str(folder / "tensorboard"))
    told.Reload()
    assert [event.step for event in told.Scalars("loss")] == list(range(1, 9))


def test_evaluating_without_prompts_is_told(tiny_model, tmp_path):
    run(config(tiny_model, tmp_path / "run", "run.steps=1", "eval.prompts=0"))
    with pytest.raises(ValueError, match=r"there are no held-out prompts; set eval\.prompts=128"):
        evaluate_run(tmp_path / "run", [], reference=False)


KEPT = {
    "sampling.temperature=0.5": r"but the run has 1\.0",
    "objective=vineppo": "the run has None",
    "policy.lora.r=2": r"policy\.lora = .*'r': 2.* but the run has None",
}


@pytest.mark.parametrize("change", KEPT)
def test_changes_that_the_buffer_cannot_follow_are_refused_on_resuming(change):
    with pytest.raises(ValueError, match=KEPT[change]):
        check_resumed(load(None, [change]), load(None))


def test_a_run_on_ray_goes_on_in_one_process_with_its_newest_weights(
    tiny_model, tmp_path, monkeypatch
):
    """Ray's checkpoints have no weights of the searchers, so those of the trainer are published."""
    from tba.runtime.local import LocalSearchers

    state = LocalSearchers.state
    with monkeypatch.context() as patch:
        patch.setattr(LocalSearchers, "state", lambda self: replace(state(self), weights=None))
        settings = ("run.steps=4", "runtime.publish_every=2", "strategy=recent")
        run(config(tiny_model, tmp_path / "run", *settings))
    run(_config(["run.steps=6"], tmp_path / "run"), tmp_path / "run")
    lags = [r["off_policy/lag_max"] for r in read(tmp_path / "run" / METRICS) if "loss" in r]
    assert lags[4:] == [0, 1]


def test_a_wrong_change_on_resuming_leaves_the_run_as_it_was(tiny_model, tmp_path):
    tiny_model = shutil.copytree(tiny_model, tmp_path / "model")
    run(config(tiny_model, tmp_path / "run", "run.steps=2"))
    folder = tmp_path / "run"
    both = r"config\.json of policy\.model, weights of policy\.model: changed"
    wrong = {"policy.model=bundled:arithmetic": both}
    wrong |= {"task.size=299": r"task\.size, training prompts: changed since the samples"}
    for setting, told in wrong.items():
        with pytest.raises(ValueError, match=told):
            run(_config([setting, "run.steps=3"], folder), folder)
    weights = tiny_model / "model.safetensors"
    as_they_were = weights.read_bytes()
    weights.write_bytes(as_they_were[:-64] + bytes(64))  # trained again
    with pytest.raises(ValueError, match=r"weights of policy\.model: changed since the samples"):
        run(_config(["run.steps=3"], folder), folder)
    weights.write_bytes(as_they_were)
    assert run(_config(["run.steps=3"], folder), folder).steps == 3
    assert _config([], folder).run.steps == 3


def test_equal_runs_write_equal_bytes(tiny_model, tmp_path):
    """Whatever the state of PyTorch's generator, and the order in which Python keeps names."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = ["policy.lora.r=2", f"policy.lora.target_modules={names}", "run.steps=1"]
    files = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        run(config(tiny_model, tmp_path / str(seed), *lora))
        files.append(newest_files(tmp_path / str(seed)))
        for name in ("state.json", "manifest.json"):  # seconds
            del files[-1][name]
    assert files[0] == files[1]
    settings = json.loads(files[0]["model/adapter_config.json"])
    assert settings["target_modules"] == sorted(names)


def test_the_same_seed_gives_the_same_run(tiny_model, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(config(tiny_model, tmp_path / name, f"run.seed={seed}"))
    a, b, c = (newest_files(tmp_path / name)["model/model.safetensors"] for name in "abc")
    assert a == b != c


def test_missing_and_cut_files_are_noticed_and_nothing_restarts_at_zero(tiny_model, tmp_path):
    run(config(tiny_model, tmp_path / "run", "checkpoint.keep=1"))
    (generation,) = checkpoint.generations(tmp_path / "run" / "checkpoints")
    weights = generation / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="a run never restarts at step 0 by itself"):
        run(_config([], tmp_path / "run"), tmp_path / "run")
    with pytest.raises(ValueError, match="nothing to resume"):
        checkpoint.newest(tmp_path / "elsewhere")


def test_summary_and_metrics_add_up(tiny_model, tmp_path):
    settings = ("checkpoint.keep=3", "checkpoint.every=2")
    summary = tba.train(config(tiny_model, tmp_path / "run", *settings)).summary
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {
        "eval/first", "eval/last", "seconds", "steps", "samples_generated", "samples_trained",
        "trainer_wait_fraction",
    } <= told.keys()  # fmt: skip
    assert {"lag_mean", "lag_max", "searcher_restarts", "rejected"} <= told.keys()
    for scores in (told["eval/first"], told["eval/last"]):
        assert {"greedy_pass@1", "sampled_pass@1", "stderr"} <= scores.keys()
    assert (summary.steps, summary.samples_trained) == (8, 96)
    assert summary.samples_generated == 9 * 12  # first fill and after each step
    assert (told["eval/first"]["step"], told["eval/last"]["step"]) == (0, 8)
    rows = read(tmp_path / "run" / METRICS)
    steps = [r for r in rows if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert [r["step"] for r in rows if "eval/greedy_pass@1" in r] == [0, 3, 6, 8]
    last = steps[-1]
    newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
    trained = load_file(newest / "model" / "model.safetensors")
    assert last["sync/bytes"] == sum(4 * tensor.numel() for tensor in trained.values())
    assert last["buffer/added"] == 108
    assert last["buffer/added"] == last["buffer/size"] + last["buffer/duplicates"]
    assert len(checkpoint.generations(tmp_path / "run" / "checkpoints")) == 3
