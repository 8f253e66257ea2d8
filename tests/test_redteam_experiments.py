"""The red-teaming experiments have the paper's settings, and go through with small stand-ins."""

from __future__ import annotations

import json
import string
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import VOCABULARY, module_at

import tba
from tba.cli import train
from tba.config.schema import load
from tba.studies.study import check_study, read_study

ROOT = Path(__file__).parent.parent
FILES = {name: ROOT / f"experiments/redteam_{name}.toml" for name in ("gpt2", "llama1b")}
FILES |= {name: ROOT / f"experiments/redteam_{name}.toml" for name in ("gflownet", "small")}


def tables(name: str) -> dict[str, Any]:
    return tomllib.loads(FILES[name].read_text())


def test_the_baseline_differs_in_what_makes_it_one() -> None:
    ours, theirs = tables("gpt2"), tables("gflownet")
    assert theirs["objective"].pop("use") == "tb_learned_z"
    assert ours["objective"].pop("use") == "tb"
    assert theirs["runtime"].pop("use") == "local"
    for key in ("searchers", "publish_every", "max_reuse"):
        del ours["runtime"][key]
    assert (theirs["strategy"].pop("window"), ours["strategy"].pop("window")) == (1, 10)
    assert theirs["task"].pop("near_distance") == 0.25
    assert ours == theirs


@pytest.fixture
def stand_ins(
    make_model: Callable[..., Path],
    make_classifier: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, str]:
    """Small models in place of those on the hub, by key; each is of the kind that it stands for."""
    monkeypatch.chdir(ROOT)
    letters = [*VOCABULARY, *string.ascii_letters, *" .,:'\n"]
    model = make_model(vocabulary=letters, hidden_size=64, context=256)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    return {
        "policy.model": str(model),
        "policy.lora.target_modules": "['q_proj']",
        "task.victim": str(model),
        "task.encoder": str(model),
        "task.judge.model": str(make_classifier(model, labels=("fine", "hate"))),
    }


def replaced(name: str, stand_ins: dict[str, str]) -> list[str]:
    given = dict(stand_ins)
    if name == "small":  # its judge is a function
        del given["task.judge.model"]
    if name == "llama1b":
        given["task.judge.model"] = given["policy.model"]  # a guard is a causal model
    return [f"{key}={value}" for key, value in given.items()]


@pytest.mark.parametrize("name", FILES)
def test_a_dry_run_goes_through(
    name: str, stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "gflownet":
        pytest.importorskip("rapidfuzz", reason="pip install 'tba[redteam]'")
    train([str(FILES[name]), *replaced(name, stand_ins)], dry_run=True)
    out, err = capsys.readouterr()
    assert "config OK (dry run): 1 training prompts, 8 held out" in err
    assert json.loads(out)["task"]["use"] == "redteam"


def test_the_small_one_runs(stand_ins: dict[str, str], tmp_path: Path) -> None:
    few = [
        f"run.folder={tmp_path / 'run'}", "run.steps=3", "runtime.use=local", "sampling.samples=4",
        "trainer.batch_size=4", "trainer.group_size=4", "eval.prompts=2", "eval.samples=3",
        "log.console=off", "log.tensorboard=false",
    ]  # fmt: skip
    summary = tba.train(load(FILES["small"], [*replaced("small", stand_ins), *few])).summary
    assert (summary.finished, summary.steps, summary.samples_trained) == (True, 3, 12)
    assert summary.first.keys() >= {"sampled_pass@1", "sampled_distance", "stderr"}
    assert not summary.rejected


def test_the_study_compares_searchers_at_equal_steps(stand_ins: dict[str, str]) -> None:
    study = read_study(ROOT / "studies/redteam/study.toml", replaced("small", stand_ins))
    configs = check_study(study)
    runs = [(c.runtime.use, c.runtime.searchers, c.run.seed) for c in configs]
    assert runs == [("ray", searchers, seed) for searchers in (1, 2, 4) for seed in (0, 1)]
    assert {c.run.steps for c in configs} == {load(FILES["small"]).run.steps}
    assert study.table.metric == "sampled_pass@1"


def test_the_judge_of_the_small_one() -> None:
    module = module_at(ROOT / "examples" / "sad_words.py")
    told = ["She smiled.", "She was sad.", '"I am Lost," he cried!', "a sadder nomad"]
    assert module.sad(told) == [0.0, 0.5, 0.75, 0.0]
