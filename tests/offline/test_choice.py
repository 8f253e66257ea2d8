"""Which checkpoint is kept, evaluated and exported; evaluations of models without a run."""

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from build import config
from safetensors.torch import load_file

import tba
from tba.config.schema import load
from tba.offline.eval import evaluate_model, evaluate_run, export
from tba.offline.rollouts import write_rollouts
from tba.open import run
from tba.runs.checkpoint import best_step, choose_checkpoint, score_of, without_better
from tba.runs.folder import METRICS, read
from tba.runs.generations import generations, path_of, step_of
from tba.runtime.local import LocalSearchers
from tba.search.result import Evaluation

EVERY_TWO = ("eval.every=2", "checkpoint.every=2", "checkpoint.keep=1")


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with checkpoints of steps 2, 4, 6 and 8, all evaluated but never equal."""
    folder = tmp_path_factory.mktemp("choice") / "run"
    run(config(tiny_model, folder, "eval.every=2", "checkpoint.every=2", "checkpoint.keep=4"))
    return folder


def rescored(folder: Path, copy: Path, scores: dict[int, float]) -> Path:
    """Copy a run, with these scores for its evaluations."""
    shutil.copytree(folder, copy)
    rows = read(copy / METRICS)
    for row in rows:
        if "eval/sampled_pass@1" in row:
            row["eval/sampled_pass@1"] = scores[row["step"]]
    (copy / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return copy


def kept(folder: Path) -> list[int]:
    return [step_of(generation) for generation in generations(folder / "checkpoints")]


def test_the_best_step_has_the_highest_score_and_a_checkpoint():
    assert best_step({0: 0.9, 4: 0.5, 2: 0.5, 6: 0.4}) == 2
    assert best_step({0: 0.9, 4: 0.5, 2: 0.5, 6: 0.4}, kept=[4, 6]) == 4
    assert best_step({0: 0.9, 4: 0.5, 2: 0.5, 6: 0.4}, kept=[6]) == 2
    assert best_step({0: 0.9}) is None
    assert best_step({}) is None


def test_an_evaluation_without_any_score_is_never_the_best():
    none = {"sampled_reward": 0.0, "sampled_rejected": 1.0}
    scores = {0: score_of({"sampled_reward": -2.0}), 2: score_of(none)}
    scores[4] = score_of({"sampled_reward": -1.0, "sampled_rejected": 0.5})
    assert best_step(scores) == 4 and without_better(scores, 0) == 0
    assert score_of({**none, "sampled_pass@1": 0.0}) < 0


def test_rounding_makes_no_score_better():
    scores = {2 * i: score_of({"sampled_reward": r}) for i, r in enumerate((0.3, 0.1 + 0.2, 0.2))}
    assert best_step(scores) == 2 and without_better(scores, 0) == 2


def test_a_step_is_chosen_for_evaluation_and_export(ended, tmp_path):
    folder = rescored(ended, tmp_path / "run", {0: 1.0, 2: 0.1, 4: 0.8, 6: 0.3, 8: 0.2})
    steps = [step_of(choose_checkpoint(folder, step)) for step in (None, "best", "6", 2)]
    assert steps == [8, 4, 6, 2]
    scores = evaluate_run(folder, [], reference=False, step="best")
    assert scores["model"].endswith("step-00000004/model")
    (row,) = (r for r in read(ended / METRICS) if r["step"] == 4 and "eval/sampled_reward" in r)
    for name in ("sampled_pass@1", "greedy_reward", "sampled_reward"):
        assert scores[name] == row[f"eval/{name}"]
    own = load_file(path_of(folder / "checkpoints", 6) / "model" / "model.safetensors")
    out = load_file(export(folder, tmp_path / "out", step="6") / "model.safetensors")
    newest = load_file(path_of(folder / "checkpoints", 8) / "model" / "model.safetensors")
    assert all(out[name].equal(tensor) for name, tensor in own.items())
    assert not all(out[name].equal(tensor) for name, tensor in newest.items())
    write_rollouts(folder, with_step := tmp_path / "step.jsonl", step=2)
    write_rollouts(folder, newest_rows := tmp_path / "newest.jsonl", None)
    assert with_step.read_text() != newest_rows.read_text()
    best = load_file(path_of(folder / "checkpoints", 4) / "model" / "model.safetensors")
    model = tba.result(folder).model("best").state_dict()
    assert all(model[name].equal(tensor) for name, tensor in best.items())


def test_a_checkpoint_that_is_not_there_or_damaged_is_refused(ended, tmp_path):
    folder = rescored(ended, tmp_path / "run", {0: 1.0, 2: 0.1, 4: 0.8, 6: 0.3, 8: 0.2})
    steps = f"{folder} has checkpoints of steps 2, 4, 6, 8"
    with pytest.raises(ValueError, match=f"--step 3: no such checkpoint; .*; {steps}"):
        choose_checkpoint(folder, 3)
    none = "no such checkpoint; give the number of a step"
    with pytest.raises(ValueError, match=f"--step last: {none}, or best"):
        choose_checkpoint(folder, "last")
    with pytest.raises(ValueError, match=r"--reference evaluates .* leave out --step"):
        evaluate_run(folder, [], reference=True, step="best")
    model = path_of(folder / "checkpoints", 6) / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"--step 6: .* is damaged: model/model.safetensors"):
        choose_checkpoint(folder, "6")
    shutil.rmtree(path_of(folder / "checkpoints", 4))
    with pytest.raises(ValueError, match=r"--step best: no such checkpoint; .*keep_best=true"):
        choose_checkpoint(folder, "best")
    (folder / METRICS).write_text("")
    with pytest.raises(ValueError, match=f"--step best: {none}"):
        choose_checkpoint(folder, "best")


def test_the_best_checkpoint_is_kept(tiny_model, tmp_path, monkeypatch):
    """Beside the newest one, in a run that is stopped and resumed; without the key it is not."""
    best, give = 2, LocalSearchers.evaluations

    def scored(searchers: LocalSearchers, finish: bool = False) -> list[Evaluation]:
        evaluations = give(searchers, finish)
        for e in evaluations:
            e.scores["sampled_pass@1"] = 0.9 if e.version == best else 0.1 + e.version / 100
        return evaluations

    monkeypatch.setattr(LocalSearchers, "evaluations", scored)
    for keep_best, expected in (("true", {best, 8}), ("false", {8})):
        folder = tmp_path / keep_best
        settings = (*EVERY_TWO, f"checkpoint.keep_best={keep_best}")
        run(config(tiny_model, folder, *settings, "run.steps=4"))
        run(config(tiny_model, folder, *settings), folder)
        assert set(kept(folder)) == expected
    assert step_of(choose_checkpoint(tmp_path / "true", "best")) == best


def test_a_checkpoint_is_kept_until_its_evaluation_has_ended(tiny_model, tmp_path, monkeypatch):
    """As on Ray, where evaluations end later: here none does before the end."""
    give = LocalSearchers.evaluations

    def late(searchers: LocalSearchers, finish: bool = False) -> list[Evaluation]:
        return give(searchers, finish) if finish else []

    monkeypatch.setattr(LocalSearchers, "evaluations", late)
    folder = tmp_path / "run"
    run(config(tiny_model, folder, *EVERY_TWO, "checkpoint.keep_best=true"))
    assert kept(folder) == [2, 4, 6, 8]
    assert choose_checkpoint(folder, "best") in generations(folder / "checkpoints")


REFUSED = {
    ("eval.every=3", "checkpoint.every=2"): "needs checkpoint.every=3",
    ("checkpoint.every=0",): "needs checkpoint.every=2",
    ("runtime.publish_every=4",): "needs runtime.publish_every=2",
    ("eval.prompts=0",): "needs held-out prompts, by eval.prompts=128",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_the_best_cannot_be_kept_without_checkpoints_of_what_is_evaluated(
    tiny_model, tmp_path, settings
):
    own = (*EVERY_TWO, "checkpoint.keep_best=true", *settings)
    with pytest.raises(ValueError, match=r"checkpoint.keep_best need") as error:
        run(config(tiny_model, tmp_path / "run", *own))
    assert REFUSED[settings] in str(error.value)
    assert not (tmp_path / "run").exists()


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_completions_are_written(ended, tmp_path):
    more = [
        "task.sources.more={use='toy.Ones',weight=0,held_out_size=3}",
        "eval.prompts_per_task=2",
    ]
    path = tmp_path / "completions.jsonl"
    scores = evaluate_run(ended, more, reference=False, completions=path)
    rows = written(path)
    assert len(rows) == (5 + 3) * (1 + 2)  # prompts, with a greedy and two sampled answers
    for name, start in (("", ""), ("more", "more/")):
        for mode, count in (("greedy", 1), ("sampled", 2)):
            own = [row for row in rows if (row["set"], row["mode"]) == (name, mode)]
            assert scores[f"{start}{mode}_reward"] == pytest.approx(fmean(r["reward"] for r in own))
            assert scores[f"{start}{mode}_length"] == pytest.approx(fmean(r["tokens"] for r in own))
            assert {row["reward"] == float("1" in row["completion"]) for row in own} == {True}
            prompts = [row["prompt"] for row in own]
            assert prompts == sorted(prompts) and len(prompts) == count * len(set(prompts))
    assert rows[0].keys() >= {"id", "finished", "measures"}
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "absent")
    for taken in (path, link):
        with pytest.raises(ValueError, match=r"--completions .*: give a new file in a folder"):
            evaluate_run(ended, [], reference=False, completions=taken)


def test_a_models_folder_is_evaluated_with_a_config(ended, tmp_path):
    """With the scores of the run that it comes from; it is its own reference."""
    of_run = evaluate_run(ended, [], reference=False)
    model = export(ended, tmp_path / "model")
    settings = ["policy.lora.r=4", "policy.model=./not-used"]
    plain = {name: keys for name, keys in load(ended).nested().items() if name != "policy"}
    (tmp_path / "run.json").write_text(json.dumps(plain))
    path = tmp_path / "completions.jsonl"
    scores = evaluate_model(str(model), load(tmp_path / "run.json", settings), path)
    timed = {"run", "model", "seconds", "sampled_log_ratio"}
    assert scores.keys() == of_run.keys() - {"run", "sampled_log_ratio"}
    for name in of_run.keys() - timed:
        assert scores[name] == of_run[name], name
    assert (len(written(path)), scores["model"]) == (15, str(model))
    with pytest.raises(ValueError, match=r"a model needs a config with \[task\]: type `tba eval "):
        evaluate_model(str(model), load(None, ["eval.samples=5"]))


def test_an_adapter_is_refused_with_what_to_type(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="evaluate the whole model, which `tba export RUN FOLDER`"):
        evaluate_model(str(tmp_path), load(None, ["task=arithmetic"]))
