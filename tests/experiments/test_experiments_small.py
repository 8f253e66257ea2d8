"""The experiments that are no form of one of the paper's pass a dry run, and begin to train."""

import json
import re
from pathlib import Path

import pytest

import tba
from tba.cli import train_command
from tba.config.schema import load
from tba.setup.setup import check

ROOT = Path(__file__).parents[2]
NEEDS = {
    "chain_sum_smollm2": "reasoning_gym",
    "chain_sum_smollm2_lora": "reasoning_gym",
    "stories_sentiment": "vaderSentiment",
}
"""Experiments, and the library that each needs beside the package."""


@pytest.mark.parametrize("name", NEEDS)
def test_a_dry_run_goes_through(name, letters_model, monkeypatch, capsys):
    pytest.importorskip(NEEDS[name], reason="an extra: see pyproject.toml")
    monkeypatch.chdir(ROOT)
    train_command([f"experiments/{name}.toml", f"policy.model={letters_model}"], dry_run=True)
    out = capsys.readouterr().out
    counts = r"[\d,]+ training prompts, evaluating (\d+) of \1 held-out"
    assert re.search(rf"^config OK \(dry run\): {counts}", out, re.M)


@pytest.mark.parametrize("name", NEEDS)
def test_its_first_steps_run(name, letters_model, monkeypatch, tmp_path):
    pytest.importorskip(NEEDS[name], reason="an extra: see pyproject.toml")
    monkeypatch.chdir(ROOT)
    few = [
        f"policy.model={letters_model}", "run.steps=2",
        f"run.folder={tmp_path / 'run'}", "runtime.use=local", "trainer.warmup_steps=0",
        "sampling.samples=4", "trainer.batch_size=8", "trainer.group_size=4", "eval.prompts=4",
        "log.console=off", "log.report_to=[]",
    ]  # fmt: skip
    summary = tba.train(load(ROOT / f"experiments/{name}.toml", few)).summary
    assert (summary.finished, summary.steps, summary.samples_trained) == (True, 2, 16)
    assert not summary.rejected
    assert {"sampled_reward", "greedy_reward"} <= summary.first.keys() == summary.last.keys()


def test_the_smoke_run_of_one_gpu(letters_model, monkeypatch, tmp_path):
    """The two variants are settings in its first lines."""
    monkeypatch.setattr("tba.engines.vllm._check_installed", lambda config: None)
    row = {"question": "1 + 1?", "answer": "#### 2"}
    other = {"question": "1 + 2?", "answer": "#### 3"}
    for name, one in (("train", row), ("test", other)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(one) + "\n")
    file = (ROOT / "experiments" / "gpu_smoke").with_suffix(".toml")
    written = re.findall(r"^#   tba train \S+ (.+?) +# ", file.read_text(), re.M)
    variants = [line.split() for line in written]
    assert len(variants) == 2
    for settings in ([], *variants):
        local = [f"policy.model={letters_model}", f"task.data={tmp_path}", "eval.prompts=1"]
        local.append("task.allow_loss=1")  # the tokenizer has no capitals
        setup = check(load(file, [*settings, *local]))
        assert setup.engine.can_sleep and setup.config.runtime.colocate == "sleep"


def test_every_experiment_has_a_dry_run():
    """The tests name each file, or what it adds to a common beginning."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in (ROOT / "experiments").glob("*.toml"):
        names = {path.stem.removeprefix(start) for start in ("", "redteam_", "tldr_pythia")}
        assert any(f'"{name}"' in tests for name in names), path.name
