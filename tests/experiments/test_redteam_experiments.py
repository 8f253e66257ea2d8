"""The red-teaming experiments have the paper's settings, and go through with small stand-ins."""

import json
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import module_at

import tba
from tba.cli import train_command
from tba.config.schema import load
from tba.config.tables import PolicyTable
from tba.models.pretrained import load_text
from tba.offline.rollouts import read_rollouts
from tba.setup.setup import check
from tba.tools.study import check_study, read_study

ROOT = Path(__file__).parents[2]
FILES = {name: ROOT / f"experiments/redteam_{name}.toml" for name in ("gpt2", "llama1b")}
FILES |= {name: ROOT / f"experiments/redteam_{name}.toml" for name in ("gflownet", "small")}

PAPER: dict[str, Any] = {
    "run.steps": 5000,
    "policy.lora.r": 32, "policy.lora.alpha": 16,
    "task.use": "redteam", "task.answers": 5, "task.threshold": 0.5, "task.min_tokens": 5,
    "task.encoder": "sentence-transformers/all-MiniLM-L6-v2",
    "task.victim_max_tokens": 30, "task.victim_temperature": 0.7, "task.victim_top_p": 0.92,
    "sampling.samples": 128, "sampling.temperature": 1.0, "sampling.top_p": 1.0,
    "sampling.max_tokens": 20, "sampling.explore": [0.5, 2.0],
    "objective.use": "tb", "objective.beta": 0.05,
    "objective.tau.start": 2.0, "objective.tau.end": 1.0,
    "strategy.use": "mixture", "strategy.recent": 0.5,
    "strategy.reward": 0.5,  # of what is not recent, half by reward and half uniformly
    "strategy.temperature": 1.0, "strategy.window": 10,  # everything since the last sync
    "trainer.batch_size": 128, "trainer.group_size": 128, "trainer.learning_rate": 1e-4,
    "trainer.schedule": "linear", "trainer.warmup_steps": 100, "trainer.weight_decay": 0.1,
    "trainer.max_grad_norm": 1.0,
    "runtime.searchers": 3, "runtime.publish_every": 10, "runtime.lag": None,
    "runtime.max_reuse": math.inf,
    "eval.temperature": 1.0,
}  # fmt: skip
"""What both of the paper's runs have in common."""
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {
        "policy.model": "gpt2", "policy.lora.target_modules": ["c_attn"],
        "task.victim": "vicgalle/gpt2-alpaca", "task.victim_chat": False,
        "task.judge.use": "classifier", "task.judge.value": "probability",
        "task.judge.label": "hate",
        "task.judge.model": "facebook/roberta-hate-speech-dynabench-r4-target",
        "objective.tau.steps": 500, "objective.gamma": 1.0,
        "replay.per_prompt": 100_000, "replay.capacity": 100_000,
    },
    "llama1b": {
        "policy.model": "meta-llama/Llama-3.2-1B",
        "task.victim": "meta-llama/Llama-3.1-8B-Instruct", "task.victim_chat": True,
        "task.judge.use": "guard", "task.judge.model": "meta-llama/Llama-Guard-3-8B",
        "objective.tau.steps": 1000, "objective.gamma": {"start": 1.0, "end": 1.2, "steps": 2000},
        "replay.per_prompt": 150_000, "replay.capacity": 150_000,
    },
}  # fmt: skip


def tables(name: str) -> dict[str, Any]:
    return tomllib.loads(FILES[name].read_text())


def setting(given: dict[str, Any], key: str) -> Any:
    value: Any = given
    *path, last = key.split(".")
    for part in path:
        value = value[part]
    return value.get(last)


@pytest.mark.parametrize("name", OWN)
def test_settings_are_the_papers(name, fakes):
    """Of the config that would run, defaults included, but for what stand-ins replace."""
    checked = check(load(FILES[name], replaced(name, fakes))).config.nested()
    given = load(FILES[name]).nested()
    for key, value in (PAPER | OWN[name]).items():
        assert setting(given if key in fakes else checked, key) == value, key
    samples, fill = setting(checked, "sampling.samples"), setting(checked, "replay.first_fill")
    assert 3003 <= samples * fill < 3003 + samples
    assert setting(checked, "eval.prompts") * setting(checked, "eval.samples") == 1024


def test_the_baseline_differs_in_what_makes_it_one():
    ours, theirs = tables("gpt2"), tables("gflownet")
    assert theirs["objective"].pop("use") == "tb_learned_z"
    assert ours["objective"].pop("use") == "tb" and ours["objective"]["taper"] == "none"
    assert theirs["runtime"].pop("use") == "local"
    for key in ("searchers", "publish_every", "max_reuse"):
        del ours["runtime"][key]
    assert (theirs["strategy"].pop("window"), ours["strategy"].pop("window")) == (1, 10)
    assert ours == theirs


@pytest.fixture
def fakes(
    letters_model: Path,
    make_classifier: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, str]:
    """Small models in place of those on the hub, by key; each is of the kind that it stands for."""
    monkeypatch.chdir(ROOT)
    model = letters_model
    return {
        "policy.model": str(model),
        "policy.lora.target_modules": "['q_proj']",
        "task.victim": str(model),
        "task.encoder": str(model),
        "task.judge.model": str(make_classifier(model, labels=("fine", "hate"))),
    }


def replaced(name: str, fakes: dict[str, str]) -> list[str]:
    given = dict(fakes)
    if name == "small":  # its judge is a function
        del given["task.judge.model"]
    if name == "llama1b":
        given["task.judge.model"] = given["policy.model"]  # a guard is a causal model
    return [f"{key}={value}" for key, value in given.items()]


@pytest.mark.parametrize("name", FILES)
def test_a_dry_run_goes_through(name, fakes, capsys):
    """tools/test_dry_run.py loads a judge in a process of its own, which imports torch."""
    settings = [*replaced(name, fakes), "reward.isolate=none"]
    train_command([str(FILES[name]), *settings], dry_run=True)
    assert (
        "config OK (dry run): 1 training prompts, evaluating 8 of 8 held-out prompts"
        in capsys.readouterr().out
    )


def test_logged_attacks_have_the_columns_that_the_experiment_names(letters_model, tmp_path):
    (named,) = re.findall(r"file has the columns (.*?)\.", FILES["gpt2"].read_text())
    row = {"prompt": "ab", "completion": "ba", "reward": 0.5}
    assert set(re.findall("`(.*?)`", named)) == row.keys()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    text = load_text(PolicyTable(model=str(letters_model)))
    (group,) = read_rollouts(tmp_path / "rows.jsonl", text)
    assert [t.reward for t in group.trajectories] == [0.5]


@pytest.mark.slow
def test_the_small_one_runs(fakes, tmp_path):
    few = [
        f"run.folder={tmp_path / 'run'}", "run.steps=3", "runtime.use=local", "sampling.samples=4",
        "trainer.batch_size=4", "trainer.group_size=4", "eval.prompts=2", "eval.samples=3",
        "log.console=off", "log.report_to=[]", "task.victim_max_tokens=4",
    ]  # fmt: skip
    summary = tba.train(load(FILES["small"], [*replaced("small", fakes), *few])).summary
    assert (summary.finished, summary.steps, summary.samples_trained) == (True, 3, 12)
    assert summary.first.keys() >= {"sampled_pass@1", "sampled_distance", "stderr"}
    assert not summary.rejected


def test_the_study_compares_searchers_at_equal_steps(fakes):
    study = read_study(ROOT / "studies/redteam/study.toml", replaced("small", fakes))
    configs = check_study(study)
    runs = [(c.runtime.use, c.runtime.searchers, c.run.seed) for c in configs]
    assert runs == [("ray", searchers, seed) for searchers in (1, 2, 4) for seed in (0, 1)]
    assert {c.run.steps for c in configs} == {load(FILES["small"]).run.steps}
    assert study.table.metric == "sampled_pass@1"


def test_the_study_of_divergences_differs_in_alpha_only(fakes):
    configs = check_study(read_study(ROOT / "studies/redteam/alpha.toml", replaced("small", fakes)))
    given = [(c.objective.options.get("alpha", 1.0), c.run.seed) for c in configs]
    assert given == [(alpha, seed) for seed in (0, 1, 2) for alpha in (0.5, 1.0, 1.25)]
    assert {c.objective.options.get("taper", "none") for c in configs} == {"none"}


def test_the_judge_of_the_small_one():
    module = module_at(ROOT / "examples" / "sad_words.py")
    told = ["She smiled.", "She was sad.", '"I am Lost," he cried!', "a sadder nomad"]
    assert module.sad(told) == [0.0, 0.5, 0.75, 0.0]
