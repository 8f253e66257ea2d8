"""How long a run trains: `run.steps`, `run.epochs`, and `eval.patience`."""

import json
import shutil
from pathlib import Path

import pytest
from build import stopped

import tba
from tba.config.schema import Config, load
from tba.open import run
from tba.runs.checkpoint import without_better
from tba.runs.generations import generations, step_of
from tba.setup.checks import stored_config
from tba.setup.setup import check

SMALL = [
    "runtime.use=local", "task.train_size=41", "task.held_out_size=8", "eval.prompts=8",
    "eval.samples=2", "eval.k=[2]", "sampling.samples=4", "trainer.batch_size=8",
    "trainer.group_size=4", "log.console=off", "log.report_to=[]",
    "reward.isolate=none",
]  # fmt: skip


@pytest.mark.parametrize(("epochs", "steps"), [("1", 21), ("0.5", 11), ("2", 41), ("3.0", 62)])
def test_epochs_are_whole_passes_rounded_up(epochs, steps):
    """41 prompts, two in a batch."""
    config = check(load(None, [*SMALL, f"run.epochs={epochs}"])).config
    assert (config.run.steps, config.run.epochs) == (steps, None)
    assert load(None, [f"run.{k}={v}" for k, v in config.nested()["run"].items() if k == "steps"])


def test_what_depends_on_the_steps_is_checked_when_they_are_known():
    schedule = ["trainer.schedule=warmup_stable_decay", "trainer.warmup_steps=15"]
    settings = [*SMALL, *schedule, "trainer.decay_steps=15"]
    assert check(load(None, [*settings, "run.epochs=2"])).config.run.steps == 41
    with pytest.raises(ValueError, match=r"decay_steps = 15 needs run\.steps=30 or more"):
        check(load(None, [*settings, "run.epochs=1"]))


def test_epochs_are_refused_beside_steps(tmp_path):
    told = r"^run\.epochs = 2\.0 needs run\.steps unset, or another value of run\.epochs$"
    with pytest.raises(ValueError, match=told):
        load(None, ["run.epochs=2", "run.steps=9"])
    with pytest.raises(ValueError, match=told):
        Config(run={"epochs": 2, "steps": 9})
    file = tmp_path / "run.toml"
    file.write_text("[run]\nsteps = 9\n")
    assert load(file, ["run.epochs=2"]).run.epochs == 2  # a setting takes the place of the file's
    file.write_text("[run]\nepochs = 2\n")
    assert load(file, ["run.steps=9"]).run.epochs is None


@pytest.mark.parametrize(
    ("scores", "since", "count"),
    [
        ({}, 0, 0),
        ({0: 0.5}, 0, 0),
        ({0: 0.5, 10: 0.5, 20: 0.4}, 0, 2),
        ({0: 0.5, 10: 0.6, 20: 0.4}, 0, 1),
        ({20: 0.4, 10: 0.6, 0: 0.5, 30: 0.6}, 0, 2),  # in any order; an equal one is no better
        ({0: 0.5, 10: 0.5, 20: 0.4, 30: 0.5}, 20, 1),
    ],
)
def test_evaluations_after_the_best_are_counted(scores, since, count):
    assert without_better(scores, since) == count


def test_a_run_ends_when_its_patience_does_and_goes_on_when_resumed(tmp_path, capsys):
    """With a learning rate that changes nothing, no evaluation is better than the first."""
    own = ["eval.patience=2", "eval.every=3", "checkpoint.every=3", "trainer.learning_rate=1e-12"]
    folder = tmp_path / "run"
    settings = [*SMALL, *own, "run.steps=15", f"run.folder={folder}", "log.console=lines"]
    summary = tba.train(load(None, settings)).summary
    assert (summary.finished, summary.steps) == (True, 6)
    assert summary.ended == "eval.patience = 2"
    assert json.loads((folder / "summary.json").read_text())["ended"] == summary.ended
    assert [step_of(g) for g in generations(folder / "checkpoints")] == [3, 6]
    assert "ended by" in capsys.readouterr().out
    again = tba.train(load(folder), folder).summary
    assert (again.finished, again.steps) == (True, 12)
    whole = tba.train(load(folder, ["eval.patience="]), folder).summary
    assert (whole.finished, whole.steps, whole.ended) == (True, 15, "")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one step that was continued for another."""
    folder = tmp_path_factory.mktemp("length") / "run"
    run(load(None, [*SMALL, "run.steps=1", f"run.folder={folder}"]))
    more = stored_config(folder, ["run.steps=2", "eval.every=1"])
    assert not [text for text in run(more, folder).warnings if "other held-out prompts" in text]
    return folder


def test_a_run_that_goes_on_has_no_summary_of_its_earlier_end(two_steps, tmp_path, monkeypatch):
    folder = shutil.copytree(two_steps, tmp_path / "run")
    with tba.open_run({"run": {"steps": 4}}, resume=folder) as opened:
        assert tba.result(folder).summary.steps == 2  # until its first step

        def fail() -> None:
            raise RuntimeError("a failure after step 3")

        monkeypatch.setattr(opened, "log_evaluations", fail)
        with pytest.raises(RuntimeError, match="after step 3"):
            opened.train()
    assert tba.result(folder).metrics()["step"].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"has no summary\.json yet"):
        _ = tba.result(folder).summary


def test_a_run_that_was_stopped_keeps_its_patience(tmp_path):
    """It ends where the uninterrupted one does, and the best checkpoint is kept."""
    own = ["eval.patience=2", "eval.every=3", "checkpoint.every=3", "trainer.learning_rate=1e-12"]
    folder = tmp_path / "run"
    config = load(None, [*SMALL, *own, "run.steps=30", f"run.folder={folder}"])
    assert not stopped(config, 4).finished
    assert tba.train(load(folder), folder).summary.steps == 6


@pytest.mark.parametrize("order", [1, -1])
def test_patience_that_is_added_later_keeps_the_best_checkpoint_too(order, two_steps):
    folder = two_steps
    assert not load(folder).checkpoint.keep_best
    assert stored_config(folder, ["eval.patience=2", "eval.every=50"]).checkpoint.keep_best
    assert stored_config(folder, given={"eval": {"patience": 2, "every": 50}}).checkpoint.keep_best
    tables = {"eval": {"patience": 2, "every": 50}, "checkpoint": {"keep_best": False}}
    explicit = stored_config(folder, given=dict([*tables.items()][::order]))
    assert (explicit.eval.patience, explicit.checkpoint.keep_best) == (2, False)


@pytest.mark.parametrize(
    "setting", ["eval.prompts=7", "eval.temperature=0.7", "task.held_out_size=7"]
)
def test_a_resume_with_other_held_out_prompts_is_told_once(setting, two_steps, tmp_path):
    folder = shutil.copytree(two_steps, tmp_path / "run")
    for steps, change in ((3, setting), (4, "eval.every=50")):
        summary = run(stored_config(folder, [f"run.steps={steps}", change]), folder)
        told = [text for text in summary.warnings if "other held-out prompts" in text]
        assert len(told) == 1
    assert told[0].startswith("since step 2, ")


def test_patience_needs_evaluations():
    with pytest.raises(ValueError, match=r"eval\.patience needs eval\.every"):
        load(None, ["eval.patience=2", "eval.every=0"])
    with pytest.raises(ValueError, match=r"eval\.patience needs held-out prompts"):
        check(load(None, [*SMALL, "eval.patience=2", "eval.prompts=0"]))
    assert load(None, ["eval.patience=2"]).checkpoint.keep_best
    assert not load(None, ["eval.patience=2", "checkpoint.keep_best=false"]).checkpoint.keep_best
